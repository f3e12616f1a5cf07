"""GPUs that kernels are compiled for, by compute capability: what compiling and planning need.

A binary runs on its own major version only, and on minor versions from its own on; from 9.0 on, on
its own alone. Triton brings two assemblers, of CUDA toolkits 12 and, from 10.0 on, 13. A driver
loads the binaries of every minor version of the major version of CUDA that it is of.
Sources: CUDA Programming Guide, compute capabilities; CUDA Compatibility, table 1, for drivers.
"""

from __future__ import annotations

from dataclasses import dataclass

from linexport.errors import UsageError
from linexport.system.environment import version
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
        gpus: names that users know it by.
    """

    multiprocessors: int
    shared: int
    ptx: int
    gpus: tuple[str, ...]


ARCHITECTURES = {
    80: Architecture(108, 166912, 83, ("A100", "A30")),
    87: Architecture(16, 166912, 83, ("Orin",)),
    89: Architecture(142, 101376, 83, ("L4", "L40", "L40S")),
    90: Architecture(132, 232448, 83, ("H100", "H200", "GH200")),
    100: Architecture(148, 232448, 87, ("B200", "GB200")),
    103: Architecture(148, 232448, 88, ("B300", "GB300")),
    110: Architecture(20, 232448, 90, ("Thor",)),
    120: Architecture(188, 101376, 87, ("RTX5090", "RTXPRO6000")),
    121: Architecture(48, 101376, 88, ("Spark", "GB10")),
}

WITHOUT_OWN = {"A10": 86, "A40": 86, "T4": 75}
"""GPUs by name whose compute capability has no kernels of its own: 8.6 runs those of 8.0."""

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


def capability_of(gpu: str) -> int:
    """Return the compute capability of a GPU, given as a number such as 89, or by name.

    Raises:
        UsageError: no GPU of that name is known.
    """
    if gpu.isdecimal():
        return int(gpu)
    named = {name: sm for sm, one in ARCHITECTURES.items() for name in one.gpus} | WITHOUT_OWN
    plain = gpu.lower().replace(" ", "").replace("-", "")
    found = next((sm for name, sm in named.items() if name.lower() == plain), None)
    if found is None:
        raise UsageError(
            f"--sm names {gpu!r}; expected compute capabilities such as 89, or GPUs: "
            f"{', '.join(named)}."
        )
    return found
