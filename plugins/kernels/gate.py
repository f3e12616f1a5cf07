"""The properties of shipped kernels: values in registers, tensor cores, asynchronous copies.

Spills are register values kept in memory; a wgmma that is serialised waits for the one before it.
Either makes a kernel several times slower than it looks in the source.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from linexport.errors import BuildError
from linexport.plugins.kernels.architectures import ARCHITECTURES
from linexport.plugins.kernels.compile import CompiledKernel
from linexport.plugins.kernels.launch import Kernel
from linexport.plugins.kernels.plans.fused_maps import WIDENING

ASYNCHRONOUS = r"\b(?:LDGSTS|UTMALDG|UBLKCP)\b"
"""Copies into shared memory that a block does not wait for."""

REGISTERS, SYSTEM_SHARED = 65_536, 1024
"""Registers of a multiprocessor; bytes of shared memory of each block that are the system's."""

TENSOR_CORE = r"\b(?:HMMA|IMMA|QMMA|HGMMA|QGMMA|UTC\w*MMA)\b"
LARGEST_SHARED = {sm: one.shared for sm, one in ARCHITECTURES.items()}
"""Bytes of shared memory a block may have."""

MULTIPLY = (
    *("segment_state", "segment_output", "chunk_inverse", "chunk_scores"),
    *("segment_transition", "transition_scan"),
)
"""Functions with products of matrices."""


@dataclass(frozen=True)
class Instructions:
    """Counts of instructions of one binary.

    Attributes:
        tensor_core: by name.
        copies: asynchronous copies.
    """

    tensor_core: dict[str, int]
    copies: int


def listing(binary: CompiledKernel) -> str:
    """Return the machine code as text.

    Raises:
        BuildError: the disassembler refuses it.
    """
    with tempfile.TemporaryDirectory() as place:
        cubin = Path(place) / "kernel.cubin"
        cubin.write_bytes(binary.cubin)
        return _tool("cuobjdump", "-sass", str(cubin))


def instructions(binary: CompiledKernel) -> Instructions:
    """Count the instructions of a binary; raises as ``listing``."""
    sass = listing(binary)
    return Instructions(
        dict(Counter(re.findall(TENSOR_CORE, sass))), len(re.findall(ASYNCHRONOUS, sass))
    )


def occupancy(binary: CompiledKernel) -> int:
    """Blocks that a multiprocessor holds at once, by its registers and its shared memory.

    A warp takes registers in units of 256. A multiprocessor has the shared memory of its largest
    block and what is the system's of it.
    """
    of_a_warp = -(-32 * binary.registers // 256) * 256
    by_registers = REGISTERS // of_a_warp // binary.warps
    shared = LARGEST_SHARED[binary.sm] + SYSTEM_SHARED
    return min(by_registers, shared // (binary.shared + SYSTEM_SHARED))


def failures(
    kernel: Kernel, binary: CompiledKernel, found: Instructions, resident: int = 1
) -> list[str]:
    """Properties of a binary that a shipped kernel must not have.

    ``resident`` is how many blocks of it the plan counts on in a multiprocessor.
    """
    largest = LARGEST_SHARED[binary.sm]
    held = occupancy(binary)
    wrong = {
        f"{binary.spilled} bytes spilled": binary.spilled > 0,
        f"wgmma serialised ({', '.join(binary.serialised)})": bool(binary.serialised),
        f"{binary.shared} bytes of shared memory, {largest} allowed": binary.shared > largest,
        f"{held} blocks a multiprocessor, {resident} planned": held < resident,
        "no tensor-core instruction": multiplies(kernel) and not found.tensor_core,
        f"{kernel.stages} stages, no asynchronous copy": kernel.stages > 1 and not found.copies,
    }
    return [what for what, holds in wrong.items() if holds]


def multiplies(kernel: Kernel) -> bool:
    """Return whether the kernel multiplies matrices, which belongs on tensor cores."""
    on_its_own = kernel.function == "feature_map.apply"
    return kernel.function.endswith(MULTIPLY) or (
        on_its_own and dict(kernel.constants)["MAP"] in WIDENING
    )


def _tool(name: str, *arguments: str) -> str:
    """Run one of the programs Triton brings along."""
    from triton.backends import nvidia

    program = Path(str(nvidia.__file__)).parent / "bin" / name
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{name} failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout
