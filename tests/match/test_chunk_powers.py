"""Stored powers of a decay in the rates within a chunk: with their first numbers, or not at all."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from linexport.graph.monomials import Size
from linexport.match.forms.axes import Axis, fresh
from linexport.match.forms.chunk_powers import in_rates_of
from linexport.match.forms.terms import Form, Iota, Leaf, Nested, Term

SIZE, RATES = 16, np.asarray([0.9, 0.5])
HEAD, PLACE, CHUNK = Axis(Size(2)), Axis(Size(SIZE)), Axis(Size(1, ("chunks",)))


def exponential(number: float, leaf: Leaf | None, axis: Axis) -> Nested:
    term = Term(number, (*([] if leaf is None else [leaf]), Iota((axis,))))
    return Nested("exp", Form(tuple((a,) for a in term.axes), (term,)))


def stored(name: str, value: np.ndarray, *axes: Axis) -> Leaf:
    constant = gs.Constant(name, value.astype(np.float32))
    return Leaf(constant, tuple((a,) for a in axes))


def powers(rates: np.ndarray, number: float) -> np.ndarray:
    return number * rates[:, None] ** -np.arange(SIZE)


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize(("wrong", "is_read"), [(1.0, True), (1.001, False)])
def test_powers_are_read_where_their_rates_are_those_of_the_chunk(
    heads: bool, wrong: float, is_read: bool
) -> None:
    log = np.log(RATES if heads else RATES[:1])
    leaf = stored("rate", log, HEAD) if heads else None
    number = 1.0 if heads else float(log[0])
    place = fresh(Size(SIZE))
    block = Term(2.0, (exponential(number, leaf, place[0]),))
    value = powers(np.exp(log) * wrong, 2.0)
    weights = stored("powers", value if heads else value[0], *([HEAD] if heads else []), PLACE)
    # (r ** 16) ** n, of which float32 has seven digits, and r ** -s.
    log_between = -SIZE * log * (1 + 1e-7)
    between = exponential(
        1.0 if heads else float(log_between[0]),
        stored("between", log_between, HEAD) if heads else None,
        CHUNK,
    )
    rising = Term(block.coefficient, (exponential(-number, leaf, place[0]),))
    term = Term(1.0, (weights, between))
    found = in_rates_of(rising, term, place)
    assert (found is not term) == is_read
    if is_read:
        assert found.coefficient == 2.0
        inner = [f.inner.terms[0] for f in found.of(Nested)]
        assert [x.coefficient for x in inner] == [-number, -SIZE * number]
        assert [x.of(Iota)[0].index for x in inner] == [(PLACE,), (CHUNK,)]
        assert not found.of(Leaf)


def test_other_numbers_in_front_leave_the_term() -> None:
    block = Term(1.0, (exponential(float(np.log(0.9)), None, PLACE),))
    weights = stored("powers", 3.0 * 0.9 ** np.arange(SIZE), PLACE)
    term = Term(1.0, (weights,))
    assert in_rates_of(block, term, (PLACE,)) is term
