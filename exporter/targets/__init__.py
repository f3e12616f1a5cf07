"""Targets, one file each: how linexport ops are lowered, and how the result is opened and run.

The list of targets comes from ``registry`` at once; what a target is made of is imported when it is
first used, so that the command line can list targets in its help.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from linexport.targets.registry import DEFAULT, Listing, find_target, listings, loaded

if TYPE_CHECKING:
    from linexport.targets.base import (
        DTYPES,
        Assemble,
        Build,
        Converted,
        Finishing,
        InferenceSession,
        Options,
        Target,
        unchanged,
    )

__all__ = [
    "DEFAULT",
    "DTYPES",
    "Assemble",
    "Build",
    "Converted",
    "Finishing",
    "InferenceSession",
    "Listing",
    "Options",
    "Target",
    "find_target",
    "listings",
    "loaded",
    "unchanged",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from linexport.targets import base

    return getattr(base, name)
