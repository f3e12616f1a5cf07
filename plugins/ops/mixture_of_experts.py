"""The op ``linexport.MixtureOfExperts``: every token through the experts its router chose.

    y_n = sum_j weight_nj down_e f(up_e x_n),   e = index_nj,   j = 0 ... k-1
    f(h) = act(h),   or gated:  f([g, u]) = act(g) * u

N tokens x (N, H), index and weight (N, k), up (E, F, H), down (E, H_out, I) with F = I, or 2 I
where gated; y (N, H_out). The router is not part of it.

The portable lowering sorts the N k pairs of token and expert by expert, and scans over the experts.
Each takes its rows of the sorted pairs through its own weights, which a Scan hands on without a
copy, in the layout they have; experts that nobody chose are left out. A Scan's outputs are of one
size, so every expert gives C rows, those it lacks zero:

    C = min(largest number of pairs of an expert, 4 N k / E + 1)

An expert chosen more often gets its next C rows in another pass over the experts, so that the
memory taken is bounded whatever the router does. Measured with ``tools/bench_experts.py``, where
gathering weights per token takes 25 times as long for 512 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, defs, helper

from linexport.errors import OpError
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.op import (
    DOMAIN,
    VERSION,
    Attributes,
    Node,
    Op,
    activations,
    parameter,
)
from linexport.plugins.ops.shapes import Shape, rank, same_dim

if TYPE_CHECKING:
    from torch import Tensor

INPUTS = ("x", "index", "weight", "up", "down")

SLACK = 4
"""Rows an expert gives in one pass, relative to what it gets if all are chosen alike."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ExpertActivation:
    """act, as a definition and as a body."""

    define: Callable[[Array], Array]
    write: Callable[[Body, str], str]


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


ACTIVATIONS = {
    "silu": ExpertActivation(lambda x: x / (1 + np.exp(-x)), lambda b, x: b.Mul(x, b.Sigmoid(x))),
    "relu2": ExpertActivation(
        lambda x: np.maximum(x, 0) ** 2, lambda b, x: b.Mul(b.Relu(x), b.Relu(x))
    ),
    "gelu": ExpertActivation(
        lambda x: x / 2 * (1 + _erf(x / 2**0.5)),
        lambda b, x: b.Mul(
            b.Mul(x, b.CastLike(b.const(0.5), x)),
            b.Add(b.Erf(b.Mul(x, b.CastLike(b.const(0.5**0.5), x))), b.CastLike(b.const(1.0), x)),
        ),
    ),
}
"""By name."""


@dataclass(frozen=True)
class ExpertSizes:
    """Fixed sizes of a node: experts, experts a token, and widths."""

    experts: int
    chosen: int
    width_out: int


def check(
    activation: str, gated: bool, x: Shape, index: Shape, weight: Shape, up: Shape, down: Shape
) -> ExpertSizes:
    """ExpertSizes implied by the shapes of the inputs.

    Raises:
        OpError: unknown activation, or shapes that contradict each other.
    """
    if activation not in ACTIVATIONS:
        raise OpError(f"activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}.")
    for name, shape, dims in zip(
        INPUTS, (x, index, weight, up, down), (2, 2, 2, 3, 3), strict=True
    ):
        rank(name, shape, dims)
    experts, chosen, width_out, inner = down[0], index[1], down[1], down[2]
    if not all(isinstance(size, int) for size in (experts, chosen, width_out, inner)):
        raise OpError(f"down has shape {tuple(down)} and index {tuple(index)}; they must be fixed.")
    assert isinstance(experts, int) and isinstance(chosen, int)
    assert isinstance(width_out, int) and isinstance(inner, int)
    for name, shape in (("index", index), ("weight", weight)):
        same_dim(name, "tokens", shape[0], x[0])
    same_dim("weight", "experts a token", weight[1], chosen)
    same_dim("up", "experts", up[0], experts)
    same_dim("up", "rows", up[1], inner * (2 if gated else 1))
    same_dim("up", "columns", up[2], x[1])
    return ExpertSizes(experts, chosen, width_out)


def mixture_of_experts(
    activation: str,
    gated: bool,
    x: Array,
    index: NDArray[np.int64],
    weight: Array,
    up: Array,
    down: Array,
) -> Array:
    """The definition above in float64, pair by pair.

    Raises:
        OpError: shapes that do not fit.
    """
    check(activation, gated, x.shape, index.shape, weight.shape, up.shape, down.shape)
    act = ACTIVATIONS[activation].define
    y = np.zeros((x.shape[0], down.shape[1]))
    for n, j in np.ndindex(*index.shape):
        e = index[n, j]
        h = np.float64(up[e]) @ x[n]
        if gated:
            gate, value = np.split(h, 2)
            h = act(gate) * value
        else:
            h = act(h)
        y[n] += weight[n, j] * (np.float64(down[e]) @ h)
    return y


