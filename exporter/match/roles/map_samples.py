"""Random inputs of some nodes, and what the nodes make of them, at several magnitudes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.monomials import Size
from linexport.graph.run_subgraph import session, size_value, symbols_in
from linexport.match.forms.evaluate import Evaluator

SIZES = (5, 7)
"""Sizes given to dynamic dims, in turn."""

MAGNITUDES = (1.0, 1e-3, 10.0, 1e2, 1e4, 1e6, 1e8)
"""Factors on inputs of unit variance. The first is the one that scale and factor are read from."""

EXPONENTS = {"Exp", "Softmax", "Cos", "Sin"}

EXPONENTIAL = MAGNITUDES[:3]
"""For such operators: beyond it the rounding of an exponent or of an angle exceeds ``EQUAL``."""

Sample = tuple[np.ndarray, np.ndarray]
"""x and what nodes make of it, tokens and channels last."""


def draw_samples(
    e: Evaluator,
    source: gs.Tensor,
    shape: Sequence[Size],
    nodes: Sequence[gs.Node],
    result: gs.Tensor,
    imports: dict[str, int],
) -> list[Sample] | None:
    """Random numbers for the source, and what the nodes make of them, at several magnitudes."""
    # What the nodes read besides the source must be sizes, known as functions of symbols: another
    # tensor of the graph would make this a function of two things.
    made = {o.name for n in nodes for o in n.outputs}
    others = {t.name: t for n in nodes for t in n.inputs if isinstance(t, gs.Variable)}
    others = {n: t for n, t in others.items() if n not in made and n != source.name and n}
    counted = {n: e.values.get(t) for n, t in others.items()}
    if any(v is None for v in counted.values()):
        return None
    sizes = [*shape, *(s for v in counted.values() for s in _sizes(v))]
    # Neighbouring symbols differ in size, or a transposed result would pass for the right one.
    symbols = {
        n: SIZES[i % 2] for i, n in enumerate(sorted({m for s in sizes for m in symbols_in(s)}))
    }
    try:
        fed = {n: _numbers(v, symbols) for n, v in counted.items()}
        with _typed(others, fed):
            run = session([source, *others.values()], nodes, result, imports)
        # One draw for all magnitudes: a map that is homogeneous shows as exactly that.
        drawn = np.random.default_rng(0).standard_normal([size_value(s, symbols) for s in shape])
        samples = []
        for magnitude in EXPONENTIAL if any(n.op in EXPONENTS for n in nodes) else MAGNITUDES:
            fed[source.name] = (magnitude * drawn).astype(np.dtype(source.dtype or np.float32))
            (values,) = run.run(None, fed)
            samples.append((fed[source.name].astype(np.float64), values.astype(np.float64)))
    except Exception:  # a part that does not run by itself is not a known map
        return None
    return samples


@contextmanager
def _typed(
    variables: Mapping[str, gs.Variable], values: Mapping[str, np.ndarray]
) -> Iterator[None]:
    """Types and shapes for what files need not state them of."""
    stated = {n: (t.dtype, t.shape) for n, t in variables.items()}
    try:
        for name, value in values.items():
            variables[name].dtype, variables[name].shape = value.dtype, list(value.shape)
        yield
    finally:
        for name, (dtype, shape) in stated.items():
            variables[name].dtype, variables[name].shape = dtype, shape


def _sizes(value: np.ndarray | None) -> list[Size]:
    return [v for v in value.ravel() if isinstance(v, Size)] if value is not None else []


def _numbers(value: np.ndarray | None, symbols: dict[str, int]) -> np.ndarray:
    assert value is not None
    if value.dtype != object:
        return value
    flat = [size_value(v, symbols) if isinstance(v, Size) else int(v) for v in value.ravel()]
    return np.asarray(flat, np.int64).reshape(value.shape)
