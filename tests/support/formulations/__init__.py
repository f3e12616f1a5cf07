"""Linear attention as people write it: small modules, each in a style of its own.

``CAUSAL`` and ``BIDIRECTIONAL`` map names to formulations that must be recognised, ``OTHER`` those
that must not be, ``SEPARATE`` those whose numerator and denominator are two attentions. Each module
of this package is a family of them, and importing it registers them: all are imported here.
"""

import importlib
import pkgutil

from tests.support.formulations.notation import (
    BIDIRECTIONAL,
    CAUSAL,
    COLLECTED,
    HEADS,
    LONGEST,
    OTHER,
    SEPARATE,
    WIDTH,
    D,
    Formulation,
)

__all__ = [
    "BIDIRECTIONAL",
    "CAUSAL",
    "COLLECTED",
    "HEADS",
    "LONGEST",
    "OTHER",
    "SEPARATE",
    "WIDTH",
    "D",
    "Formulation",
]

for _family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_family.name}")
