"""A match as the proof needs it, and as the manifest states it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import onnx_graphsurgeon as gs

from linexport.manifest.matches import MatchRecord, ProofRecord
from linexport.match.emit.attention import MatchWriter
from linexport.match.emit.operands import Factors
from linexport.match.forms import functions
from linexport.match.forms.axes import size_of
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.sign_analysis import is_fraction
from linexport.match.forms.terms import IDENTITY, Function, Leaf
from linexport.match.proof.prove import ProofFailedError, RewriteCandidate
from linexport.match.proof.sampling import Draw, fraction, signed, unit
from linexport.match.roles.roles import Roles
from linexport.match.roles.subgraph import Root, reads
from linexport.plugins.ops import cumulative_sum, diagonal_state_space, generalized_delta_rule

STEEP = 4.0
"""Logarithms of decays above it, of unit inputs, are drawn smaller."""

RULES = {
    generalized_delta_rule.OP.name: "generalized_delta",
    diagonal_state_space.OP.name: "gated",
    cumulative_sum.OP.name: "linear",
}
"""Update rules of operators that have no attribute for them."""


def rewrite_candidate(
    evaluator: Evaluator,
    imports: Mapping[str, int],
    root: Root,
    writer: Factors,
) -> RewriteCandidate:
    """Return both sides of a rewrite, with what is known of the inputs they share.

    Raises:
        ProofFailedError: the type of an input is not known.
    """
    roles, values = root.roles, evaluator.values
    inputs = inputs_of(root.region, writer.nodes)
    known = {t.name: values.numbers(t) for t in inputs}
    sized = [(t, evaluator.sizes(t)) for t in inputs]
    unknown = [t.name for t, sizes in sized if sizes is None or t.dtype is None]
    if unknown:
        raise ProofFailedError(f"the type of {unknown[0]} is not known")
    positive, negative = _drawn_by_sign(roles, writer, known)
    decays = roles.decay.of(Leaf) if roles.decay else []
    return RewriteCandidate(
        [(t, sizes) for t, sizes in sized if sizes is not None],
        {n: v for n, v in known.items() if v is not None},
        positive,
        negative,
        frozenset() if roles.query else frozenset(f.tensor.name for f in decays),
        _bounded(roles, writer.has_signs),
        _channels(roles) if writer.applies_map or _multiplies_channels(roles) else {},
        (root.region, root.tensor),
        (writer.nodes, writer.result),
        size_of(roles.query_position),
        roles.lag,
        imports,
    )


def _drawn_by_sign(
    roles: Roles, writer: Factors, known: Mapping[str, np.ndarray | None]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of inputs that are drawn positive, and of those that are drawn negative."""
    # A quotient is compared only where its denominator has one sign. Features that are tensors as
    # they are, or functions that keep a sign, are drawn positive; other functions see to it, and so
    # does a map.
    divided = (roles.normalize or writer.divides) and not writer.mapped
    features = (*roles.query, *roles.key) if divided else ()
    positive = frozenset(f.tensor.name for f in features if functions.keeps_sign(f.function))
    # log-decays must be at most 0, or states leave float32 within the lengths compared. With a
    # negative coefficient in front of it the tensor itself is drawn positive instead.
    decays = roles.decay.of(Leaf) if roles.decay else []
    falling = frozenset(f.tensor.name for f in decays if f.function == IDENTITY)
    rising = roles.decay is not None and roles.decay.coefficient * _sign(decays, known) < 0
    return (positive | falling, frozenset()) if rising else (positive, falling)


def _sign(decays: Sequence[Leaf], known: Mapping[str, np.ndarray | None]) -> int:
    """Return -1 where the known factors of a decay, such as Mamba's A, are negative."""
    values = [
        f.tensor.values if isinstance(f.tensor, gs.Constant) else known.get(f.tensor.name)
        for f in decays
        if f.function == IDENTITY
    ]
    negative = sum(x is not None and bool((x <= 0).all()) for x in values)
    return -1 if negative % 2 else 1


