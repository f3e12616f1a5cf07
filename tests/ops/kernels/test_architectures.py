"""Compute capabilities by name, and a kernel really assembled for each."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from linexport.errors import UsageError
from linexport.plugins.kernels.architectures import (
    ARCHITECTURES,
    OWN_INSTRUCTIONS,
    capability_of,
    runs_on,
    toolchain,
)
from linexport.plugins.kernels.compile import compile_kernels
from linexport.plugins.kernels.gate import failures, instructions
from linexport.plugins.kernels.plan import plan_launches
from linexport.plugins.tensorrt.library import LAUNCHING
from tests.support import kernels

ELF_FLAGS = 48
"""Offset of e_flags in an ELF header; the assemblers write the architecture there."""


def name_of(sm: int) -> str:
    """Return ptxas's name of a compute capability, with its own instructions or without."""
    return f"sm_{sm}{'a' if sm in OWN_INSTRUCTIONS else ''}"


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
    ("gpu", "sm"), [("89", 89), ("l4", 89), ("orin", 87), ("T4", 75), ("rtx 3090", 86)]
)
def test_gpus_are_known_by_name(gpu: str, sm: int) -> None:
    assert capability_of(gpu) == sm


def test_an_unknown_gpu_is_told_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"sms takes .* 89, and .*'rtx4091'.*rtx4090"):
        capability_of("rtx4091")


RUNS = {
    80: (80, 86, 89),
    86: (86, 89),
    87: (87,),
    89: (89,),
    90: (90,),
    100: (100,),
    103: (103,),
    110: (110,),
    120: (120, 121),
    121: (121,),
}
"""GPUs that run the binaries of a compute capability, by NVIDIA's guides."""


@pytest.mark.parametrize("binary", RUNS)
def test_binaries_go_where_nvidia_allows(binary: int) -> None:
    """Never between desktop GPUs and Jetson; 12.0's go to 12.1."""
    assert tuple(gpu for gpu in (75, *RUNS) if runs_on(binary, gpu)) == RUNS[binary]


PROGRAM = """
#include "description.h"
#include <cstdio>
#include <cstdlib>
int main(int count, char** arguments) {
    for (int binary = 1; binary < count; ++binary)
        for (int gpu = 1; gpu < count; ++gpu) {
            linexport::Description description;
            description.plans.emplace(std::atoi(arguments[binary]), linexport::Plan{});
            int found = 0;
            try {
                found = description.smFor(std::atoi(arguments[gpu]));
            } catch (linexport::Error const&) {
            }
            std::printf("%d\\n", found);
        }
}
"""


def test_the_launcher_in_cpp_chooses_the_same_binaries(tmp_path: Path) -> None:
    if (compiler := shutil.which("c++")) is None:
        pytest.skip("needs a C++ compiler")
    program = tmp_path / "program.cpp"
    program.write_text(PROGRAM)
    sources = [program, LAUNCHING / "description.cpp"]
    built = [compiler, "-std=c++17", "-I", LAUNCHING, *sources, "-o", tmp_path / "program"]
    subprocess.run(built, check=True)
    known = [75, *RUNS]
    done = subprocess.run(
        [tmp_path / "program", *map(str, known)], check=True, capture_output=True, text=True
    )
    expected = [binary if runs_on(binary, gpu) else 0 for binary in known for gpu in known]
    assert list(map(int, done.stdout.split())) == expected


def test_assemblers_are_those_of_triton() -> None:
    """The CUDA toolkits named, on which the oldest driver depends, are the ones at hand."""
    pytest.importorskip("triton", reason="kernels are written in Triton: pip install triton")
    from linexport.plugins.kernels import gate

    for sm in ARCHITECTURES:
        found = toolchain(sm)
        assert f"release {found.cuda}," in gate._tool(found.program, "--version")
        assert name_of(sm) in gate._tool(found.program, "--help")
