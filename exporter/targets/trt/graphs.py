"""CUDA graphs of calls of an engine: a call seen before is captured, and replayed from then on.

    a call = its context, the shapes of its inputs, the addresses of all its tensors

    new shapes            launched, so that TensorRT prepares what it must not do in a capture
    the same shapes       captured and replayed
    the same call again   replayed

A stream of tokens has two calls: its states go back and forth between two places.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from linexport.errors import EnvironmentProblemError
from linexport.plugins.tensorrt.modules import checked
from linexport.targets.trt.device import Device

log = logging.getLogger(__name__)

KEPT = 64
"""Graphs that are kept; those not used for longest go."""

Key = tuple[Hashable, Hashable, Hashable]
"""Context, shapes and addresses."""


class Graphs:
    """Graphs of one engine.

    Attributes:
        enabled: False launches every call.
        problem: why nothing can be captured; None where it can.
    """

    def __init__(self, device: Device) -> None:
        self._device, self._ready = device, OrderedDict[Key, Any]()
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._prepared: dict[Hashable, Hashable] = {}
        self.enabled = True
        self.problem: str | None = None

    def run(self, key: Key, enqueue: Callable[[], None]) -> None:
        """Put a call on the stream: replayed, or by ``enqueue``.

        Raises:
            EnvironmentProblemError: it fails.
        """
        graph = self._graph(key, enqueue) if self.enabled and self.problem is None else None
        if graph is None:
            enqueue()
            context, shapes, _ = key
            self._prepared[context] = shapes
        else:
            checked(self._device.cuda.cuGraphLaunch(graph, self._device.stream_handle))

    def close(self) -> None:
        """Destroy all graphs."""
        while self._ready:
            self._destroy(self._ready.popitem()[1])

    def _graph(self, key: Key, enqueue: Callable[[], None]) -> Any:
        """Return the graph of a call; None where it has to be launched."""
        if key in self._ready:
            self._ready.move_to_end(key)
            return self._ready[key]
        again = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > KEPT:
            self._seen.popitem(last=False)
        context, shapes, _ = key
        if not again or self._prepared.get(context) != shapes:
            return None
        try:
            graph = self._captured(enqueue)
        except EnvironmentProblemError as error:
            self.problem = str(error)
            log.info("Calls of this engine are not captured as CUDA graphs: %s", error)
            return None
        self._ready[key] = graph
        if len(self._ready) > KEPT:
            self._destroy(self._ready.popitem(last=False)[1])
        return graph

    def _captured(self, enqueue: Callable[[], None]) -> Any:
        cuda, stream = self._device.cuda, self._device.stream_handle
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked(cuda.cuStreamBeginCapture(stream, mode))
        problem = None
        try:
            enqueue()
        except Exception as error:
            problem = error
        graph = checked(cuda.cuStreamEndCapture(stream))
        try:
            if problem is not None:
                raise problem
            return checked(cuda.cuGraphInstantiate(graph, 0))
        finally:
            checked(cuda.cuGraphDestroy(graph))

    def _destroy(self, graph: object) -> None:
        checked(self._device.cuda.cuGraphExecDestroy(graph))
