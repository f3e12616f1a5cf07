"""Rules of operators on normal forms: one family of operators a file, found by scanning here."""

from __future__ import annotations

import importlib
import pkgutil


def load() -> None:
    """Import every file of this folder, which registers its rules."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
