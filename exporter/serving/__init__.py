"""Many sequences on one artifact: sessions whose states share calls of the model, and a server.

Names are imported when they are first used: the options of a server cost no runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from linexport.system.first_use import on_first_use

if TYPE_CHECKING:
    from linexport.serving.pool import Pool
    from linexport.serving.prefix_cache import PrefixCache
    from linexport.serving.session import Session

__all__ = ["Pool", "PrefixCache", "Session"]

_HOMES = {"Pool": ".pool", "PrefixCache": ".prefix_cache", "Session": ".session"}

__getattr__ = on_first_use(__name__, _HOMES)
