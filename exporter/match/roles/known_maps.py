"""Maps of ``linexport.models`` matched to nodes by inner products of their features.

    y(x_i) . y(x_j) = factor phi(scale x_i) . phi(scale x_j)   for all pairs of samples

Features may be in any order and have any signs, so features themselves are not compared.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
import torch

from linexport.graph.operators import BOUNDS
from linexport.graph.tensors import constant_values
from linexport.match.roles.map_samples import EXPONENTS, Sample
from linexport.models import feature_maps

log = logging.getLogger("linexport.match")

TOKENS = 16
"""Products are compared of so many."""

EQUAL = 1e-4
"""Relative to the sum of |phi_i(x) phi_i(y)|: rounding of float32. Another map differs by a tenth
and more; one with a bound or an added constant differs where its features are large or small."""

BRANCHING = BOUNDS | {"Where"}
"""Operators whose bounds lie outside what exponents can be compared on."""

FLOOR = 1e-6
"""Inputs are compared from a thousandth on: a lower bound this small changes smaller ones only."""

SMALLEST = 1e-30
"""Products of features that are nearly 0 in float32 are equal."""

HUGE = 1e37
"""Near the end of float32: what is computed on the way may be infinite."""


@dataclass(frozen=True)
class KnownMap:
    """A map that some nodes compute: factor phi(scale x), with M features."""

    kind: str
    parameters: tuple[np.ndarray, ...]
    scale: float
    factor: float
    features: int
    proven_to: float


def _keeps_from_zero(node: gs.Node) -> bool:
    """Return whether a node is max(x, eps) with a small eps, as in front of a division."""
    bounds = [t for t in node.inputs[1:] if not t.is_empty()]
    if node.op not in ("Max", "Clip") or len(bounds) != 1:
        return False
    values = constant_values(bounds[0])
    if values is None or (node.op == "Clip" and node.inputs[1].is_empty()):
        return False
    return bool((np.abs(values) <= FLOOR).all())


def _stored(nodes: Sequence[gs.Node]) -> list[np.ndarray]:
    """Matrices among the weights that nodes read."""
    constants = [t for n in nodes for t in n.inputs if isinstance(t, gs.Constant)]
    arrays = [np.squeeze(t.values) for t in constants if len(t.shape) >= 2]
    return [a.astype(np.float32) for a in arrays if a.ndim == 2]


def known_maps(
    side: str, samples: Sequence[Sample], nodes: Sequence[gs.Node]
) -> Iterator[KnownMap]:
    """Maps whose products of features are those of y on all samples of (x, y)."""
    # Exponents are compared on small inputs only, where a bound further out does not show.
    bounded = any(n.op in BRANCHING and not _keeps_from_zero(n) for n in nodes)
    if bounded and any(n.op in EXPONENTS for n in nodes):
        return
    width = samples[0][0].shape[-1]
    matrices = [m for a in _stored(nodes) for m in (a, a.T) if m.shape[0] == width]
    # A projection may be stored either way round; other matrices do not fit x.
    for kind in feature_maps.kinds():
        if feature_maps.find_map(kind).elementwise:
            continue
        for parameters in [(), *((np.ascontiguousarray(m),) for m in matrices)]:
            if parameters and not feature_maps.find_map(kind).drawn_like(*parameters):
                continue
            # Maps of softmax's kernel scale q and k by d^(-1/4) each. Graphs that leave this to the
            # caller compute phi(d^(1/4) x) of ours.
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
                    yield KnownMap(kind, parameters, scale, factor**0.5, count, compared)


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
    # Features of the graph may be ours in another order, with other signs, or rotated: U phi with
    # U^T U = c I. All of these leave products of features as they are, up to c; and attention reads
    # features in products only. c is the least-squares fit of one set of products to the other.
    target, got = _products(y), _products(features)
    with np.errstate(over="ignore", invalid="ignore"):  # another map may be far too large
        factor = float((target * got).sum() / max((got * got).sum(), 1e-300))
        # Products with a vanishing norm would be close to anything; the largest is not.
        close = np.abs(target - factor * got).max() <= EQUAL * np.abs(target).max()
    # phi takes the root of the factor on each side, so it must be positive.
    if not close or factor <= 0:
        return None
    return 1.0 if abs(factor - 1) < EQUAL else factor


def _compared(
    kind: str,
    side: str,
    parameters: Sequence[np.ndarray],
    scale: float,
    factor: float,
    samples: Sequence[Sample],
) -> float | None:
    """The largest |x| of samples in which y . y = factor phi . phi; None where they differ."""
    largest = 0.0
    for x, y in samples:
        features = _features(kind, side, scale * x, parameters)
        assert features is not None
        features = features * factor**0.5
        # Where ours is near the end of float32 the graph's may be infinite. If it is well inside
        # instead, the graph has a bound that our map has not.
        ends = ~np.isfinite(y).all(-1) | (np.abs(features) > HUGE).any(-1)
        if (np.abs(y[ends]).max(-1, initial=np.inf) < HUGE).any():
            return None  # bounded where the map is not
        if ends.any():
            break  # larger inputs overflow as well
        target, got = _products(y), _products(features)
        # Products are sums whose terms may cancel: their rounding is that of the sum of magnitudes.
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
