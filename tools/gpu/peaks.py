"""Peak rates of a GPU, and the least times that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from linexport.plugins.kernels.description import MULTIPROCESSORS

SCHEDULERS = 4
"""Warp schedulers of a multiprocessor: each issues one instruction of a warp a clock."""


@dataclass(frozen=True)
class Peaks:
    """Highest rates of a GPU.

    Attributes:
        bytes: of memory a second.
        flops: of tensor cores a second, without sparsity, by type of operands.
        clock: cycles a second, the highest.
        multiprocessors: of the GPU.
    """

    name: str
    bytes: float
    flops: dict[str, float]
    clock: float
    multiprocessors: int


H100 = Peaks("H100 SXM", 3.35e12, {"half": 989.4e12, "tf32": 494.7e12}, 1.98e9, MULTIPROCESSORS[90])
"""Memory and tensor cores: NVIDIA H100 data sheet, halved where it counts sparsity. Clock: NVIDIA
H100 architecture white paper, 1,980 MHz, and 1,830 MHz where tensor cores are busy, at which their
peaks are stated."""

SOURCES = (
    ("memory", f"{H100.bytes / 1e12:.2f} TB/s", "data sheet, H100 SXM"),
    (
        "tensor cores, bfloat16 and float16",
        f"{H100.flops['half'] / 1e12:.1f} TFLOPS",
        "data sheet: half of the figure with sparsity",
    ),
    (
        "tensor cores, TensorFloat-32",
        f"{H100.flops['tf32'] / 1e12:.1f} TFLOPS",
        "data sheet: half of the figure with sparsity",
    ),
    ("clock", f"{H100.clock / 1e6:,.0f} MHz", "architecture white paper, without tensor cores"),
    ("multiprocessors", str(H100.multiprocessors), "data sheet"),
    (
        "instructions",
        f"{SCHEDULERS} of a warp a clock and multiprocessor",
        "architecture white paper: four warp schedulers",
    ),
)
"""Rows of the table: quantity, amount, and where it is stated."""
