"""Modules of packages from PyPI: ``MODULES`` has all of them, by name."""

from tests.support.third_party import modules, unseen
from tests.support.third_party.registry import MODULES, WIDTH, ThirdParty

__all__ = ["MODULES", "WIDTH", "ThirdParty", "modules", "unseen"]
