"""Feature maps of several components: softmax, polynomials, frozen projections.

Such a map is several nodes, and its features may be in any order. It is known by its values: on
random inputs of several magnitudes the products phi(x) . phi(y) are, up to a factor, those of a map
of ``linexport.models``, among the queries and among the keys. The proof of the whole attention has
the last word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.monomials import Size
from linexport.match.forms.axes import Axis, Index, size_of
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.terms import IDENTITY, Leaf
from linexport.match.roles.known_maps import KnownMap, known_maps
from linexport.match.roles.map_samples import draw_samples
from linexport.match.roles.roles import Roles
from linexport.models import feature_maps

DEEPEST = 40
"""Nodes of the longest map looked for."""


@dataclass(frozen=True)
class Mapped:
    """The map in front of an attention: phi(scale x), whose parameters are frozen.

    Attributes:
        scales: of the query and of the key.
        features: M.
        proven_to: largest |x| on which it was compared with the nodes it stands for.
        cancels: its kernel as text, where sums of it may be small although their terms are large,
            so that a quotient of two of them loses its digits; else empty.
    """

    kind: str
    parameters: tuple[np.ndarray, ...]
    scales: dict[str, float]
    features: int
    proven_to: float
    cancels: str = ""


@dataclass(frozen=True)
class _Side:
    """One reading of the queries or of the keys: a known map of ``source``, of that width."""

    known: KnownMap
    source: Leaf
    width: Axis


def read_map(e: Evaluator, roles: Roles, imports: dict[str, int]) -> tuple[Roles, Mapped] | None:
    """The roles in front of a known map, and the map; None where there is none."""
    if len(roles.query) != 1 or len(roles.key) != 1 or len(roles.channels) != 1:
        return None
    # phi(q) . phi(k) is the kernel only if both sides have the same map with the same parameters.
    # A side may have several readings (of x, or of x / 2 with another scale): the first pair that
    # agrees is taken.
    keys = _sides(e, roles, "key", imports)
    for query in _sides(e, roles, "query", imports) if keys else ():
        for key in keys:
            q, k = query.known, key.known
            if _identity(q) != _identity(k) or query.width.size != key.width.size:
                continue
            # (c_q phi(q)) . (c_k phi(k)) = c_q c_k phi(q) . phi(k): the factors leave the sum. From
            # here on the channels d are those in front of the map, one set for queries and keys.
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


def _identity(known: KnownMap) -> tuple[str, list[bytes]]:
    return known.kind, [p.tobytes() for p in known.parameters]


def _sides(e: Evaluator, roles: Roles, side: str, imports: dict[str, int]) -> list[_Side]:
    """Readings of one side: of an unscaled source first, of refined maps, then of the nearest."""

    def rank(reading: _Side) -> tuple[bool, bool]:
        known = reading.known
        return known.scale != 1.0, not feature_maps.find_map(known.kind).refines

    return sorted(_readings(e, roles, side, imports), key=rank)


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
        # A map acts on the channels alone and keeps every other dim.
        if any(a != b for p, (a, b) in enumerate(zip(found, sizes, strict=True)) if p != channel):
            continue
        samples = draw_samples(e, source, found, nodes, leaf.tensor, imports)
        if samples is None:
            continue
        places = (leaf.dims.index(time), channel)
        pairs = [
            (np.moveaxis(x, places, (-2, -1)), np.moveaxis(y, places, (-2, -1))) for x, y in samples
        ]
        width = Axis(found[channel])
        dims: tuple[Index, ...] = (*leaf.dims[:channel], (width,), *leaf.dims[channel + 1 :])
        for known in known_maps(side, pairs, nodes):
            yield _Side(known, Leaf(source, dims), width)


def _sources(e: Evaluator, tensor: gs.Tensor) -> Iterator[tuple[gs.Tensor, list[gs.Node]]]:
    """Tensors that another is a function of, with the nodes between; the nearest first."""
    place = {id(node): i for i, node in enumerate(e.graph.nodes)}
    pending, nodes = {tensor.name: tensor}, list[gs.Node]()

    def position(t: gs.Tensor) -> int:
        return place.get(id(t.inputs[0]), -1) if t.inputs else -1

    # Go back in the order of the graph, the latest first. Where all paths meet in one tensor, the
    # nodes taken so far compute the output from it and from constants alone.
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
