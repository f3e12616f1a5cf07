"""Launches of a node as data, which a Python or a C++ plugin runs without Triton.

A ``LaunchPlan`` has routes, one of which is taken by batch and length; a route is a list of
launches, in order on one stream, and the scratch memory they share. A launch passes its kernel's
arguments in order and nothing else but two trailing null pointers, which every compiled kernel
expects (global and profile scratch). An argument is named for what it is:

    a formal input or output of the op     pointer, in the type the argument states
    a scratch buffer of the route          pointer
    a symbol (see ``symbols``)             int32

Pointers must be aligned to 16 bytes: the kernels are compiled on that promise. An absent optional
input has no argument. A bool tensor is passed as bytes (i8). Threads in a block: 32 * warps.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from linexport.system.json_object import JsonObject

TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Element types by the name NumPy and ONNX give them."""

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "i8": 1, "i32": 4}


@dataclass(frozen=True)
class Argument:
    """One run-time argument: ``type`` is "i32", or "*" and an element type."""

    name: str
    type: str

    @property
    def is_pointer(self) -> bool:
        """A device address; otherwise an int32."""
        return self.type.startswith("*")


Constant = int | float | str | bool | tuple[int | float, ...] | None


@dataclass(frozen=True)
class Kernel:
    """A Triton function with all fixed but tensors, batch and length.

    Attributes:
        function: module in ``sources`` and name, "linear.segment_output".
        arguments: what is passed at run time, in order.
        constants: compile-time values by parameter; None for a tensor that is absent.
        warps: of a block.
        stages: of software pipelining.
    """

    function: str
    arguments: tuple[Argument, ...]
    constants: tuple[tuple[str, Constant], ...]
    warps: int
    stages: int

    @classmethod
    def from_json(cls, value: JsonObject) -> Kernel:
        """Return the kernel that ``dataclasses.asdict`` described, after JSON, which has lists."""
        constants = ((k, tuple(v) if isinstance(v, list) else v) for k, v in value["constants"])
        return cls(
            value["function"],
            tuple(Argument(x["name"], x["type"]) for x in value["arguments"]),
            tuple(constants),
            int(value["warps"]),
            int(value["stages"]),
        )

    @property
    def name(self) -> str:
        """A file name that differs for different kernels; it says nothing of the SM."""
        digest = hashlib.sha256(repr(self).encode()).hexdigest()
        return f"{self.function.replace('.', '-')}-{digest[:16]}"


@dataclass(frozen=True)
class Extent:
    """A size that depends on the shapes: a factor times the product of symbols."""

    factor: int
    symbols: tuple[str, ...] = ()

    def of(self, values: Mapping[str, int]) -> int:
        """Its value, given those of the symbols."""
        return self.factor * math.prod(values[name] for name in self.symbols)


ONE = Extent(1)


@dataclass(frozen=True)
class Launch:
    """A kernel and how many blocks of it."""

    kernel: Kernel
    grid: tuple[Extent, Extent, Extent]


@dataclass(frozen=True)
class Scratch:
    """Memory needed during a route and not after: ``elements`` of ``type``, not initialised."""

    name: str
    type: str
    elements: Extent

    def bytes(self, values: Mapping[str, int]) -> int:
        """Its size, given the symbols."""
        return BYTES[self.type] * self.elements.of(values)


@dataclass(frozen=True)
class Route:
    """Launches in order, and the scratch they share."""

    launches: tuple[Launch, ...]
    scratch: tuple[Scratch, ...] = ()


LEAST_CHUNKS = 8
"""Fewest chunks of a segment: its state must be small compared with its tokens."""


@dataclass(frozen=True)
class LaunchPlan:
    """The routes of one node for one data type and compute capability.

    Attributes:
        single: right for any length.
        segmented: the same result from more blocks, for sequences too few to fill the GPU.
        decode: for at most ``decode_length`` tokens.
        chunk: tokens of a chunk.
        blocks: of ``single``, for each sequence of the batch.
        resident: blocks over segments that a multiprocessor holds at once, at least.
        in_place: outputs that may be the memory of the past they go on from; the others may not.
    """

    single: Route
    segmented: Route | None = None
    decode: Route | None = None
    decode_length: int = 0
    chunk: int = 1
    blocks: int = 1
    resident: int = 1
    in_place: tuple[str, ...] = field(default=(), kw_only=True)

    def route(self, batch: int, length: int, multiprocessors: int) -> Route:
        """Which launches serve this batch and length."""
        if self.decode and length <= self.decode_length:
            return self.decode
        if self.segmented and self.symbols(batch, length, multiprocessors)["segments"] > 1:
            return self.segmented
        return self.single

    def symbols(self, batch: int, length: int, multiprocessors: int) -> dict[str, int]:
        """Values of the symbols: batch, length, chunks, segments, chunks_per_segment.

        As many segments as give every multiprocessor its blocks, but none shorter than
        LEAST_CHUNKS; one where the sequences of the batch are enough.
        """
        chunks = max(-(-length // self.chunk), 1)
        segments = 1
        if self.segmented:
            fitting = self.resident * multiprocessors // max(batch * self.blocks, 1)
            segments = max(min(fitting, chunks // LEAST_CHUNKS), 1)
        per_segment = -(-chunks // segments)
        return {
            "batch": batch,
            "length": length,
            "chunks": chunks,
            "segments": -(-chunks // per_segment),
            "chunks_per_segment": per_segment,
        }

    def over_segments(self) -> list[Kernel]:
        """Kernels of which a multiprocessor must hold ``resident`` blocks."""
        launches = self.segmented.launches if self.segmented else ()
        return [x.kernel for x in launches if "segments" in x.grid[1].symbols]

    def kernels(self) -> list[Kernel]:
        """Every kernel of the plan, once."""
        routes = [route for route in (self.single, self.segmented, self.decode) if route]
        return list(dict.fromkeys(launch.kernel for r in routes for launch in r.launches))

    def with_kernels(self, chosen: Mapping[Kernel, Kernel]) -> LaunchPlan:
        """Return the plan with other kernels, of which there are as many blocks."""

        def exchanged(route: Route) -> Route:
            launches = (replace(x, kernel=chosen[x.kernel]) for x in route.launches)
            return replace(route, launches=tuple(launches))

        held = (
            max(self.resident * one.warps // max(one.warps, chosen[one].warps), 1)
            for one in self.over_segments()
        )
        return replace(
            self,
            single=exchanged(self.single),
            segmented=self.segmented and exchanged(self.segmented),
            decode=self.decode and exchanged(self.decode),
            resident=min(held, default=self.resident),
        )

    def scratch_bytes(self, batch: int, length: int, multiprocessors: int) -> int:
        """Scratch of the route taken, each buffer rounded up to 256 bytes."""
        values = self.symbols(batch, length, multiprocessors)
        buffers = self.route(batch, length, multiprocessors).scratch
        return sum(-(-buffer.bytes(values) // 256) * 256 for buffer in buffers)
