"""Kernels as they fit a multiprocessor: with other warps, stages or parts where registers run out.

Tiles are chosen for the widths that heads mostly have. At another width, or on another compute
capability, the same tile may take a few registers more than there are. A block of twice the warps
has twice the registers for the same tile, one without loads ahead of its loop needs fewer, and so
does one that goes through d_k in smaller parts. None of these changes how many blocks there are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from linexport.errors import BuildError
from linexport.plugins.kernels.architectures import ARCHITECTURES
from linexport.plugins.kernels.compile import CompiledKernel, compile_kernels
from linexport.plugins.kernels.launch import Kernel, LaunchPlan

log = logging.getLogger(__name__)

MOST_WARPS, MOST_STAGES, LEAST_PART = 16, 3, 16

IN_PARTS, TRANSITION = "linear.segment_output", "transitions.segment_transition"
"""Functions that may go through d_k in parts: the first keeps its state in memory where it does."""

READ_ONLY = (IN_PARTS, "bidirectional.segment_output", "segments.segment_state", TRANSITION)
"""Functions whose loops read nothing that they write, so that loads may move ahead of their turn.
IN_PARTS is one where a block holds all of d_k."""


def fit(plan: LaunchPlan, sm: int) -> LaunchPlan:
    """Return the plan with kernels that fit; compiles them.

    Raises:
        BuildError: a kernel does not compile, or needs more shared memory than a block may have.
        EnvironmentProblemError: Triton is not installed.
    """
    return plan.with_kernels(fitting(plan.kernels(), sm))


def fitting(kernels: Iterable[Kernel], sm: int) -> dict[Kernel, Kernel]:
    """Return what to launch in place of each kernel: itself, or its first variant that fits.

    Where none does it is the one that spills least, which is right and slower.

    Raises:
        BuildError, EnvironmentProblemError: see ``fit``.
    """
    found = {kernel: [(kernel, binary)] for kernel, binary in _compiled(kernels, sm)}
    waiting = {kernel: variants(kernel) for kernel, [(_, own)] in found.items() if excess(own)}
    while waiting:
        tries = {kernel: one for kernel, left in waiting.items() if (one := next(left, None))}
        made = dict(_compiled(tries.values(), sm))
        for kernel, one in tries.items():
            found[kernel].append((one, made[one]))
        waiting = {k: waiting[k] for k, one in tries.items() if excess(made[one])}
    return {kernel: _least(kernel, tried) for kernel, tried in found.items()}


def excess(binary: CompiledKernel) -> int:
    """Return how much a kernel needs that there is not: bytes spilled, of shared memory a lot."""
    over = max(binary.shared - ARCHITECTURES[binary.sm].shared, 0)
    return 2**20 * over + binary.spilled + len(binary.serialised)


def variants(kernel: Kernel) -> Iterator[Kernel]:
    """Yield it with fewer stages, other warps, and where it may in smaller parts or more stages."""
    for stages in range(kernel.stages - 1, 0, -1):
        yield replace(kernel, stages=stages)
    for warps in (2 * kernel.warps, kernel.warps // 2, 4 * kernel.warps):
        if 1 <= warps <= MOST_WARPS:
            yield replace(kernel, warps=warps)
    constants: dict[str, Any] = dict(kernel.constants)
    in_parts = kernel.function == IN_PARTS and constants["BLOCK_K"] < constants["D_K"]
    if (in_parts or kernel.function == TRANSITION) and constants["BLOCK_K"] > LEAST_PART:
        parts = {**constants, "BLOCK_K": constants["BLOCK_K"] // 2}
        yield replace(kernel, constants=tuple(parts.items()))
    for stages in range(kernel.stages + 1, MOST_STAGES + 1):
        if kernel.function in READ_ONLY and not in_parts:
            yield replace(kernel, stages=stages)


def _least(kernel: Kernel, tried: list[tuple[Kernel, CompiledKernel]]) -> Kernel:
    chosen, binary = min(tried, key=lambda one: excess(one[1]))
    capability, largest = f"{binary.sm / 10:.1f}", ARCHITECTURES[binary.sm].shared
    if binary.shared > largest:
        raise BuildError(
            f"{kernel.function} needs {binary.shared:,} bytes of shared memory, and a block of "
            f"compute capability {capability} may have {largest:,}. Build the node of "
            "standard operators: --target ort-cuda without --sm, or --no-plugins."
        )
    if excess(binary):
        log.warning(
            "%s keeps %d bytes of registers in memory on compute capability %s: it is slow there.",
            kernel.function,
            binary.spilled,
            capability,
        )
    return chosen


def _compiled(kernels: Iterable[Kernel], sm: int) -> list[tuple[Kernel, CompiledKernel]]:
    distinct = list(dict.fromkeys(kernels))
    made = compile_kernels(distinct, sm)
    return [(kernel, made[kernel.name]) for kernel in distinct]
