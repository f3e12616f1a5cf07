"""Targets, one file each: how linexport ops are lowered, and how the result is opened and run."""

from __future__ import annotations

from linexport.targets.base import DTYPES, Build, Converted, Options, Session, Target, unchanged
from linexport.targets.registry import DEFAULT, Listing, find, listings, loaded

__all__ = [
    "DEFAULT",
    "DTYPES",
    "Build",
    "Converted",
    "Listing",
    "Options",
    "Session",
    "Target",
    "find",
    "listings",
    "loaded",
    "unchanged",
]
