"""MixtureOfExperts in standard operators: pairs of token and expert, sorted by expert.

A Scan over the experts: each takes its rows of the sorted pairs through its own weights, which a
Scan hands on without a copy, in the layout they have; experts that nobody chose are left out. A
Scan's outputs are of one size, so every expert gives C rows, those it lacks zero:

    C = min(largest number of pairs of an expert, 4 N k / E + 1)

An expert chosen more often gets its next C rows in another pass over the experts, so that the
memory taken is bounded whatever the router does. Measured with ``tools/bench_experts.py``, where
gathering weights per token takes 25 times as long for 512 tokens.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.mixture_of_experts.definition import (
    ACTIVATIONS,
    ExpertFunction,
    function_of,
    view,
)
from linexport.plugins.ops.op import (
    Node,
)

SLACK = 4
"""Rows an expert gives in one pass, relative to what it gets if all are chosen alike."""


def apply_function(b: Body, function: ExpertFunction, h: str) -> str:
    """Write f of a value (..., F)."""
    write = ACTIVATIONS[function.activation].write
    gate, *values = b.Split(h, outputs=2, axis=-1, num_outputs=2) if function.gated else [h]
    h = write(b, _capped(b, gate, function.gate_cap), gate)
    for value in values:
        h = b.Mul(h, _capped(b, value, function.value_cap))
    return h


def _capped(b: Body, x: str, cap: float) -> str:
    if not cap:
        return x
    limit = b.CastLike(b.const(cap), x)
    return str(b.Mul(limit, b.Tanh(b.Div(x, limit))))


def sort_pairs(b: Body, index: str, experts: int) -> tuple[str, str, str]:
    """Write pairs of token and expert sorted by expert.

    Args:
        b: the body.
        index: experts of all pairs, (pairs,), in the order of the tokens.
        experts: their number.

    Returns:
        The experts in order, the places of the pairs in that order, and the pairs of each expert.
    """
    pairs = b.Shape(index)
    ordered, order = b.TopK(index, pairs, outputs=2, largest=0)
    zeros, ones = b.const(np.zeros(experts, np.int64)), b.Expand(b.const([1]), pairs)
    return ordered, order, b.ScatterElements(zeros, index, ones, reduction="add")


def portable(node: Node) -> tuple[Body, list[str]]:
    """Return the lowering above, in float32."""
    sizes, b = view(node), Body()
    x, weight, up, down = (b.Cast(n, to=TensorProto.FLOAT) for n in ("x", "weight", "up", "down"))
    index, chosen = b.Reshape("index", b.const([-1])), b.const(sizes.chosen)
    pairs, one = b.Shape(index), b.const([1])
    numbers = b.Range(b.const(0), b.Squeeze(pairs), b.const(1))
    experts, order, counts = sort_pairs(b, index, sizes.experts)
    ends = b.CumSum(counts, b.const(0))
    starts = b.Sub(ends, counts)
    # The rank of a pair among those of its expert, in the order of the tokens.
    ranks = b.Sub(numbers, b.Gather(starts, experts))
    ranks = b.ScatterElements(numbers, order, ranks)
    largest = b.ReduceMax(counts, keepdims=1)
    share = b.Div(b.Mul(pairs, b.const(SLACK)), b.const(sizes.experts))
    rows = b.Max(b.Min(largest, b.Add(share, one)), one)
    passes = b.Div(b.Add(largest, b.Sub(rows, one)), rows)
    width = b.const([sizes.width_out])
    nothing = b.Expand(b.const(0.0), b.Concat(b.Shape("x", start=0, end=1), width, axis=0))

    step = Body(b)
    number, going, y = (step.fresh(n) for n in ("i", "going", "y"))
    skipped = step.Mul(number, rows)
    first = step.Min(step.Add(starts, skipped), ends)
    last = step.Min(step.Add(first, rows), ends)
    sorted_x = b.Gather(x, b.Div(order, chosen))
    given = step.Scan(
        up, down, first, last, body=_expert(step, node, sorted_x, rows), num_scan_inputs=4
    )
    place = step.Sub(ranks, skipped)
    here = step.And(step.GreaterOrEqual(place, step.const(0)), step.Less(place, rows))
    place = step.Add(step.Mul(index, rows), step.Where(here, place, step.const(0)))
    found = step.Gather(step.Reshape(given, step.const([-1, sizes.width_out])), place)
    found = step.Reshape(found, step.const([-1, sizes.chosen, sizes.width_out]))
    here = step.Reshape(here, step.const([-1, sizes.chosen]))
    share = step.Unsqueeze(step.Where(here, weight, step.const(0.0)), step.const([1]))
    summed = step.Add(y, step.Squeeze(step.MatMul(share, found), step.const([1])))
    typed = helper.make_tensor_value_info
    graph = step.subgraph(
        "pass",
        [typed(number, TensorProto.INT64, []), typed(going, TensorProto.BOOL, []), y],
        [step.Identity(going), summed],
    )
    output = b.Loop(b.Squeeze(passes), b.const(True), nothing, body=graph)
    return b, [b.CastLike(output, "x")]


def _expert(outer: Body, node: Node, x: str, rows: str) -> object:
    """The Scan body: one expert's weights, and where its rows of the sorted tokens are."""
    b = Body(outer)
    up, down, first, last = (b.fresh(name) for name in ("up", "down", "first", "last"))
    idle, busy = Body(b), Body(b)
    width = b.const([view(node).width_out])
    zeros = idle.Expand(idle.const(0.0), idle.Concat(rows, width, axis=0))
    start, end = (busy.Reshape(v, busy.const([1])) for v in (first, last))
    mine = busy.Slice(x, start, end, busy.const([0]))
    h = apply_function(busy, function_of(node.attributes), busy.Gemm(mine, up, transB=1))
    missing = busy.Sub(rows, busy.Sub(end, start))
    pads = busy.Concat(busy.const([0, 0]), missing, busy.const([0]), axis=0)
    y = busy.Pad(busy.Gemm(h, down, transB=1), pads)
    given = b.If(
        b.Equal(first, last),
        then_branch=idle.subgraph("idle", [], [zeros]),
        else_branch=busy.subgraph("busy", [], [y]),
    )
    return b.subgraph("expert", [up, down, first, last], [given])


def every_expert(node: Node) -> tuple[Body, list[str]]:
    """A lowering without sizes that depend on values: all tokens through all experts.

    Those that were not chosen count nothing: E / k times the products.
    """
    sizes, b = view(node), Body()
    up, down = (b.Transpose(name, perm=[0, 2, 1]) for name in ("up", "down"))
    h = apply_function(
        b, function_of(node.attributes), b.MatMul(b.Unsqueeze("x", b.const([0])), up)
    )
    y = b.Cast(b.MatMul(h, down), to=TensorProto.FLOAT)
    numbers = b.const(np.arange(sizes.experts).reshape(-1, 1, 1))
    weight = b.Cast("weight", to=TensorProto.FLOAT)
    share = b.Where(b.Equal("index", numbers), weight, b.const(0.0))
    share = b.ReduceSum(share, b.const([2]), keepdims=1)
    return b, [b.CastLike(b.ReduceSum(b.Mul(y, share), b.const([0]), keepdims=0), "x")]
