"""Feature maps of several components: softmax, polynomials, frozen projections.

Such a map is several nodes, and its features may be in any order. It is known by its values: on
random inputs of several magnitudes the products phi(x) . phi(y) are, up to a factor, those of a map
of ``linexport.models``, among the queries and among the keys. The proof of the whole attention has
the last word.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs
import torch

from linexport.models import feature_maps
from linexport.recognise.axes import Axis, Index, size_of
from linexport.recognise.evaluate import Evaluator
from linexport.recognise.roles import Roles
from linexport.recognise.running import session, size_value, symbols_in
from linexport.recognise.sizes import Size
from linexport.recognise.terms import IDENTITY, Leaf

log = logging.getLogger("linexport.recognise")

DEEPEST = 40
"""Nodes of the longest map looked for."""

SIZES = (5, 7)
"""Sizes given to dynamic dims, in turn."""

TOKENS = 16
"""Products are compared of so many."""

EQUAL = 1e-4
"""Relative to the sum of |phi_i(x) phi_i(y)|: rounding of float32. Another map differs by a tenth
and more; one with a bound or an added constant differs where its features are large or small."""

MAGNITUDES = (1.0, 1e-3, 10.0, 1e2, 1e4, 1e6, 1e8)
"""Factors on inputs of unit variance. The first is the one that scale and factor are read from."""

EXPONENTS = {"Exp", "Softmax", "Cos", "Sin"}
EXPONENTIAL = MAGNITUDES[:3]
"""For such operators: beyond it the rounding of an exponent or of an angle exceeds ``EQUAL``."""

BRANCHING = {"Clip", "Max", "Min", "Where"}
"""Operators whose bounds lie outside what exponents can be compared on."""

SMALLEST = 1e-30
"""Products of features that are nearly 0 in float32 are equal."""

HUGE = 1e37
"""Near the end of float32: what is computed on the way may be infinite."""

_Sample = tuple[np.ndarray, np.ndarray]
"""x and what nodes make of it, tokens and channels last."""


@dataclass(frozen=True)
class Mapped:
    """The map in front of an attention: phi(scale x), whose parameters are frozen.

    Attributes:
        scales: of the query and of the key.
        features: M.
        proven_to: largest |x| on which it was compared with the nodes it stands for.
        cancels: sums of its kernel may be small although their terms are large, so that a quotient
            of two of them loses its digits.
    """

    kind: str
    parameters: tuple[np.ndarray, ...]
    scales: dict[str, float]
    features: int
    proven_to: float
    cancels: bool = False


@dataclass(frozen=True)
class _Known:
    """A map that some nodes compute: factor phi(scale x), with M features."""

    kind: str
    parameters: tuple[np.ndarray, ...]
    scale: float
    factor: float
    features: int
    proven_to: float


@dataclass(frozen=True)
class _Side:
    """One reading of the queries or of the keys: a known map of ``source``, of that width."""

    known: _Known
    source: Leaf
    width: Axis


def read_map(e: Evaluator, roles: Roles, imports: dict[str, int]) -> tuple[Roles, Mapped] | None:
    """The roles in front of a known map, and the map; None where there is none."""
    if len(roles.query) != 1 or len(roles.key) != 1 or len(roles.channels) != 1:
        return None
    keys = _sides(e, roles, "key", imports)
    for query in _sides(e, roles, "query", imports) if keys else ():
        for key in keys:
            q, k = query.known, key.known
            if _identity(q) != _identity(k) or query.width.size != key.width.size:
                continue
            shared = key.source.rename({key.width: (query.width,)})
            in_front = replace(
                roles,
                query=(query.source,),
                key=(shared,),
                channels=(query.width,),
                scale=roles.scale * q.factor * k.factor,
            )
            scales = {"query": q.scale, "key": k.scale}
            proven_to = min(q.proven_to, k.proven_to)
            return in_front, Mapped(q.kind, q.parameters, scales, q.features, proven_to)
    return None


def _identity(known: _Known) -> tuple[str, list[bytes]]:
    return known.kind, [p.tobytes() for p in known.parameters]


def _sides(e: Evaluator, roles: Roles, side: str, imports: dict[str, int]) -> list[_Side]:
    """Readings of one side; those of an unscaled source first, then of the nearest."""
    found = list(_readings(e, roles, side, imports))
    return sorted(found, key=lambda reading: reading.known.scale != 1.0)


def _readings(e: Evaluator, roles: Roles, side: str, imports: dict[str, int]) -> Iterator[_Side]:
    leaf = (roles.query if side == "query" else roles.key)[0]
    time = roles.query_position if side == "query" else roles.key_position
    if leaf.function != IDENTITY or roles.channels not in leaf.dims or time not in leaf.dims:
        return
    channel = leaf.dims.index(roles.channels)
    sizes: list[Size | None] = [size_of(index) for index in leaf.dims]
    for source, nodes in _sources(e, leaf.tensor):
        found = e.sizes(source)
        if found is None or len(found) != len(sizes) or found[channel].known is None:
            continue
        if any(a != b for p, (a, b) in enumerate(zip(found, sizes, strict=True)) if p != channel):
            continue
        samples = _samples(e, source, found, nodes, leaf.tensor, imports)
        if samples is None:
            continue
        places = (leaf.dims.index(time), channel)
        pairs = [
            (np.moveaxis(x, places, (-2, -1)), np.moveaxis(y, places, (-2, -1))) for x, y in samples
        ]
        width = Axis(found[channel])
        dims: tuple[Index, ...] = (*leaf.dims[:channel], (width,), *leaf.dims[channel + 1 :])
        for known in _known(side, pairs, nodes):
            yield _Side(known, Leaf(source, dims), width)


def _sources(e: Evaluator, tensor: gs.Tensor) -> Iterator[tuple[gs.Variable, list[gs.Node]]]:
    """Tensors that another is a function of, with the nodes between; the nearest first."""
    place = {id(node): i for i, node in enumerate(e.graph.nodes)}
    pending, nodes = {tensor.name: tensor}, list[gs.Node]()

    def position(t: gs.Tensor) -> int:
        return place.get(id(t.inputs[0]), -1) if t.inputs else -1

    while pending and len(nodes) < DEEPEST:
        last = max(pending.values(), key=position)
        node = last.inputs[0] if last.inputs else None
        if node is None or any(isinstance(a, gs.Graph) for a in node.attrs.values()):
            return
        pending = {n: t for n, t in pending.items() if not t.inputs or t.inputs[0] is not node}
        nodes.insert(0, node)
        pending |= {t.name: t for t in node.inputs if not _given(e, t)}
        if len(pending) == 1:
            yield next(iter(pending.values())), list(nodes)


def _given(e: Evaluator, tensor: gs.Tensor) -> bool:
    """Return whether a tensor does not depend on queries: absent, stored, or a shape."""
    return tensor.is_empty() or e.is_weight(tensor) or e.values.get(tensor) is not None


def _samples(
    e: Evaluator,
    source: gs.Variable,
    shape: Sequence[Size],
    nodes: Sequence[gs.Node],
    result: gs.Variable,
    imports: dict[str, int],
) -> list[_Sample] | None:
    """Random numbers for the source, and what the nodes make of them, at several magnitudes."""
    made = {o.name for n in nodes for o in n.outputs}
    others = {t.name: t for n in nodes for t in n.inputs if isinstance(t, gs.Variable)}
    others = {n: t for n, t in others.items() if n not in made and n != source.name and n}
    counted = {n: e.values.get(t) for n, t in others.items()}
    if any(v is None for v in counted.values()):
        return None
    sizes = [*shape, *(s for v in counted.values() for s in _sizes(v))]
    symbols = {
        n: SIZES[i % 2] for i, n in enumerate(sorted({m for s in sizes for m in symbols_in(s)}))
    }
    try:
        fed = {n: _numbers(v, symbols) for n, v in counted.items()}
        with _typed(others, fed):
            run = session([source, *others.values()], nodes, result, imports)
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


def _stored(nodes: Sequence[gs.Node]) -> list[np.ndarray]:
    """Matrices among the weights that nodes read."""
    constants = [t for n in nodes for t in n.inputs if isinstance(t, gs.Constant)]
    arrays = [np.squeeze(t.values) for t in constants if len(t.shape) >= 2]
    return [a.astype(np.float32) for a in arrays if a.ndim == 2]


def _known(side: str, samples: Sequence[_Sample], nodes: Sequence[gs.Node]) -> Iterator[_Known]:
    """Maps whose products of features are those of y on all samples of (x, y)."""
    operators = {n.op for n in nodes}
    if operators & EXPONENTS and operators & BRANCHING:
        return
    width = samples[0][0].shape[-1]
    matrices = [m for a in _stored(nodes) for m in (a, a.T) if m.shape[0] == width]
    for kind in feature_maps.kinds():
        if feature_maps.find_map(kind).elementwise:
            continue
        for parameters in [(), *((np.ascontiguousarray(m),) for m in matrices)]:
            for scale in (1.0, width**0.25):
                features = _features(kind, side, scale * samples[0][0], parameters)
                if features is None:  # it takes other parameters
                    break
                factor = _factor(features, samples[0][1])
                if factor is None:
                    continue
                compared = _compared(kind, side, parameters, scale, factor, samples)
                if compared is not None:
                    count = features.shape[-1]
                    yield _Known(kind, parameters, scale, factor**0.5, count, compared)


def _features(
    kind: str, side: str, x: np.ndarray, parameters: Sequence[np.ndarray]
) -> np.ndarray | None:
    """phi(x) in float64; None where the map takes other parameters."""
    found = feature_maps.find_map(kind)
    frozen = [torch.from_numpy(p.astype(np.float64)) for p in parameters]
    try:
        phi = found.phi if side == "query" else found.phi_key
        return np.asarray(phi(torch.from_numpy(x), *frozen).numpy())
    except Exception:
        return None


def _factor(features: np.ndarray, y: np.ndarray) -> float | None:
    """Return c where y . y = c phi . phi, as nearly as can be; None if not proportional."""
    target, got = _products(y), _products(features)
    with np.errstate(over="ignore", invalid="ignore"):  # another map may be far too large
        factor = float((target * got).sum() / max((got * got).sum(), 1e-300))
        close = np.abs(target - factor * got).max() <= EQUAL * np.abs(target).max()
    if not close or factor <= 0:
        return None
    return 1.0 if abs(factor - 1) < EQUAL else factor


def _compared(
    kind: str,
    side: str,
    parameters: Sequence[np.ndarray],
    scale: float,
    factor: float,
    samples: Sequence[_Sample],
) -> float | None:
    """The largest |x| of samples in which y . y = factor phi . phi; None where they differ."""
    largest = 0.0
    for x, y in samples:
        features = _features(kind, side, scale * x, parameters)
        assert features is not None
        features = features * factor**0.5
        ends = ~np.isfinite(y).all(-1) | (np.abs(features) > HUGE).any(-1)
        if (np.abs(y[ends]).max(-1, initial=np.inf) < HUGE).any():
            return None  # bounded where the map is not
        if ends.any():
            break  # larger inputs overflow as well
        target, got = _products(y), _products(features)
        limit = EQUAL * _products(np.abs(features)) + SMALLEST
        if (np.abs(target - got) > limit).any():
            log.debug("not %s at |x| = %g: its features differ", kind, np.abs(x).max())
            return None
        largest = float(np.abs(x).max())
    return largest


def _products(features: np.ndarray) -> np.ndarray:
    """(..., tokens, tokens)."""
    first = features[..., :TOKENS, :]
    return np.asarray(first @ np.swapaxes(first, -1, -2))
