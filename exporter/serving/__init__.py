"""Many sequences on one artifact: sessions whose states share calls of the model."""

from linexport.serving.pool import Pool, Session

__all__ = ["Pool", "Session"]
