"""The op ``linexport.CumulativeSum``: running sums of tokens, with the sum so far as their state.

    y_t = past_state + sum_{s <= t} x_s             exclusive: s < t
    present_state = past_state + sum_s x_s

Input and output have any dims, the batch first and the tokens at ``axis``; the state has those
without the tokens. Nothing is moved, whatever the layout of a model is. States are in float32, and
so are sums, whatever the activations are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, defs, helper

from linexport.errors import OpError
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.op import (
    DOMAIN,
    VERSION,
    Attributes,
    Inputs,
    Node,
    Op,
    StatePort,
    activations,
    parameter,
)
from linexport.plugins.ops.shapes import Dim, PartialShape, rank, same_dim

if TYPE_CHECKING:
    from torch import Tensor

AXIS = 1
"""Place of the tokens where a node does not say."""

SHORT_ROW = 64
"""Values behind the tokens up to which ONNX Runtime is slow to add a row to each."""

Array = NDArray[np.float64]


def check(
    axis: int, input: PartialShape, past_state: PartialShape | None = None
) -> tuple[Dim, ...]:
    """Compare the shapes; returns that of a state.

    Raises:
        OpError: they contradict each other.
    """
    if not 0 < axis < len(input):
        raise OpError(
            f"axis is {axis} and input has shape {tuple(input)}; expected an axis behind the batch."
        )
    state = (*input[:axis], *input[axis + 1 :])
    if past_state is not None:
        rank("past_state", past_state, len(state))
        for place, (found, expected) in enumerate(zip(past_state, state, strict=True)):
            same_dim("past_state", f"size {place}", found, expected)
    return state


def cumulative_sum(
    input: Array, past_state: Array | None = None, axis: int = AXIS, exclusive: int = 0
) -> tuple[Array, Array]:
    """The definition above in float64: output and present_state.

    Raises:
        OpError: shapes that do not fit.
    """
    shape = check(axis, input.shape, None if past_state is None else past_state.shape)
    tokens = np.moveaxis(np.asarray(input, np.float64), axis, 0)
    start = np.zeros([int(n or 0) for n in shape]) if past_state is None else past_state
    state = np.asarray(start, np.float64)
    output = np.zeros(tokens.shape)
    for t, token in enumerate(tokens):
        output[t] = state if exclusive else state + token
        state = state + token
    return np.moveaxis(output, 0, axis), state


def eager(
    input: Tensor, past_state: Tensor | None, axis: int, exclusive: int
) -> tuple[Tensor, Tensor]:
    """Return output and present_state, in differentiable PyTorch."""
    check(axis, input.shape, None if past_state is None else past_state.shape)
    wide = input.float()
    sums, total = wide.cumsum(axis), wide.sum(axis)
    if past_state is not None:
        sums, total = sums + past_state.unsqueeze(axis), total + past_state
    output = sums - wide if exclusive else sums
    return output.to(input.dtype), total


def axis_of(node: Node) -> int:
    """Return the place of the tokens."""
    return int(node.attributes.get("axis", AXIS))


def _oracle(attributes: Attributes, inputs: Inputs) -> tuple[Array, ...]:
    return cumulative_sum(**inputs, **attributes)


def _infer(node: Node) -> Sequence[PartialShape]:
    return [node.shapes["input"], check(axis_of(node), **node.shapes)]


def _states(node: Node) -> list[StatePort]:
    sizes: list[int] = []
    for size in check(axis_of(node), **node.shapes)[1:]:
        if not isinstance(size, int):
            raise OpError(
                f"input has shape {tuple(node.shapes['input'])}; expected fixed sizes besides the "
                "batch and the tokens, which the state has"
            )
        sizes.append(size)
    return [StatePort(1, 1, "sum", tuple(sizes))]


def _portable(node: Node) -> tuple[Body, list[str]]:
    """CumSum, to which the past is added."""
    b, past = Body(), node.inputs[1]
    wide, axis = _wide(b, node), b.const([axis_of(node)])
    start = b.Unsqueeze(past, axis) if past else ""
    sums = _sums(b, node, wide)
    if past:
        sums = b.Add(sums, start)
    return b, _outputs(b, node, wide, sums, start)


def from_zero(node: Node) -> tuple[Body, list[str]]:
    """CumSum alone where the past is zero, as it is of whole sequences."""
    past = node.inputs[1]
    if not past:
        return _portable(node)
    b = Body()
    wide, axis = _wide(b, node), b.const([axis_of(node)])
    start = b.Unsqueeze(past, axis)
    whole, later = Body(b), Body(b)
    sums = b.If(
        b.Equal(b.ReduceL1(past, keepdims=0), b.const(0.0)),
        then_branch=whole.subgraph("whole", [], [_sums(whole, node, wide)]),
        else_branch=later.subgraph("later", [], [_continued(later, node, wide, start)]),
    )
    return b, _outputs(b, node, wide, sums, start)


def _continued(b: Body, node: Node, x: str, start: str) -> str:
    """Return sums with a past, which is added to the first token alone where rows are short.

    ONNX Runtime broadcasts row by row: rows of 8 take it twenty times as long as the sums.
    """
    place = axis_of(node)
    row = math.prod(n for n in node.shapes["input"][place + 1 :] if isinstance(n, int))
    if row >= SHORT_ROW or node.attributes.get("exclusive", 0):
        return str(b.Add(_sums(b, node, x), start))
    # Without tokens there is nothing to add to: the index and the addend are empty then.
    first = b.Shape(b.Slice(x, b.const([0]), b.const([1]), b.const([place])))
    where = b.ConstantOfShape(first, value=helper.make_tensor("value", TensorProto.INT64, [1], [0]))
    added = b.Expand(start, first)
    return _sums(b, node, b.ScatterElements(x, where, added, axis=place, reduction="add"))


def _is_single(node: Node) -> bool:
    """Return whether activations are known to be in float32: a cast to it may be a copy."""
    return node.types.get("input") == TensorProto.FLOAT


def _wide(b: Body, node: Node) -> str:
    x = node.inputs[0]
    return x if _is_single(node) else str(b.Cast(x, to=TensorProto.FLOAT))


def _outputs(b: Body, node: Node, x: str, sums: str, start: str) -> list[str]:
    output = sums if _is_single(node) else b.CastLike(sums, node.inputs[0])
    return [output, _total(b, node, x, sums, start)]


def _sums(b: Body, node: Node, x: str) -> str:
    exclusive = int(node.attributes.get("exclusive", 0))
    return str(b.CumSum(x, b.const(axis_of(node)), exclusive=exclusive))


def _total(b: Body, node: Node, x: str, sums: str, start: str) -> str:
    """Return the last sum, or the one before the first token where there is none."""
    place = axis_of(node)
    axis, last, end = b.const([place]), b.const([-1]), b.const([np.iinfo(np.int64).max])
    if not start:
        sizes = b.Shape(x, start=0, end=place), b.const([1]), b.Shape(x, start=place + 1)
        start = b.Expand(b.const(0.0), b.Concat(*sizes, axis=0))
    # Not a sum over the tokens, which would be as much work as all of the sums.
    total = b.Slice(sums, last, end, axis)
    if node.attributes.get("exclusive", 0):
        total = b.Add(total, b.Slice(x, last, end, axis))
    return str(b.Gather(b.Concat(start, total, axis=place), b.const(-1), axis=place))


OP = Op(
    schema=defs.OpSchema(
        "CumulativeSum",
        DOMAIN,
        VERSION,
        doc=__doc__ or "",
        inputs=[
            parameter("input", "T", "The batch first, the tokens at ``axis``."),
            parameter("past_state", "S", "The same without the tokens.", "Optional"),
        ],
        outputs=[
            parameter("output", "T", "As the input."),
            parameter("present_state", "S", "As past_state.", "Optional"),
        ],
        type_constraints=activations("T", "S"),
        attributes=[
            defs.OpSchema.Attribute(name, helper.make_attribute(name, value))
            for name, value in (("axis", AXIS), ("exclusive", 0))
        ],
    ),
    infer=_infer,
    portable=_portable,
    torch_schema="""cumulative_sum(
        Tensor input, Tensor? past_state, int axis, int exclusive
    ) -> (Tensor, Tensor)""",
    eager=eager,
    oracle=_oracle,
    token_axis={"input": AXIS, "output": AXIS},
    axis_attribute="axis",
    states=_states,
    describe=lambda node: f"axis {axis_of(node)}",
    summary="Running sums of tokens.",
)
