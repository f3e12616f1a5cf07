"""What compilers make of the kernels, for every compute capability, on a machine without a GPU.

The gate (``plugins.kernels.gate``): no register is spilled, matrix products run on tensor cores, no
wgmma is serialised, shared memory fits, and stages have asynchronous copies.
``tools/gate_kernels.py`` names the nodes; all of them at heads of 64 and 128 take hours, so that a
few are assembled here and the rest where tests are slow.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from linexport.errors import BuildError
from linexport.plugins.kernels.architectures import ARCHITECTURES
from linexport.plugins.kernels.compile import CompiledKernel, compile_kernels
from linexport.plugins.kernels.gate import (
    LARGEST_SHARED,
    Instructions,
    failures,
    instructions,
    occupancy,
)
from linexport.plugins.kernels.launch import TYPES, Argument, Kernel
from linexport.plugins.kernels.plan import plan_launches
from tests.support import kernels

pytestmark = pytest.mark.services

VARIANTS = ("linear", "elu1", "gated", "channel", "delta", "gated_delta", "kda", "bidirectional")
QUICK = [("elu1", 64, 90), ("gated_delta", 64, 120)]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compiled afresh in each run."""
    place = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LINEXPORT_CACHE", str(place))
        yield place


@pytest.fixture(scope="session")
def tool() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        return importlib.import_module("gate_kernels")


