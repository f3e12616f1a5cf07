"""Reshapes of labelled axes are reshapes of arrays; sizes divide as monomials do."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linexport.graph.monomials import ONE, Size, parse
from linexport.graph.run_subgraph import size_value, symbols_in
from linexport.match.forms.axes import Axis, fresh, regroup, size_of, unify

SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=5)


def positions(dims: list[tuple[Axis, ...]]) -> list[Axis]:
    return [a for index in dims for a in index]


@settings(max_examples=200, deadline=None)
@given(shape=SHAPES, data=st.data())
def test_regrouped_dims_have_the_sizes_asked_for(shape: list[int], data: st.DataObject) -> None:
    """Any target made by merging neighbours and splitting divisors; the order of labels stays."""
    target = list(shape)
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(target) - 1))
        factor = data.draw(st.sampled_from([1, 2, 3]))
        if data.draw(st.booleans()) and place + 1 < len(target):
            target[place : place + 2] = [target[place] * target[place + 1]]
        elif target[place] % factor == 0:
            target[place : place + 1] = [factor, target[place] // factor]
    dims = [fresh(Size(n)) for n in shape]
    grouped = regroup(dims, [Size(n) for n in target])
    if grouped is None:
        # 2 x 3 x 4 as 4 x 6 needs an axis cut across, which no label can be.
        ends, cuts = (list(np.cumprod(s)) for s in (shape, target))
        assert any(a % b and b % a for a in ends for b in cuts)
        return
    result, splits = grouped
    assert [size_of(i).known for i in result] == target
    renamed = [b for a in positions(dims) for b in splits.get(a, (a,))]
    assert positions(result) == renamed


def test_a_dynamic_dim_is_split_and_merged_on_trust() -> None:
    length = (Axis(parse("seq")),)
    split, splits = regroup([length], [parse("(seq//16)"), Size(16)]) or ([], {})
    assert [str(size_of(i)) for i in split] == ["(seq//16)", "16"] and length[0] in splits
    merged, _ = regroup(split, [parse("seq")]) or ([], {})
    assert positions(merged) == positions(split)


@pytest.mark.parametrize("padding", ["PythonMod(-seq, 8)", "Mod(8 - (Mod(seq, 8)), 8)"])
def test_the_first_of_padded_tokens_are_the_tokens(padding: str) -> None:
    """As torch states the size of ``padded[:, :tokens]`` where chunks are merged by flatten."""
    chunks = f"(((seq + ({padding}))//8))"
    assert parse(f"Min(seq, 8*({chunks}))") == parse("seq")
    for other in (f"Min(n, 8*({chunks}))", f"Min(seq, 4*({chunks}))"):
        assert str(parse(other)) == other


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_indices_of_one_size_become_the_same(a: int, b: int, c: int) -> None:
    parts = (*fresh(Size(a)), *fresh(Size(b)), *fresh(Size(c)))
    whole = fresh(Size(a * b * c))
    renaming = unify(parts, whole)
    assert renaming is not None
    labels = [tuple(y for x in i for y in renaming.get(x, (x,))) for i in (parts, whole)]
    assert labels[0] == labels[1]
    assert math.prod(x.size.known or 0 for x in labels[0]) == a * b * c


def test_sizes_divide_as_monomials() -> None:
    assert parse("8*batch*seq").divided(parse("seq*8")) == parse("batch")
    assert parse("batch").divided(parse("seq")) is None
    assert parse("6*batch").divided(Size(4)) is None
    assert parse("seq") * ONE == parse("seq")
    assert str(parse("seq") + Size(1)) == "(seq+1)"
    assert (parse("seq") - parse("seq")).known in (0, None)


@pytest.mark.parametrize(
    ("size", "whole"),
    [
        ("seq//(seq//8)", "8"),
        ("(16*seq)//(8*(seq//8))", "16"),
        ("(16*seq)//((seq//8)*(seq//(seq//8)))", "16"),
        ("(seq+1)//(seq//8)", "((seq+1)//(seq//8))"),
    ],
)
def test_a_quotient_by_a_number_of_chunks_is_a_number(size: str, whole: str) -> None:
    assert str(parse(size)) == whole


def test_a_remainder_is_followed_however_it_is_written() -> None:
    """Padded chunks, as torch writes their number, have the size that a graph computes."""
    chunks = parse("((seq + (Mod(16 - (Mod(seq, 16)), 16)))//16)")
    computed = (parse("seq") + (Size(16) - parse("seq") % Size(16)) % Size(16)) // Size(16)
    assert chunks == computed
    assert symbols_in(chunks) == {"seq"}
    assert [size_value(chunks, {"seq": n}) for n in (1, 16, 17, 160)] == [1, 1, 2, 10]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2*CeilToInt(IntTrueDiv(2*height, 2))", "2*height"),
        ("(256*h*w)//(CeilToInt(IntTrueDiv(2*h, 2))*CeilToInt(IntTrueDiv(2*w, 2)))", "256"),
        ("TruncToInt(IntTrueDiv(6*h, 3))", "2*h"),
    ],
)
def test_a_rounded_quotient_that_is_whole_is_a_monomial(text: str, expected: str) -> None:
    assert parse(text) == parse(expected)


@pytest.mark.parametrize("height", [1, 6, 7, 8, 50])
def test_a_rounded_quotient_is_that_of_integers(height: int) -> None:
    rounded = {"CeilToInt": math.ceil, "FloorToInt": math.floor}
    for name, function in rounded.items():
        size = parse(f"{name}(IntTrueDiv(h, 7))")
        assert size_value(size, {"h": height}) == function(height / 7)
