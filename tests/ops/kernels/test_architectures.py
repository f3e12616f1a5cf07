"""Compute capabilities by name, and a kernel really assembled for each."""

from __future__ import annotations

import struct

import pytest

from linexport.errors import UsageError
from linexport.plugins.kernels.architectures import (
    ARCHITECTURES,
    capability_of,
    toolchain,
)
from linexport.plugins.kernels.compile import compile_kernels
from linexport.plugins.kernels.gate import failures, instructions
from linexport.plugins.kernels.plan import plan_launches
from tests.support import kernels

ELF_FLAGS = 48
"""Offset of e_flags in an ELF header; the assemblers write the architecture there."""


def name_of(sm: int) -> str:
    """Return ptxas's name of a compute capability: from 9.0 on, with its own features."""
    return f"sm_{sm}{'a' if sm >= 90 else ''}"


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_a_kernel_is_assembled_for_every_architecture(sm: int) -> None:
    """Decode of the gated delta rule: the machine code names the architecture, and passes."""
    pytest.importorskip("triton", reason="kernels are written in Triton: pip install triton")
    plan = plan_launches(kernels.node("gated_delta", 64), "bfloat16", sm)
    assert plan.decode is not None
    (launch,) = plan.decode.launches
    made = compile_kernels([launch.kernel], sm)[launch.kernel.name]
    assert f".target {name_of(sm)}\n" in made.ptx
    (flags,) = struct.unpack_from("<I", made.cubin, ELF_FLAGS)
    assert sm in (flags & 0xFF, flags >> 8 & 0xFF)
    assert failures(launch.kernel, made, instructions(made)) == []


@pytest.mark.parametrize(
    ("gpu", "sm"),
    [
        ("89", 89),
        ("l4", 89),
        ("A100", 80),
        ("orin", 87),
        ("rtx 5090", 120),
        ("T4", 75),
        ("A10", 86),
    ],
)
def test_gpus_are_known_by_name(gpu: str, sm: int) -> None:
    assert capability_of(gpu) == sm


def test_an_unknown_gpu_is_told_which_there_are() -> None:
    with pytest.raises(UsageError, match=r"'x9'; expected .* 89, or GPUs: A100, .*Orin.*T4"):
        capability_of("x9")


def test_assemblers_are_those_of_triton() -> None:
    """The CUDA toolkits named, on which the oldest driver depends, are the ones at hand."""
    pytest.importorskip("triton", reason="kernels are written in Triton: pip install triton")
    from linexport.plugins.kernels import gate

    for sm in ARCHITECTURES:
        found = toolchain(sm)
        assert f"release {found.cuda}," in gate._tool(found.program, "--version")
        assert name_of(sm) in gate._tool(found.program, "--help")