def _bounded(roles: Roles, may_be_negative: bool) -> dict[str, Draw]:
    """Return how keys and betas of a delta rule are drawn, and decays that are no logarithms."""
    decays = roles.decay.of(Leaf) if roles.decay else []
    found: dict[str, Draw] = {
        f.tensor.name: signed if may_be_negative else fraction
        for f in decays
        if _is_logarithm(f.function) or is_fraction(f.tensor)
    }
    if not roles.query:
        # Quotients of products leave float32 sooner than the recurrence does.
        steep = {f.tensor.name: functions.steepness(f.function) for f in decays}
        gentle = {n: partial(np.multiply, 1 / by) for n, by in steep.items() if by > STEEP}
        found = gentle | found
    if roles.delta:
        found |= {f.tensor.name: unit for f in roles.key}
    if roles.transition is not None:
        vectors = (*roles.transition.reads, *roles.transition.writes)
        found = {f.tensor.name: _of_length_one(f, roles) for f in vectors} | found
    if roles.beta is not None:
        found[roles.beta.tensor.name] = fraction
    return found


def _is_logarithm(function: Function) -> bool:
    """Return whether a function is the logarithm of its argument, or of a positive multiple."""
    if function[0] != "Log":
        return False
    scaled = function[2]
    if scaled[0] != "Mul" or scaled[2] != IDENTITY or scaled[3][0] != "const":
        return bool(scaled == IDENTITY)
    return bool(scaled[3][1] > 0)


def _of_length_one(leaf: Leaf, roles: Roles) -> Draw:
    """Return what makes vectors of a transition of length 1, and numbers below 1."""
    width = math.prod(a.size.known or 1 for a in roles.channels if a in leaf.axes)
    return fraction if width == 1 else partial(np.multiply, width**-0.5)


def _multiplies_channels(roles: Roles) -> bool:
    return len(roles.query) > 1 and not roles.products


def _channels(roles: Roles) -> dict[str, tuple[int, int]]:
    """The dim of channels of every query and key, by name, and 0 for queries, 1 for keys."""
    return {
        leaf.tensor.name: (place, side)
        for side, leaves in enumerate((roles.query, roles.key))
        for leaf in leaves
        for place, index in enumerate(leaf.dims)
        if set(index) & set(roles.channels)
    }


def inputs_of(*sides: Sequence[gs.Node]) -> list[gs.Variable]:
    """Return the tensors that the nodes of several sides read and do not make."""
    found: dict[str, gs.Variable] = {}
    for nodes in sides:
        made = {o.name for n in nodes for o in n.outputs}
        for node in nodes:
            for tensor in reads(node):
                if isinstance(tensor, gs.Variable) and tensor.name not in made:
                    found[tensor.name] = tensor
    return list(found.values())


def match_record(
    root: Root, fused: gs.Node, writer: MatchWriter, replaced: tuple[str, ...], proof: ProofRecord
) -> MatchRecord:
    """Return what the manifest says of a match."""
    roles, attributes = root.roles, fused.attrs
    own = attributes.get("num_heads", size_of(writer.layout.value).known or 1)
    return MatchRecord(
        where=root.tensor.name,
        update_rule=str(attributes.get("update_rule", RULES.get(fused.op))),
        causal=roles.causal,
        normalize=roles.normalize,
        scale=roles.scale,
        eps=roles.eps,
        q_num_heads=int(attributes.get("q_num_heads", own)),
        kv_num_heads=int(attributes.get("kv_num_heads", own)),
        key_heads=size_of(writer.layout.key).known or 1,
        d_k=roles.features,
        d_v=size_of(roles.widths).known or 1,
        query_map=writer.maps.get("query"),
        key_map=writer.maps.get("key"),
        map_proven_to=writer.map_proven_to,
        masked=roles.mask is not None,
        replaced=replaced,
        added=tuple(n.name for n in writer.nodes),
        proof=proof,
    )
