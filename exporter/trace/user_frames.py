"""The user's own lines in stack traces of traced nodes.

torch keeps frames of functions called ``forward``. A line of a function that ``forward`` calls says
more, so the frames behind the last ``forward`` are kept as well, but not those of libraries.
"""

from __future__ import annotations

import re
import sysconfig
from contextlib import AbstractContextManager
from traceback import FrameSummary

import linexport
import linexport.models
import linexport.plugins
from linexport.system.torch_internals import frames

OWN = (*linexport.__path__, *linexport.models.__path__, *linexport.plugins.__path__)
LIBRARIES = (sysconfig.get_path("stdlib"), *OWN)
PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")


def kept() -> AbstractContextManager[None]:
    """Keep the user's frames behind ``forward`` in traces of nodes."""
    return frames.kept(_behind)


def _behind(frames: list[FrameSummary], found: list[FrameSummary]) -> list[FrameSummary]:
    """Return frames of the user that the last of those found has called."""
    if not found or found[-1] not in frames:
        return []
    after = frames[len(frames) - frames[::-1].index(found[-1]) :]
    return [f for f in after if is_users(f.filename)]


def is_users(file: str) -> bool:
    """Return whether a file is neither of a library nor of linexport."""
    return not file.startswith((*LIBRARIES, "<")) and not PACKAGES.search(file)
