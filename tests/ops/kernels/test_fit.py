"""Kernels that need more registers than there are get other warps or stages, and so do plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from linexport.errors import BuildError
from linexport.plugins.kernels import fit
from linexport.plugins.kernels.architectures import ARCHITECTURES
from linexport.plugins.kernels.compile import CompiledKernel, compile_kernels
from linexport.plugins.kernels.launch import Kernel, LaunchPlan
from linexport.plugins.kernels.plan import plan_launches
from tests.support import kernels

Measure = Callable[[Kernel], tuple[int, int]]


def segmented(rule: str = "gated", width: int = 64, dtype: str = "bfloat16") -> LaunchPlan:
    return plan_launches(kernels.node(rule, width), dtype, 90)


def output_of(plan: LaunchPlan) -> Kernel:
    return plan.single.launches[-1].kernel


def transition_of(plan: LaunchPlan) -> Kernel:
    (found,) = (one for one in plan.kernels() if one.function == fit.TRANSITION)
    return found


@pytest.fixture
def assembled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Measure], list[Kernel]]:
    """Stand in for the compiler: bytes spilled and of shared memory by kernel."""

    def stand_in(measure: Measure) -> list[Kernel]:
        asked: list[Kernel] = []

        def compiled(wanted: Iterable[Kernel], sm: int) -> dict[str, CompiledKernel]:
            made = {}
            for kernel in wanted:
                asked.append(kernel)
                spilled, shared = measure(kernel)
                made[kernel.name] = CompiledKernel(
                    kernel.name, sm, "f", shared, kernel.warps, b"", "", 255, spilled, ()
                )
            return made

        monkeypatch.setattr(fit, "compile_kernels", compiled)
        return asked

    return stand_in


def test_what_fits_stays(assembled: Callable[[Measure], list[Kernel]]) -> None:
    plan = segmented()
    asked = assembled(lambda kernel: (0, 0))
    assert fit.fit(plan, 90) == plan
    assert asked == plan.kernels()


def test_fewer_stages_are_tried_before_more_warps(
    assembled: Callable[[Measure], list[Kernel]],
) -> None:
    kernel = output_of(segmented())
    assert (kernel.warps, kernel.stages) == (4, 2)
    asked = assembled(lambda one: (0 if one.warps == 8 else 8, 0))
    assert fit.fitting([kernel], 90) == {kernel: replace(kernel, warps=8)}
    assert [(one.warps, one.stages) for one in asked] == [(4, 2), (4, 1), (8, 2)]


def test_a_plan_counts_on_the_blocks_that_its_kernels_leave_room_for(
    assembled: Callable[[Measure], list[Kernel]],
) -> None:
    plan = segmented()
    assert plan.segmented and plan.resident == 2
    assembled(lambda one: (0 if one.warps == 8 else 8, 0))
    fitted = fit.fit(plan, 90)
    assert fitted.resident == 1
    assert [one.warps for one in fitted.kernels()] == [8] * len(plan.kernels())
    assert fitted.segmented
    before, after = plan.segmented.launches, fitted.segmented.launches
    assert [x.grid for x in after] == [x.grid for x in before]
    assert [x.kernel.arguments for x in after] == [x.kernel.arguments for x in before]
    assert [x.kernel.constants for x in after] == [x.kernel.constants for x in before]


@pytest.mark.parametrize(
    ("width", "dtype", "more"), [(64, "bfloat16", True), (256, "float32", False)]
)
def test_nothing_is_loaded_ahead_of_stores_of_it(width: int, dtype: str, more: bool) -> None:
    """In parts of d_k, which float32 takes, the state is in memory that the loop writes."""
    kernel = replace(output_of(segmented(width=width, dtype=dtype)), stages=1)
    assert any(one.stages > 1 for one in fit.variants(kernel)) == more


def test_parts_of_wide_heads_become_smaller(
    assembled: Callable[[Measure], list[Kernel]],
) -> None:
    """After other warps; a head that a block holds whole stays so."""
    kernel = output_of(segmented(width=256, dtype="float32"))
    assembled(lambda one: (dict(one.constants)["BLOCK_K"], 0))  # type: ignore[return-value]
    (chosen,) = fit.fitting([kernel], 90).values()
    part = {**dict(kernel.constants), "BLOCK_K": 32}
    assert dict(kernel.constants)["BLOCK_K"] == 64
    assert chosen == replace(kernel, constants=tuple(part.items()))
    whole = output_of(segmented())
    assert all(one.constants == whole.constants for one in fit.variants(whole))


def test_products_with_whole_states_are_summed_over_parts(
    assembled: Callable[[Measure], list[Kernel]],
) -> None:
    """A transition that a block holds whole, where other warps and stages do not help it."""
    transition = transition_of(segmented("gated_delta", 128, "float32"))
    assembled(lambda one: (dict(one.constants)["BLOCK_K"] - 64, 0))  # type: ignore[return-value]
    (chosen,) = fit.fitting([transition], 120).values()
    part = {**dict(transition.constants), "BLOCK_K": 64}
    assert dict(transition.constants)["BLOCK_K"] == 128
    assert chosen == replace(transition, constants=tuple(part.items()))
    narrow = transition_of(segmented("gated_delta", 16, "float32"))
    assert all(one.constants == narrow.constants for one in fit.variants(narrow))


def test_where_nothing_fits_the_least_spills(
    assembled: Callable[[Measure], list[Kernel]], caplog: pytest.LogCaptureFixture
) -> None:
    kernel = output_of(segmented())
    assembled(lambda one: (16 * one.warps + one.stages, 0))
    assert fit.fitting([kernel], 90) == {kernel: replace(kernel, warps=2)}
    assert "linear.segment_output keeps 34 bytes of registers in memory" in caplog.text


def test_no_kernel_takes_more_shared_memory_than_there_is(
    assembled: Callable[[Measure], list[Kernel]],
) -> None:
    kernel, largest = output_of(segmented()), ARCHITECTURES[90].shared
    assembled(lambda one: (0, largest + 1 if one.stages > 1 else largest))
    assert fit.fitting([kernel], 90) == {kernel: replace(kernel, stages=1)}
    assembled(lambda one: (0, largest + 1))
    with pytest.raises(BuildError, match=r"232,449 bytes .* 9\.0 may have 232,448.*plugins=False"):
        fit.fitting([kernel], 90)


@pytest.mark.services
def test_a_kernel_that_spills_gets_other_warps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's compiler and ptxas: blocks of 16 warps have too few registers for this tile."""
    pytest.importorskip("triton", reason="kernels are written in Triton: pip install triton")
    monkeypatch.setenv("LINEXPORT_CACHE", str(tmp_path))
    crowded = replace(output_of(segmented(width=128)), warps=16)
    (chosen,) = fit.fitting([crowded], 90).values()
    made = compile_kernels([crowded, chosen], 90)
    assert made[crowded.name].spilled > 0
    assert made[chosen.name].spilled == 0
    assert made[chosen.name].warps == chosen.warps != 16
