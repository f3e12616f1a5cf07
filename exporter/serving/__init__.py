"""Many sequences on one artifact: sessions whose states share calls of the model."""

from linexport.serving.pool import Pool, Session
from linexport.serving.prefix_cache import PrefixCache

__all__ = ["Pool", "PrefixCache", "Session"]
