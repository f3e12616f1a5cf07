"""What compilers make of the kernels, for every compute capability, on a machine without a GPU.

The gate: no register is spilled, matrix products run on tensor cores, no wgmma is serialised, and
shared memory fits. It holds for heads of 64 and 128 in half precision and in TensorFloat-32, and
for heads of 64 in three products of TensorFloat-32, which spill at 128.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from linexport.errors import BuildError
from linexport.plugins.kernels.compile import Binary, compile_kernels
from linexport.plugins.kernels.gate import LARGEST_SHARED, inspect
from linexport.plugins.kernels.launch import Argument, Kernel
from linexport.plugins.kernels.plan import ARCHITECTURES, plan

VARIANTS = ("linear", "elu1", "gated", "channel", "delta", "gated_delta", "kda", "bidirectional")
MULTIPLY = ("segment_state", "segment_output", "chunk_inverse")
QUICK = [("elu1", 64, 90), ("gated_delta", 64, 120)]


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compiled afresh in each run."""
    place = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LINEXPORT_CACHE", str(place))
        yield place


def gate(kernel: Kernel, binary: Binary) -> None:
    """All of it, for one kernel."""
    found = inspect(binary)
    what = f"{kernel.function} {dict(kernel.constants)} sm_{binary.sm}: {found}"
    assert found.spilled == 0, what
    assert found.warnings == (), what
    assert binary.shared <= LARGEST_SHARED[binary.sm], what
    if kernel.function.endswith(MULTIPLY):
        assert found.instructions, what


def check(kernels: Any, variant: str, width: int, sm: int, dtype: str, precision: str) -> None:
    """Every kernel of a node."""
    chosen = plan(kernels.node(variant, width), dtype, sm, precision).kernels()
    for name, binary in compile_kernels(chosen, sm).items():
        gate(next(k for k in chosen if k.name == name), binary)


@pytest.mark.parametrize(("variant", "width", "sm"), QUICK)
def test_gate(kernels: Any, variant: str, width: int, sm: int) -> None:
    check(kernels, variant, width, sm, "bfloat16", "tf32x3")


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gate_in_half_precision(
    kernels: Any, variant: str, width: int, sm: int, dtype: str
) -> None:
    check(kernels, variant, width, sm, dtype, "tf32x3")


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize(("precision", "width"), [("tf32", 64), ("tf32", 128), ("tf32x3", 64)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gate_in_float32(kernels: Any, variant: str, precision: str, width: int, sm: int) -> None:
    check(kernels, variant, width, sm, "float32", precision)


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("width", [20, 64, 200, 256])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kernel_compiles_and_fits(
    kernels: Any, variant: str, width: int, sm: int, dtype: str
) -> None:
    for binary in compile_kernels(
        plan(kernels.node(variant, width), dtype, sm).kernels(), sm
    ).values():
        assert binary.shared <= LARGEST_SHARED[sm]


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["taylor2", "quadratic", "favor+", "exp"])
def test_widening_maps_compile(kernels: Any, kind: str, sm: int) -> None:
    width, _, _, parameter = kernels.maps[kind]
    for op in ("LinearAttention", "FeatureMap"):
        chosen = plan(kernels.mapped(op, kind, width, parameter), "bfloat16", sm)
        compile_kernels(chosen.kernels(), sm)


def test_the_binary_takes_what_the_plan_says(kernels: Any) -> None:
    """Pointers of 64 bits and integers of 32 in order, and two pointers more."""
    chosen = plan(kernels.node("elu1", 64), "bfloat16", 90).kernels()
    for kernel in chosen:
        binary = compile_kernels([kernel], 90)[kernel.name]
        entry = re.search(rf"\.entry {binary.entry}\((.*?)\n\)", binary.ptx, re.S)
        assert entry
        types = re.findall(r"\.param \.(\w+)", entry[1])
        assert types[:-2] == ["u64" if a.is_pointer else "u32" for a in kernel.arguments]
        assert types[-2:] == ["u64", "u64"]
        assert binary.warps == kernel.warps


def test_loads_are_sixteen_bytes_wide(kernels: Any) -> None:
    """Since pointers are promised to be aligned."""
    chosen = plan(kernels.node("elu1", 64), "bfloat16", 90).kernels()
    wide = r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10"
    for kernel in chosen:
        if kernel.function == "linear.segment_output":
            ptx = compile_kernels([kernel], 90)[kernel.name].ptx
            assert re.search(wide, ptx)
            assert not re.search(r"ld\.global\S*\.b16", ptx)


def test_binaries_hold_no_path_of_this_machine(kernels: Any) -> None:
    for variant, width, sm in QUICK:
        chosen = plan(kernels.node(variant, width), "bfloat16", sm).kernels()[:1]
        (binary,) = compile_kernels(chosen, sm).values()
        assert str(Path.home()).encode() not in binary.cubin
        assert b".py" not in binary.cubin


def test_the_cache_is_used_and_gives_the_same(kernels: Any, cache: Path) -> None:
    chosen = plan(kernels.node("elu1", 64), "bfloat16", 90).kernels()[:1]
    first = compile_kernels(chosen, 90)
    (path,) = cache.rglob(f"sm90/{chosen[0].name}.cubin")
    stamp = path.stat().st_mtime_ns
    assert compile_kernels(chosen, 90) == first
    assert path.stat().st_mtime_ns == stamp


def test_a_kernel_that_does_not_compile_says_why() -> None:
    kernel = Kernel("causal_conv.convolve", (Argument("length", "i32"),), (), 4, 1)
    with pytest.raises(BuildError, match=r"does not compile for compute capability 9\.0"):
        compile_kernels([kernel], 90)
