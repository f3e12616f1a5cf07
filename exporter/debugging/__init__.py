"""Where an artifact goes wrong: the first value, token and state that differ."""

from linexport.debugging.differences import Differences
from linexport.debugging.search import debug

__all__ = ["Differences", "debug"]
