"""Least times of the launches of a case, by arithmetic from machine code and from its plan.

    memory         every tensor that the launch is given, once, over the bandwidth
    tensor cores   multiplications and additions of HMMA and HGMMA over their peak
    issue slots    instructions of all warps over four a clock

The last two are of the multiprocessor with the most blocks. The largest of the three bounds a
launch, and their sum a case. Time beyond twice that is latency: too few warps, or steps that wait
for one another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from gpu import sass
from gpu.case import Case
from gpu.peaks import SCHEDULERS, Peaks
from linexport.plugins.kernels.compile import CompiledKernel
from linexport.plugins.kernels.gate import ASYNCHRONOUS, listing, occupancy
from linexport.plugins.kernels.launch import BYTES, Kernel, Launch, Route

FAR = 2.0
"""Times of the bound from which a case is said to be limited by latency."""

SLICES = {"*bf16": 32}
"""Components that favor+ multiplies at a time, by the type of its input, where they are not 16: see
``exponents`` in ``sources/feature_functions.py``."""

FROM_SECOND_SEGMENT = ("transitions.segment_transition", "stabilized_exp.segment_maximum")
"""Kernels whose blocks of the first segment have nothing to go through."""

BARRIER = r"BAR\b"

KINDS = ("memory", "tensor", "issue")


def nest(kernel: Kernel, values: Mapping[str, int]) -> tuple[int, ...]:
    """Return the trips of a kernel's longest loop, of the loops in it, and so on.

    Empty where the plan does not tell: loops that the compiler has cut into several.
    """
    has: dict[str, Any] = dict(kernel.constants)
    parts = math.ceil(has.get("D_K", 1) / has.get("BLOCK_K", 1))
    chunks = values["chunks_per_segment"]
    if kernel.function == "linear.segment_output":
        return chunks, parts if parts > 1 else math.ceil(has["QUERY_HEADS"] / has["HEADS"])
    if kernel.function == "feature_map.apply":
        return (math.ceil(has["WIDTH"] / SLICES.get(kernel.arguments[0].type, 16)),)
    known = {
        "segments.segment_state": (chunks,),
        "transitions.segment_transition": (chunks,),
        "transitions.transition_scan": (values["segments"] - 1, parts, parts),
        "bidirectional.segment_output": (chunks, parts),
        "stabilized_exp.segment_maximum": (chunks,),
        "stabilized_exp.segment_features": (chunks,),
        "channels.chunk_scores": (parts, has.get("LEVELS", 0)),
        "delta.chunk_inverse": (parts, has.get("LEVELS", 0)),
        "recurrent.step": (values["length"],),
    }
    return known.get(kernel.function, ())


def trips(found: list[sass.Loop], counts: tuple[int, ...]) -> dict[sass.Loop, int | None]:
    """Return the trips of each loop; None where they are not told."""
    told: dict[sass.Loop, int | None] = dict.fromkeys(found)
    outer = max((x for x in found if x.depth == 0), key=lambda x: x.last - x.first, default=None)
    for loop in found:
        if outer and outer.holds(loop.first) and loop.depth < len(counts):
            told[loop] = counts[loop.depth]
    return told


def launch_row(
    launch: Launch,
    binary: CompiledKernel,
    values: Mapping[str, int],
    sizes: Mapping[str, int],
    peaks: Peaks,
) -> dict[str, Any]:
    """Return what is known of a launch; ``sizes`` are bytes of its tensors."""
    kernel, grid = launch.kernel, [extent.of(values) for extent in launch.grid]
    code = sass.parsed(listing(binary))
    told = trips(sass.loops(code), nest(kernel, values))
    main = max((x for x in told if told[x]), key=lambda x: x.last - x.first, default=None)
    blocks = math.prod(grid)
    busy = blocks
    if kernel.function in FROM_SECOND_SEGMENT and values["segments"] > 1:
        busy = blocks // values["segments"] * (values["segments"] - 1)
    resident = occupancy(binary)
    instructions = sass.issued(code, told)
    products = sass.flops(code, told)
    most = math.ceil(busy / peaks.multiprocessors)
    moved = sum(sizes[argument.name] for argument in kernel.arguments if argument.is_pointer)
    tensor = sum(n * peaks.multiprocessors / peaks.flops[kind] for kind, n in products.items())
    issue = instructions / SCHEDULERS / peaks.clock
    return {
        "kernel": kernel.function,
        "blocks": blocks,
        "warps": binary.warps,
        "stages": kernel.stages,
        "registers": binary.registers,
        "shared": binary.shared,
        "spilled": binary.spilled,
        "resident": resident,
        "waves": blocks / (resident * peaks.multiprocessors),
        "trips": main and told[main],
        "of_a_trip": main and sass.of_a_trip(code, main, told),
        "copies": main and _matching(code, main, ASYNCHRONOUS),
        "barriers": main and _matching(code, main, BARRIER),
        "instructions": instructions,
        "loops_not_told": sum(number is None for number in told.values()),
        "flops": {kind: n * binary.warps * blocks for kind, n in products.items()},
        "bytes": moved,
        "memory_ms": moved / peaks.bytes * 1e3,
        "tensor_ms": most * binary.warps * tensor * 1e3,
        "issue_ms": most * binary.warps * issue * 1e3,
    }


def _matching(code: list[sass.Instruction], loop: sass.Loop, opcodes: str) -> int:
    """Count the instructions of a loop whose opcodes begin as a pattern says."""
    inside = code[loop.first : loop.last + 1]
    return sum(bool(re.match(opcodes, x.opcode)) for x in inside)


def tensor_bytes(tensors: list[Any], route: Route, values: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of a node's tensors and of the scratch memory of a route, by name."""
    found = {x.name: x.bytes(values) for x in route.scratch}
    for tensor in tensors:
        sizes = [values.get(n, n) if isinstance(n, str) else n for n in tensor.shape]
        found[tensor.name] = math.prod(sizes) * BYTES[tensor.type]
    return found


def case_row(case: Case, launches: list[dict[str, Any]], ms: float, peaks: Peaks) -> dict[str, Any]:
    """Return the bounds of a case beside the time that was measured."""
    bounds = [max(row[f"{kind}_ms"] for kind in KINDS) for row in launches]
    bound = sum(bounds)
    of_kind = {
        kind: sum(
            most for row, most in zip(launches, bounds, strict=True) if row[f"{kind}_ms"] == most
        )
        for kind in KINDS
    }
    largest = max(of_kind, key=lambda kind: of_kind[kind])
    last = launches[-1]
    clocks = None
    if last["trips"]:
        clocks = ms * 1e-3 * peaks.clock / (last["trips"] * math.ceil(last["waves"]))
    return {
        "case": case.name,
        "launches": launches,
        **{f"{kind}_ms": sum(row[f"{kind}_ms"] for row in launches) for kind in KINDS},
        "bound_ms": bound,
        "largest": largest,
        "ms": ms,
        "ratio": ms / bound,
        "limit": largest if ms < FAR * bound else "latency",
        "clocks_a_trip": clocks,
    }
