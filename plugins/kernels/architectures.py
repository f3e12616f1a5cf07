"""GPUs that kernels are compiled for, by compute capability: what compiling and planning need.

GPUs by name are in ``system.gpus``. Which binary runs on which GPU is ``runs_on``. Triton brings
two assemblers, of CUDA toolkits 12 and, from 10.0 on, 13. A driver loads the binaries of every
minor version of the major version of CUDA that it is of.
Sources: CUDA Programming Guide, compute capabilities; CUDA C++ Best Practices Guide, "Binary
Compatibility", for desktop and Tegra; CUDA Compatibility, table 1, for drivers.
"""

from __future__ import annotations

from dataclasses import dataclass

from linexport.errors import UsageError
from linexport.system.environment import version
from linexport.system.gpus import GPUS, find_gpu
from linexport.system.versions import numbers


@dataclass(frozen=True)
class Architecture:
    """One compute capability.

    Attributes:
        multiprocessors: of its largest GPU. Long sequences are cut into segments for those of the
            GPU at hand, and for no more than these: the scratch memory that an engine sets aside
            when it is built is enough for them.
        shared: bytes of shared memory a block may have.
        ptx: the oldest PTX ISA that it can be had with: drivers refuse newer ones than their own.
    """

    multiprocessors: int
    shared: int
    ptx: int


ARCHITECTURES = {
    80: Architecture(108, 166912, 83),
    87: Architecture(16, 166912, 83),
    89: Architecture(142, 101376, 83),
    90: Architecture(132, 232448, 83),
    100: Architecture(148, 232448, 87),
    103: Architecture(148, 232448, 88),
    110: Architecture(20, 232448, 90),
    120: Architecture(188, 101376, 87),
    121: Architecture(48, 101376, 88),
}

TEGRA = (87, 110)
"""Jetson's: binaries of desktop GPUs do not run there, nor theirs on desktop GPUs."""

OWN_INSTRUCTIONS = (90, 100, 103, 110, 121)
"""Architectures whose binaries use instructions that are theirs alone: they run on no other."""

WITHOUT_OWN = tuple(sorted({gpu.sm for gpu in GPUS} - set(ARCHITECTURES)))
"""Compute capabilities without kernels of their own: 8.6 runs those of 8.0; 7.5 has none."""

FIRST = min(ARCHITECTURES)
NO_TENSOR_CORES = (
    "Triton compiles them for GPUs before 8.0 without tensor cores, which have no bfloat16 and no "
    "TensorFloat-32"
)
"""Why there are none for the T4: Triton 3.7.1 made FFMA of all products of the kernel looked at."""

ASSEMBLERS = {12: ("ptxas", 525), 13: ("ptxas-blackwell", 580)}
"""Triton's program, and the oldest driver for Linux that loads what it makes, by CUDA's major
version."""

TOOLKITS = {(3, 7): ("12.8", "13.1"), (3, 8): ("12.9", "13.3"), (3, 9): ("12.9", "13.4")}
"""Versions of the CUDA toolkits that both assemblers are of, by Triton's version."""


@dataclass(frozen=True)
class Toolchain:
    """The program that binaries are assembled by, its CUDA toolkit, and the oldest Linux driver."""

    program: str
    cuda: str
    driver: int


def toolchain(sm: int) -> Toolchain:
    """Return what assembles kernels for a compute capability, in the Triton that is installed."""
    major = 13 if sm >= 100 else 12
    program, driver = ASSEMBLERS[major]
    known = [t for t in TOOLKITS if t <= numbers(version("triton") or "")[:2]]
    return Toolchain(program, TOOLKITS[max(known, default=min(TOOLKITS))][major - 12], driver)


def runs_on(binary: int, gpu: int) -> bool:
    """Return whether a GPU runs the binaries that were compiled for a compute capability.

    Binaries run on their own compute capability, and on later minor versions of its major version,
    unless one of the two is a Jetson, or they were compiled with instructions of one architecture.
    """
    if binary == gpu:
        return True
    later = binary < gpu and binary // 10 == gpu // 10
    return later and binary not in OWN_INSTRUCTIONS and not {binary, gpu} & set(TEGRA)


def capability_of(gpu: str) -> int:
    """Return the compute capability of a GPU, given as a number such as 89, or by name.

    Raises:
        UsageError: no GPU of that name is known.
    """
    if gpu.isdecimal():
        return int(gpu)
    try:
        return find_gpu(gpu).sm
    except UsageError as error:
        raise UsageError(
            f"--sm takes compute capabilities such as 89, and GPUs by name. {error}"
        ) from None