def eager(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: str,
    gated: int,
) -> Tensor:
    """Return y in differentiable PyTorch.

    No size depends on values: all tokens go through all experts.
    """
    import torch
    from torch.nn import functional as F

    tensors = (x, index, weight, up, down)
    check(activation, bool(gated), *(tuple(t.shape) for t in tensors))
    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "relu2": lambda x: F.relu(x).square(),
    }
    act = forms[activation]
    h = x @ up.transpose(1, 2)
    if gated:
        gate, value = h.chunk(2, -1)
        h = act(gate) * value
    else:
        h = act(h)
    y = h @ down.transpose(1, 2)
    share = weight.new_zeros(x.shape[0], up.shape[0]).scatter_add(1, index, weight)
    return torch.einsum("ne,enh->nh", share, y).to(x.dtype)


def _options(attributes: Attributes) -> tuple[str, bool]:
    return str(attributes.get("activation", "silu")), bool(attributes.get("gated", 1))


def _oracle(attributes: Attributes, inputs: Mapping[str, Any]) -> tuple[Array, ...]:
    return (mixture_of_experts(*_options(attributes), **inputs),)


def _infer(node: Node) -> Sequence[Shape]:
    return [(node.shapes["x"][0], view(node).width_out)]


def _describe(node: Node) -> str:
    sizes, (activation, gated) = view(node), _options(node.attributes)
    kind = f"gated {activation}" if gated else activation
    return f"{sizes.chosen} of {sizes.experts} experts a token, {kind}"


def view(node: Node) -> ExpertSizes:
    """The sizes of a node, checked.

    Raises:
        OpError: its attributes or shapes contradict the definition.
    """
    return check(*_options(node.attributes), *(node.shapes[name] for name in INPUTS))


def _inner(b: Body, node: Node, h: str) -> str:
    """f."""
    name, gated = _options(node.attributes)
    write = ACTIVATIONS[name].write
    if not gated:
        return write(b, h)
    gate, value = b.Split(h, outputs=2, axis=-1, num_outputs=2)
    return str(b.Mul(write(b, gate), value))


def _portable(node: Node) -> tuple[Body, list[str]]:
    """See above; in float32."""
    sizes, b = view(node), Body()
    x, weight, up, down = (b.Cast(n, to=TensorProto.FLOAT) for n in ("x", "weight", "up", "down"))
    index, chosen = b.Reshape("index", b.const([-1])), b.const(sizes.chosen)
    pairs, one = b.Shape(index), b.const([1])
    numbers = b.Range(b.const(0), b.Squeeze(pairs), b.const(1))
    experts, order = b.TopK(index, pairs, outputs=2, largest=0)
    counts = b.ScatterElements(
        b.const(np.zeros(sizes.experts, np.int64)), index, b.Expand(one, pairs), reduction="add"
    )
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
    h = _inner(busy, node, busy.Gemm(mine, up, transB=1))
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
    h = _inner(b, node, b.MatMul(b.Unsqueeze("x", b.const([0])), up))
    y = b.Cast(b.MatMul(h, down), to=TensorProto.FLOAT)
    numbers = b.const(np.arange(sizes.experts).reshape(-1, 1, 1))
    weight = b.Cast("weight", to=TensorProto.FLOAT)
    share = b.Where(b.Equal("index", numbers), weight, b.const(0.0))
    share = b.ReduceSum(share, b.const([2]), keepdims=1)
    return b, [b.CastLike(b.ReduceSum(b.Mul(y, share), b.const([0]), keepdims=0), "x")]


OP = Op(
    schema=defs.OpSchema(
        "MixtureOfExperts",
        DOMAIN,
        VERSION,
        doc=__doc__ or "",
        inputs=[
            parameter("x", "T", "(N, H)"),
            parameter("index", "tensor(int64)", "(N, k), experts of each token"),
            parameter("weight", "T", "(N, k), how much each counts"),
            parameter("up", "T", "(E, F, H)"),
            parameter("down", "T", "(E, H_out, I)"),
        ],
        outputs=[parameter("y", "T", "(N, H_out)")],
        type_constraints=activations("T"),
        attributes=[
            defs.OpSchema.Attribute("activation", helper.make_attribute("activation", "silu")),
            defs.OpSchema.Attribute("gated", helper.make_attribute("gated", 1)),
        ],
    ),
    infer=_infer,
    portable=_portable,
    torch_schema="""mixture_of_experts(
        Tensor x, Tensor index, Tensor weight, Tensor up, Tensor down, *, str activation, int gated
    ) -> Tensor""",
    eager=eager,
    oracle=_oracle,
    token_axis=dict.fromkeys((*INPUTS[:3], "y"), 0),
    describe=_describe,
    summary="Every token through the few experts that its router chose.",
)