@pytest.mark.parametrize(
    ("case", "dtype", "width", "sm"),
    [
        ("linear elu1", "bfloat16", 64, 90),
        ("gated elu1 masked, grouped", "bfloat16", 128, 90),
        pytest.param("gated elu1 masked, grouped", "float16", 128, 90, marks=pytest.mark.slow),
        pytest.param("gated delta", "bfloat16", 64, 120, marks=pytest.mark.slow),
        ("delta", "float32", 128, 87),
        ("map favor+", "float32", 128, 89),
        pytest.param("linear", "float16", 64, 120, marks=pytest.mark.slow),
        pytest.param("gated delta masked, grouped", "float32", 128, 120, marks=pytest.mark.slow),
        pytest.param("gated normalised elu1", "float16", 128, 89, marks=pytest.mark.slow),
    ],
)
def test_gate(tool: ModuleType, case: str, dtype: str, width: int, sm: int) -> None:
    found = list(tool.rows({case: tool.nodes(width)[case]}, width, dtype, sm, layered=False))
    assert [tool.line(row) for row in found if row["failures"]] == []


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "sm"), [("float32", 89), ("bfloat16", 90)])
def test_gate_of_a_layer(tool: ModuleType, dtype: str, sm: int) -> None:
    found = {row["kernel"]: row for row in tool.rows({}, 128, dtype, sm)}
    assert {"operands.write", "recurrent.step"} < set(found)
    assert [tool.line(row) for row in found.values() if row["failures"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_kernel_passes_the_gate(tool: ModuleType, dtype: str, width: int, sm: int) -> None:
    found = list(tool.rows(tool.nodes(width), width, dtype, sm))
    assert len(found) > 60
    assert [tool.line(row) for row in found if row["failures"]] == []


@pytest.mark.parametrize(
    ("sm", "warps", "registers", "shared", "blocks"),
    [
        (90, 8, 128, 0, 2),
        (90, 8, 129, 0, 1),
        (90, 4, 255, 0, 2),
        (90, 4, 168, 0, 3),
        (90, 4, 32, LARGEST_SHARED[90], 1),
        (89, 4, 32, 50176, 2),
        (89, 4, 32, 50177, 1),
        (80, 4, 32, 82944, 2),
    ],
)
def test_blocks_of_a_multiprocessor(
    sm: int, warps: int, registers: int, shared: int, blocks: int
) -> None:
    """By NVIDIA's tables: 64 Ki registers; 228, 100 and 164 KiB of shared memory, one a block's."""
    binary = CompiledKernel("", sm, "f", shared, warps, b"", "", registers, 0, ())
    assert occupancy(binary) == blocks


def test_the_gate_names_what_is_wrong() -> None:
    kernel = plan_launches(kernels.node("linear", 64), "bfloat16", 90).single.launches[0].kernel
    binary = CompiledKernel(kernel.name, 90, "f", LARGEST_SHARED[90], 4, b"", "", 255, 0, ())
    right = Instructions({"HGMMA": 2}, copies=1)
    assert kernel.stages > 1
    assert failures(kernel, binary, right) == []
    assert failures(kernel, binary, right, 2) == ["1 blocks a multiprocessor, 2 planned"]
    large = LARGEST_SHARED[90] + 1
    wrong = replace(binary, shared=large, spilled=8, serialised=("C7510",))
    assert failures(kernel, wrong, Instructions({}, copies=0)) == [
        "8 bytes spilled",
        "wgmma serialised (C7510)",
        "232449 bytes of shared memory, 232448 allowed",
        "0 blocks a multiprocessor, 1 planned",
        "no tensor-core instruction",
        "2 stages, no asynchronous copy",
    ]
    assert failures(replace(kernel, stages=1), binary, replace(right, copies=0)) == []


def test_stages_need_asynchronous_copies(tool: ModuleType) -> None:
    """A mask and several queries of a state do not prevent them; a loop without products does."""
    chosen = plan_launches(tool.nodes(64)["linear masked, grouped"], "bfloat16", 80)
    assert chosen.segmented
    output, scan = chosen.single.launches[0].kernel, chosen.segmented.launches[1].kernel
    mutant = replace(scan, stages=2)
    binaries = compile_kernels([output, mutant], 80)
    wrong = {
        kernel: failures(kernel, binaries[kernel.name], instructions(binaries[kernel.name]))
        for kernel in (output, mutant)
    }
    assert output.stages == 2
    assert wrong == {output: [], mutant: ["2 stages, no asynchronous copy"]}


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("width", [20, 64, 200, 256])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kernel_compiles_and_fits(variant: str, width: int, sm: int, dtype: str) -> None:
    for binary in compile_kernels(
        plan_launches(kernels.node(variant, width), dtype, sm).kernels(), sm
    ).values():
        assert binary.shared <= LARGEST_SHARED[sm]


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["taylor2", "quadratic", "favor+", "exp"])
def test_widening_maps_compile(kind: str, sm: int) -> None:
    width, _, _, parameter = kernels.maps()[kind]
    for op in ("LinearAttention", "FeatureMap"):
        chosen = plan_launches(kernels.mapped(op, kind, width, parameter), "bfloat16", sm)
        compile_kernels(chosen.kernels(), sm)


def test_the_binary_takes_what_the_plan_says() -> None:
    """Pointers of 64 bits and integers of 32 in order, and two pointers more."""
    chosen = plan_launches(kernels.node("elu1", 64), "bfloat16", 90).kernels()
    for kernel in chosen:
        binary = compile_kernels([kernel], 90)[kernel.name]
        entry = re.search(rf"\.entry {binary.entry}\((.*?)\n\)", binary.ptx, re.S)
        assert entry
        types = re.findall(r"\.param \.(\w+)", entry[1])
        assert types[:-2] == ["u64" if a.is_pointer else "u32" for a in kernel.arguments]
        assert types[-2:] == ["u64", "u64"]
        assert binary.warps == kernel.warps


def test_loads_are_sixteen_bytes_wide() -> None:
    """Since pointers are promised to be aligned."""
    chosen = plan_launches(kernels.node("elu1", 64), "bfloat16", 90).kernels()
    wide = r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10"
    for kernel in chosen:
        if kernel.function == "linear.segment_output":
            ptx = compile_kernels([kernel], 90)[kernel.name].ptx
            assert re.search(wide, ptx)
            assert not re.search(r"ld\.global\S*\.b16", ptx)


def test_binaries_hold_no_path_of_this_machine() -> None:
    for variant, width, sm in QUICK:
        chosen = plan_launches(kernels.node(variant, width), "bfloat16", sm).kernels()[:1]
        (binary,) = compile_kernels(chosen, sm).values()
        assert str(Path.home()).encode() not in binary.cubin
        assert b".py" not in binary.cubin


def test_the_cache_is_used_and_gives_the_same(cache: Path) -> None:
    chosen = plan_launches(kernels.node("elu1", 64), "bfloat16", 90).kernels()[:1]
    first = compile_kernels(chosen, 90)
    (path,) = cache.rglob(f"sm90/{chosen[0].name}.cubin")
    stamp = path.stat().st_mtime_ns
    assert compile_kernels(chosen, 90) == first
    assert path.stat().st_mtime_ns == stamp


def test_a_kernel_that_does_not_compile_says_why() -> None:
    kernel = Kernel("causal_conv.convolve", (Argument("length", "i32"),), (), 4, 1)
    with pytest.raises(BuildError, match=r"does not compile for compute capability 9\.0"):
        compile_kernels([kernel], 90)
