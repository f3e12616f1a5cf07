"""Published layers written from memory, in spellings that no rule of linexport was made from.

Each takes (B, T, 16), or tokens in multiples of ``unit``. Every module of this package registers
its layers.
"""

import importlib
import pkgutil

from tests.support.strangers.registry import STRANGERS, WIDTH, Stranger

__all__ = ["STRANGERS", "WIDTH", "Stranger"]

for _family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_family.name}")
