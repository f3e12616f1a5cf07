"""Registers, spills, tensor-core instructions and asynchronous copies, read from machine code.

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
from linexport.plugins.kernels.architectures import ARCHITECTURES, assembled_as, toolchain
from linexport.plugins.kernels.compile import CompiledKernel
from linexport.plugins.kernels.launch import Kernel
from linexport.plugins.kernels.plans.fused_maps import WIDENING

SERIALISED = ("C7510", "C7511", "C7512", "C7513", "C7514", "C7515", "C7519")
"""Warnings of ptxas that wgmma instructions are serialised; the numbers tell the reason."""

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
class BinaryFindings:
    """Resource use and instruction counts of one binary.

    Attributes:
        registers: of a thread.
        spilled: bytes stored and loaded because registers ran out.
        warnings: of SERIALISED, those given.
        instructions: how many tensor-core instructions, by name.
        copies: how many asynchronous copies.
    """

    registers: int
    spilled: int
    warnings: tuple[str, ...]
    instructions: dict[str, int]
    copies: int = 0


def inspect(binary: CompiledKernel) -> BinaryFindings:
    """Assemble the PTX again, verbosely, and disassemble the cubin.

    Raises:
        BuildError: the assembler refuses it.
    """
    architecture, assembler = assembled_as(binary.sm), toolchain(binary.sm).program
    with tempfile.TemporaryDirectory() as place:
        ptx, cubin = Path(place) / "kernel.ptx", Path(place) / "kernel.cubin"
        ptx.write_text(binary.ptx)
        cubin.write_bytes(binary.cubin)
        log = _tool(assembler, "-v", "-arch", architecture, str(ptx), "-o", f"{place}/again.cubin")
        sass = _tool("cuobjdump", "-sass", str(cubin))
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    registers = re.search(r"Used (\d+) registers", log)
    return BinaryFindings(
        int(registers[1]) if registers else 0,
        sum(spills),
        tuple(code for code in SERIALISED if code in log),
        dict(Counter(re.findall(TENSOR_CORE, sass))),
        len(re.findall(ASYNCHRONOUS, sass)),
    )


def occupancy(binary: CompiledKernel, found: BinaryFindings) -> int:
    """Blocks that a multiprocessor holds at once, by its registers and its shared memory.

    A warp takes registers in units of 256. A multiprocessor has the shared memory of its largest
    block and what is the system's of it.
    """
    of_a_warp = -(-32 * found.registers // 256) * 256
    by_registers = REGISTERS // of_a_warp // binary.warps
    shared = LARGEST_SHARED[binary.sm] + SYSTEM_SHARED
    return min(by_registers, shared // (binary.shared + SYSTEM_SHARED))


def failures(
    kernel: Kernel, binary: CompiledKernel, found: BinaryFindings, resident: int = 1
) -> list[str]:
    """Properties of a binary that a shipped kernel must not have.

    ``resident`` is how many blocks of it the plan counts on in a multiprocessor.
    """
    largest = LARGEST_SHARED[binary.sm]
    held = occupancy(binary, found)
    wrong = {
        f"{found.spilled} bytes spilled": found.spilled > 0,
        f"wgmma serialised ({', '.join(found.warnings)})": bool(found.warnings),
        f"{binary.shared} bytes of shared memory, {largest} allowed": binary.shared > largest,
        f"{held} blocks a multiprocessor, {resident} planned": held < resident,
        "no tensor-core instruction": multiplies(kernel) and not found.instructions,
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
    """Run one of the programs Triton brings along; both of its streams."""
    from triton.backends import nvidia

    program = Path(str(nvidia.__file__)).parent / "bin" / name
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{name} failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout + done.stderr
