"""The user's own lines in stack traces of traced nodes.

torch keeps frames of functions called ``forward``. A line of a function that ``forward`` calls says
more, so the frames behind the last ``forward`` are kept as well, but not those of libraries.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import FrameSummary, StackSummary
from typing import Any
from unittest import mock

from torch.fx.proxy import TracerBase

import linexport
import linexport.models
import linexport.plugins

OWN = (*linexport.__path__, *linexport.models.__path__, *linexport.plugins.__path__)
LIBRARIES = (sysconfig.get_path("stdlib"), *OWN)
PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")

FILTER = "_filter_traceback_frames"


@contextmanager
def kept() -> Iterator[None]:
    """Keep the user's frames behind ``forward`` in traces of nodes, where torch has the filter."""
    original = getattr(TracerBase, FILTER, None)
    if original is None:  # it is torch's own, and a later torch may have another
        yield
        return

    def keep(tracer: Any, frames: StackSummary) -> StackSummary:
        found = original(tracer, frames)
        return StackSummary.from_list([*found, *_behind(list(frames), list(found))])

    with mock.patch.object(TracerBase, FILTER, keep):
        yield


def _behind(frames: list[FrameSummary], found: list[FrameSummary]) -> list[FrameSummary]:
    """Return frames of the user that the last of those found has called."""
    if not found or found[-1] not in frames:
        return []
    after = frames[len(frames) - frames[::-1].index(found[-1]) :]
    return [
        f
        for f in after
        if not f.filename.startswith((*LIBRARIES, "<")) and not PACKAGES.search(f.filename)
    ]
