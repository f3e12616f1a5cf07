"""Rotary embeddings in one operator.

    y = x * cos + (-x[r/2:], x[:r/2]) * sin          ->  RotaryEmbedding(x, positions, cos, sin)
    Concat(y of x[:r], x[r:])                        ->  the same, of the first r channels

of x (B, H, T, d), with cos and sin (B, 1, T, r) two copies of one half, or computed value by value
from two copies. The operator looks them up in tables, by position: the table is the half itself, a
row for each token, and token t of row b has the position b T + t. Where one row of angles is that
of the whole batch, cos and sin (1, 1, T, r), token t has the position t.

One token: a third of the time of the nodes; 512 tokens: half.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.contract import TARGET, NoMatchError, Pass, PassResult
from linexport.graph.edit import producer
from linexport.graph.tensors import constant_values, known_shape
from linexport.passes.ort.replacement import DOMAIN, Substitution, substitute_matches

log = logging.getLogger(__name__)

ELEMENTWISE = ("Cos", "Sin", "Cast")
"""Operators of one input that may come between the copies and cos or sin."""

AXIS, RANK = 3, 4
"""The axis of channels, and the axes of x: batch, heads, tokens, channels."""


def run(graph: gs.Graph) -> PassResult:
    """Fuse every rotation of pairs of channels by one table of angles."""
    tables: dict[tuple[int, int], _Tables] = {}
    return substitute_matches(graph, lambda graph, node: _match(graph, node, tables), log)


@dataclass(frozen=True)
class _Half:
    """Cos or sin of which the second half of the channels equals the first.

    Attributes:
        source: what is there twice, (B, T, r/2) or (T, r/2).
        value: cos or sin, (B, T, r) or (T, r).
        nodes: that compute it from the source, in order, with the axis of heads added.
    """

    source: gs.Tensor
    value: gs.Tensor
    nodes: tuple[gs.Node, ...]


@dataclass
class _Tables:
    """Inputs of the operator other than x, for all layers that rotate by the same angles.

    Attributes:
        nodes: that compute it.
        inputs: positions, cos and sin.
    """

    nodes: Sequence[gs.Node]
    inputs: Sequence[gs.Tensor]


def _match(
    graph: gs.Graph, added: gs.Node, tables: dict[tuple[int, int], _Tables]
) -> Substitution | None:
    if added.op != "Add" or added.domain or len(added.inputs) != 2:
        return None
    for straight, crossed in (added.inputs, reversed(added.inputs)):
        first, second = producer(straight, "Mul"), producer(crossed, "Mul")
        if first is None or second is None:
            continue
        for x, cos in _orders(first):
            for turned, sin in _orders(second):
                turning = _turned(turned, x)
                if turning is not None:
                    old = [*turning, first, second, added]
                    return _substitution(graph, x, cos, sin, old, tables)
    return None


def _orders(node: gs.Node) -> list[tuple[gs.Tensor, gs.Tensor]]:
    first, second = node.inputs
    return [(first, second), (second, first)]


def _turned(value: gs.Tensor, x: gs.Tensor) -> list[gs.Node] | None:
    """Return the nodes that make (-x[r/2:], x[:r/2]), if these make the value."""
    joined = producer(value, "Concat")
    if joined is None or len(joined.inputs) != 2 or not x.shape or len(x.shape) != RANK:
        return None
    width, negated = x.shape[AXIS], producer(joined.inputs[0], "Neg")
    second = None if negated is None else producer(negated.inputs[0])
    first = producer(joined.inputs[1])
    if second is None or first is None or negated is None or not isinstance(width, int):
        return None
    if joined.attrs.get("axis") not in (-1, AXIS):
        return None
    parts = _part(first, x), _part(second, x)
    return (
        [first, second, negated, joined]
        if parts == ((0, width // 2), (width // 2, width))
        else None
    )


def _part(node: gs.Node, x: gs.Tensor) -> tuple[int, int] | None:
    """Return first and last channel (exclusive) that a Slice takes of x."""
    if node.op != "Slice" or node.inputs[0] is not x or len(node.inputs) < 4:
        return None
    given = [constant_values(t) for t in node.inputs[1:]]
    numbers = [int(values.item()) for values in given if values is not None and values.size == 1]
    if len(numbers) != len(given):
        return None
    start, end, axis, *step = numbers
    width = known_shape(x)[AXIS]
    if axis not in (AXIS, -1) or step not in ([], [1]) or start < 0 or end < 0:
        return None
    return (start, min(end, width)) if isinstance(width, int) else None


def _substitution(
    graph: gs.Graph,
    x: gs.Tensor,
    cos: gs.Tensor,
    sin: gs.Tensor,
    old: list[gs.Node],
    tables: dict[tuple[int, int], _Tables],
) -> Substitution:
    both = _half(cos), _half(sin)
    if both[0] is None or both[1] is None:
        raise NoMatchError("cos and sin are not two copies of one half of the channels")
    halves = both[0], both[1]
    width, result = known_shape(x)[AXIS], old[-1].outputs[0]
    whole = _whole(x, result)
    if whole is not None:
        old, x, result = [whole[0], *old, *whole[1:]], whole[0].inputs[0], whole[-1].outputs[0]
    key = id(halves[0].value), id(halves[1].value)
    made = key in tables and any(node is tables[key].nodes[0] for node in graph.nodes)
    if not made:
        tables[key] = _tables(*halves)
    output = gs.Variable(f"{result.name}/rotated", result.dtype, result.shape)
    attributes = {"num_heads": known_shape(x)[1], "rotary_embedding_dim": width}
    given = [x, *tables[key].inputs]
    fused = gs.Node(
        "RotaryEmbedding", f"{result.name}/rotary", attributes, given, [output], domain=DOMAIN
    )
    shared = list({id(n): n for half in halves for n in half.nodes}.values())
    sources = {id(half.source): half.source for half in halves}
    return Substitution(
        old,
        [fused] if made else [*tables[key].nodes, fused],
        [x, *sources.values()],
        [(result, output)],
        [*shared, *tables[key].nodes] if made else shared,
    )


def _half(value: gs.Tensor) -> _Half | None:
    """Return what Unsqueeze(f(Concat(half, half)), 1) is made of, f value by value."""
    unsqueezed = producer(value, "Unsqueeze")
    if unsqueezed is None or not isinstance(unsqueezed.inputs[1], gs.Constant):
        return None
    whole = unsqueezed.inputs[0]
    node, nodes = producer(whole), [unsqueezed]
    while node is not None and node.op in ELEMENTWISE:
        nodes.insert(0, node)
        node = producer(node.inputs[0])
    if node is None or node.op != "Concat" or len(node.inputs) != 2:
        return None
    half, again = node.inputs
    rank = len(half.shape or ())
    doubled = half is again and node.attrs.get("axis") in (-1, rank - 1)
    added = unsqueezed.inputs[1].values.tolist()
    fits = doubled and whole.shape and (rank, added) in ((3, [1]), (2, [0, 1]))
    return _Half(half, whole, (node, *nodes)) if fits else None


def _whole(x: gs.Tensor, result: gs.Tensor) -> tuple[gs.Node, gs.Node, gs.Node] | None:
    """Return the Slices of the channels that turn and that do not, and the Concat of both."""
    first = producer(x, "Slice")
    joined = result.outputs[0] if len(result.outputs) == 1 else None
    if first is None or joined is None or joined.op != "Concat" or len(joined.inputs) != 2:
        return None
    source, rest = first.inputs[0], producer(joined.inputs[1], "Slice")
    if rest is None or not source.shape or len(source.shape) != RANK:
        return None
    width, channels = known_shape(x)[AXIS], source.shape[AXIS]
    parts = _part(first, source), _part(rest, source)
    last = joined.attrs.get("axis") in (-1, AXIS) and joined.inputs[0] is result
    fits = last and isinstance(channels, int) and parts == ((0, width), (width, channels))
    return (first, rest, joined) if fits else None


def _tables(cos: _Half, sin: _Half) -> _Tables:
    """Tables (B T, r/2) and positions (B, T) that number their rows, or (1) that of the first."""
    name = f"{cos.value.name}/rotary"
    nodes: list[gs.Node] = []
    width = known_shape(cos.source)[-1]

    def made(
        op: str, what: str, inputs: Sequence[gs.Tensor], dtype: type, **attrs: int
    ) -> gs.Variable:
        output = gs.Variable(f"{name}/{what}", dtype)
        nodes.append(gs.Node(op, f"{name}/{what}", attrs, inputs, [output]))
        return output

    def constant(what: str, value: object) -> gs.Constant:
        return gs.Constant(f"{name}/{what}", np.asarray(value, np.int64))

    start, end, axis = (constant(w, [n]) for w, n in (("start", 0), ("end", width), ("axis", -1)))
    rows = constant("rows", [-1, width])
    found = []
    for what, half in (("cos", cos), ("sin", sin)):
        cut = made("Slice", f"{what}/half", [half.value, start, end, axis], np.float32)
        found.append(made("Reshape", what, [cut, rows], np.float32))
    if all(
        len(known_shape(half.value)) == 2 or known_shape(half.value)[0] == 1 for half in (cos, sin)
    ):
        return _Tables(nodes, [constant("first", [0]), *found])
    sizes = made("Shape", "sizes", [cos.value], np.int64, start=0, end=2)
    count = made("ReduceProd", "count", [sizes], np.int64, keepdims=0)
    numbers = made("Range", "numbers", [constant("0", 0), count, constant("1", 1)], np.int64)
    positions = made("Reshape", "positions", [numbers, sizes], np.int64)
    return _Tables(nodes, [positions, *found])


PASS = Pass(
    name="rotary",
    stage=TARGET,
    ensures="rotary embeddings by one half of angles are one operator",
    run=run,
)
