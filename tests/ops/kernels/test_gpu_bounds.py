"""Bounds from machine code: loops, instructions and products counted from a listing."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

from tests.support import ROOT

LISTING = """
        Function : segment_output
        /*0000*/                   LDC R1, c[0x0][0x28] ;              /* 0x00000a00ff017b82 */
                                                                       /* 0x000e620000000800 */
        /*0010*/                   MOV R2, RZ ;                        /* 0x000000ff00027202 */
        /*0020*/              @!P5 BRA 0xf0 ;                          /* 0x00000034002cd947 */
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R12, RZ ;  /* 0x0000008cb8c4723c */
        /*0040*/               @P1 BRA 0x70 ;                          /* 0x0000000400241947 */
        /*0050*/                   IADD3 R3, R3, 0x1, RZ ;             /* 0x0000000103037810 */
        /*0060*/                   IADD3 R3, R3, 0x1, RZ ;             /* 0x0000000103037810 */
        /*0070*/               @P2 LDG.E R5, desc[UR4][R6.64] ;        /* 0x0000000406052981 */
        /*0080*/                   HMMA.1688.F32.TF32 R4, R8, R12, R4 ;  /* 0x0000008cb8c4723c */
        /*0090*/                   HMMA.1688.F32.TF32 R4, R8, R12, R4 ;  /* 0x0000008cb8c4723c */
        /*00a0*/               @P0 BRA 0x80 ;                          /* 0xfffffff800d80947 */
        /*00b0*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;  /* 0x0 */
        /*00c0*/                   STL [R1], R4 ;                      /* 0x0000000401007387 */
        /*00d0*/              @!P4 BRA 0x30 ;                          /* 0xfffffff000d4c947 */
        /*00e0*/               @P0 EXIT ;                              /* 0x000000000000094d */
        /*00f0*/                   EXIT ;                              /* 0x000000000000794d */
        /*0100*/                   BRA 0x100;                          /* 0xfffffffc00fc7947 */
"""


def tool(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def sass() -> ModuleType:
    return tool("gpu.sass")


def test_loops_lie_between_a_branch_and_its_target(sass: ModuleType) -> None:
    code = sass.parsed(LISTING)
    assert len(code) == 17
    assert [(x.first, x.last, x.depth) for x in sass.loops(code)] == [(3, 13, 0), (8, 10, 1)]


def test_instructions_are_those_of_the_shortest_way(sass: ModuleType) -> None:
    """7 trips, of 6 instructions without the two that a branch leaves out, and 3 x 3 of a loop."""
    code = sass.parsed(LISTING)
    outer, inner = sass.loops(code)
    around = 3 + 1
    assert sass.issued(code, {outer: 7, inner: 3}) == around + 7 * (6 + 3 * 3)
    assert sass.of_a_trip(code, outer, {outer: 7, inner: 3}) == 6 + 3 * 3
    assert sass.issued(code, {outer: None, inner: None}) == around


def test_products_are_counted_by_their_shapes(sass: ModuleType) -> None:
    code = sass.parsed(LISTING)
    outer, inner = sass.loops(code)
    found = sass.flops(code, {outer: 7, inner: 3})
    of_a_warpgroup = 2 * 64 * 16 * 16
    assert found["half"] == 7 * (2 * 16 * 8 * 16 + of_a_warpgroup / 4)
    assert found["tf32"] == 7 * 3 * 2 * (2 * 16 * 8 * 8)


def test_trips_are_told_of_the_longest_loop_alone(sass: ModuleType) -> None:
    """A loop of which the compiler made two is not the plan's: nothing is counted for the other."""
    bounds = tool("gpu.bounds")
    short, outer, inner = sass.Loop(1, 4, 0), sass.Loop(6, 40, 0), sass.Loop(8, 20, 1)
    assert bounds.trips([short, outer, inner], (128, 4)) == {short: None, outer: 128, inner: 4}
    assert bounds.trips([short, outer, inner], (128,)) == {short: None, outer: 128, inner: None}
    assert bounds.trips([short], ()) == {short: None}


def test_a_case_is_limited_by_its_largest_bound_or_far_above_by_latency() -> None:
    bounds = tool("gpu.bounds")
    peaks = tool("gpu.peaks").H100
    launch: dict[str, Any] = {"memory_ms": 1.0, "tensor_ms": 0.1, "issue_ms": 0.5}
    second = {"memory_ms": 0.1, "tensor_ms": 0.2, "issue_ms": 0.5, "trips": 100, "waves": 1.5}
    case = tool("gpu.cases").CASES[0]
    near = bounds.case_row(case, [launch, second], 2.0, peaks)
    assert (near["bound_ms"], near["limit"]) == (1.5, "memory")
    assert near["clocks_a_trip"] == pytest.approx(2e-3 * peaks.clock / 200)
    assert bounds.case_row(case, [launch, second], 3.1, peaks)["limit"] == "latency"


@pytest.mark.services
def test_products_of_a_kernel_are_those_of_the_chunk_algorithm() -> None:
    """Scores, past, chunk and state: 2 C C d_k + 2 C d_k d_v + 2 C C d_v + 2 C d_k d_v a chunk."""
    cases = {case.name: case for case in tool("gpu.cases").CASES}
    case = cases["prefill linear"]
    (row,) = tool("gpu_bounds").rows_of(case, {})
    chunk, d_k, d_v = case.length // row["trips"], case.width, case.width
    blocks_of_a_state = row["blocks"] // (case.batch * case.heads)
    scores = 2 * chunk * chunk * d_k * blocks_of_a_state  # each block of values has all of them
    rest = 2 * 2 * chunk * d_k * d_v + 2 * chunk * chunk * d_v
    assert sum(row["flops"].values()) == case.batch * case.heads * row["trips"] * (scores + rest)
    assert row["loops_not_told"] == 0 and row["spilled"] == 0
