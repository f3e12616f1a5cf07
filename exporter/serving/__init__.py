"""Many sequences on one artifact: sessions whose states share calls of the model, and a server.

Names are imported when they are first used: the options of a server cost no runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linexport.serving.pool import Pool
    from linexport.serving.prefix_cache import PrefixCache
    from linexport.serving.session import Session

__all__ = ["Pool", "PrefixCache", "Session"]

_HOMES = {
    "Pool": "linexport.serving.pool",
    "PrefixCache": "linexport.serving.prefix_cache",
    "Session": "linexport.serving.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'linexport.serving' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
