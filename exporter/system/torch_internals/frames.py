"""Frames of Python that torch keeps for the nodes of a trace, and those of its own errors."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from traceback import FrameSummary, StackSummary
from types import CodeType, FrameType
from unittest import mock

import torch
from torch.fx import Node

from linexport.system.torch_internals import Internal

FILTER = Internal(
    "torch.fx.proxy",
    "TracerBase._filter_traceback_frames",
    "keeps the user's lines behind forward in the traces of nodes",
    "torch keeps the line of forward alone, and messages name that",
)

STACK = Internal(
    "torch.fx.proxy",
    "CapturedTraceback",
    "reads the frames of a node without torch's own, of which none but forward is kept",
    "torch reads all frames first, which takes a twentieth of a trace",
)
TORCH = str(Path(torch.__file__).parent)
Chosen = Callable[[list[FrameSummary], list[FrameSummary]], list[FrameSummary]]


@contextmanager
def kept(more: Chosen) -> Iterator[None]:
    """Keep more frames in traces of nodes.

    Args:
        more: gives them, of all frames and those that torch keeps.
    """
    place = FILTER.holder()
    if place is None:
        yield
        return
    owner, name = place
    original = getattr(owner, name)

    def keep(tracer: object, frames: StackSummary) -> StackSummary:
        found = original(tracer, frames)
        return StackSummary.from_list([*found, *more(list(frames), list(found))])

    with ExitStack() as restore:
        restore.enter_context(mock.patch.object(owner, name, keep))
        stack = STACK.holder()
        if stack is not None:
            restore.enter_context(mock.patch.object(*stack, _Stack()))
        yield


class _Stack:
    """The stand-in for ``CapturedTraceback``: of torch it reads the frames of forward alone."""

    def __init__(self) -> None:
        self._read: dict[CodeType, bool] = {}

    def extract(self) -> _Stack:
        """Return itself: ``summary`` is called at once."""
        return self

    def summary(self) -> StackSummary:
        """Return the frames of the caller, the innermost last."""
        found, known = list[FrameSummary](), self._read
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            read = known.get(code)
            if read is None:
                own = code.co_filename.startswith(TORCH)
                read = known[code] = not own or code.co_name == "forward"
            if read:
                line, name = frame.f_lineno, code.co_name
                found.append(FrameSummary(code.co_filename, line, name, lookup_line=False))
            frame = frame.f_back
        return StackSummary.from_list(found[::-1])


def node_of(error: BaseException) -> Node | None:
    """Return the node that torch's exporter was at when it failed; None where no frame has it.

    The exporter's message names the node, which the user has not seen; its frames have it.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    nodes = (frame.f_locals.get("node") for frame in reversed(frames))
    return next((n for n in nodes if isinstance(n, Node)), None)
