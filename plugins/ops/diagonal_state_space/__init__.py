"""The op ``linexport.DiagonalStateSpace``: a convolution with a sum of exponentials.

    h_t = e^{a + 2 pi i w} h_{t-1} + u_t      for every pole n of a head, h complex
    y_t = Re sum_n (c_n + i d_n) h_{t,n}

    y_t = sum_{s <= t} K_{t-s} u_s
    K_l = sum_n e^{a_n l} (c_n cos 2 pi w_n l - d_n sin 2 pi w_n l)

with a rate a, an angle w in turns, and weights c (cosine) and d (sine) that are the same for all
tokens: S4D (Gu et al. 2022, arXiv 2206.11893), and without d and w MEGA's moving average (Ma et al.
2022, arXiv 2209.10655). All values of a head share its poles.

Packed sequences (B, T, H * d_v); the state is (B, H, N, d_v) in float32 or, of poles with angles,
(B, H, 2 N, d_v): real parts, then imaginary ones. Angles are in float64, as what float32 makes of
them grows with every token.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import defs

from linexport.plugins.ops.diagonal_state_space.definition import (
    INPUTS,
    Array,
    StateSpaceSizes,
    check,
    diagonal_state_space,
    eager,
    view,
)
from linexport.plugins.ops.diagonal_state_space.portable import portable
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
from linexport.plugins.ops.shapes import PartialShape

__all__ = ["INPUTS", "OP", "StateSpaceSizes", "check", "diagonal_state_space", "view"]


def _oracle(attributes: Attributes, inputs: Inputs) -> tuple[Array, ...]:
    return diagonal_state_space(**inputs)


def _infer(node: Node) -> Sequence[PartialShape]:
    sizes, given = view(node), node.shapes["input"]
    return [given, (given[0], sizes.heads, sizes.d_k, sizes.d_v)]


def _describe(node: Node) -> str:
    sizes = view(node)
    kind = "complex" if sizes.turns else "real"
    return f"{sizes.heads} heads of {sizes.poles} {kind} poles"


def _sizes(node: Node) -> dict[str, int]:
    sizes = view(node)
    return {"d_k": sizes.d_k, "d_v": sizes.d_v}


def _states(node: Node) -> list[StatePort]:
    sizes = view(node)
    return [StatePort(5, 1, "state", (sizes.heads, sizes.d_k, sizes.d_v))]


OP = Op(
    schema=defs.OpSchema(
        "DiagonalStateSpace",
        DOMAIN,
        VERSION,
        doc=__doc__ or "",
        inputs=[
            parameter("input", "T", "(B, T, H * d_v)"),
            parameter("rate", "S", "(H, N), log space"),
            parameter("cosine", "S", "(H, N)"),
            parameter("sine", "S", "(H, N)", "Optional"),
            parameter("angle", "tensor(double)", "(H, N), in turns", "Optional"),
            parameter("past_state", "S", "(B, H, N or 2 N, d_v)", "Optional"),
        ],
        outputs=[
            parameter("output", "T", "(B, T, H * d_v)"),
            parameter("present_state", "S", "(B, H, N or 2 N, d_v)", "Optional"),
        ],
        type_constraints=activations("T", "S"),
    ),
    infer=_infer,
    portable=portable,
    torch_schema="""diagonal_state_space(
        Tensor input, Tensor rate, Tensor cosine, Tensor? sine, Tensor? angle, Tensor? past_state
    ) -> (Tensor, Tensor)""",
    eager=eager,
    oracle=_oracle,
    token_axis={"input": 1, "output": 1},
    states=_states,
    sizes=_sizes,
    describe=_describe,
    summary="A convolution with a sum of exponentials, as a running state of each.",
)
