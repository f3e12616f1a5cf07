"""Frames of Python that torch keeps for the nodes of a trace, and those of its own errors."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import FrameSummary, StackSummary
from unittest import mock

from torch.fx import Node

from linexport.system.torch_internals import Internal

FILTER = Internal(
    "torch.fx.proxy",
    "TracerBase._filter_traceback_frames",
    "keeps the user's lines behind forward in the traces of nodes",
    "torch keeps the line of forward alone, and messages name that",
)

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

    with mock.patch.object(owner, name, keep):
        yield


def node_of(error: BaseException) -> Node | None:
    """Return the node that torch's exporter was at when it failed; None where no frame has it.

    The exporter's message names the node, which the user has not seen; its frames have it.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    nodes = (frame.f_locals.get("node") for frame in reversed(frames))
    return next((n for n in nodes if isinstance(n, Node)), None)
