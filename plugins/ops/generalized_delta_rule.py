"""The op ``linexport.GeneralizedDeltaRule``: a state transition that is diagonal plus rank one.

For each token, with alpha_t = exp(decay_t) per key channel and scale s:

    S_t = diag(alpha_t) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T         S in R^{d_k x d_v}
    o_t = s q_t^T S_t

a_t reads the state before it decays, b_t writes what was read. A masked token has key, a and decay
of zero, and so leaves the state as it was. LinearAttention's delta rules are the case
a_t = alpha_t k_t, b_t = -beta_t k_t. Expressed by this op only:

    RWKV-7            S_t^T = S_{t-1}^T (diag(w_t) + a_t b_t^T) + v_t k_t^T
                      (Peng et al. 2025, arXiv 2503.14456, transposed), a_t = -kappa_t
    Gated DeltaNet-2  S_t = (I - k_t (e_t * k_t)^T) diag(alpha_t) S_{t-1} + k_t (w_t * v_t)^T
                      (Hatamizadeh et al. 2026, arXiv 2605.22791): a_t = alpha_t * e_t * k_t,
                      b_t = -k_t, and w_t * v_t as the value

Packed sequences (B, T, H*d); the state is (B, H, d_k, d_v) in float32. The portable lowering goes
token by token: right at any length, and slow at long ones; the CPU library takes tiles of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    StatePort,
    activations,
    parameter,
)
from linexport.plugins.ops.shapes import (
    Shape,
    rank,
    same_dim,
    same_sequence,
    static_width,
    width_per_head,
)

if TYPE_CHECKING:
    from torch import Tensor

INPUTS = ("query", "key", "value", "decay", "a", "b", "past_state", "key_mask")

Array = NDArray[np.float64]


@dataclass(frozen=True)
class DeltaRuleSizes:
    """Heads and their widths."""

    heads: int
    d_k: int
    d_v: int


def check(
    num_heads: int,
    query: Shape,
    key: Shape,
    value: Shape,
    decay: Shape,
    a: Shape,
    b: Shape,
    past_state: Shape | None = None,
    key_mask: Shape | None = None,
) -> DeltaRuleSizes:
    """DeltaRuleSizes implied by the shapes of the inputs.

    Raises:
        OpError: a shape contradicts another one or the number of heads.
    """
    if num_heads < 1:
        raise OpError(f"num_heads is {num_heads}; it must be at least 1.")
    d_k = width_per_head("query", query, num_heads)
    d_v = width_per_head("value", value, num_heads)
    for name, shape in (("key", key), ("decay", decay), ("a", a), ("b", b)):
        same_dim(name, "width", static_width(name, shape), num_heads * d_k)
    batch, length, _ = query
    for name, shape in (("key", key), ("value", value), ("decay", decay), ("a", a), ("b", b)):
        same_sequence(name, shape, batch, length)
    if key_mask is not None:
        same_sequence("key_mask", key_mask, batch, length, dims=2)
    if past_state is not None:
        rank("past_state", past_state, 4)
        expected = (query[0], num_heads, d_k, d_v)
        for what, found, wanted in zip(
            ("batch", "heads", "key width", "value width"), past_state, expected, strict=True
        ):
            same_dim("past_state", what, found, wanted)
    return DeltaRuleSizes(num_heads, d_k, d_v)


def generalized_delta_rule(
    num_heads: int,
    scale: float,
    query: Array,
    key: Array,
    value: Array,
    decay: Array,
    a: Array,
    b: Array,
    past_state: Array | None = None,
    key_mask: NDArray[np.bool_] | None = None,
) -> tuple[Array, Array]:
    """The definition above in float64, token by token: output and present_state.

    Raises:
        OpError: shapes that do not fit.
    """
    inputs = (query, key, value, decay, a, b, past_state, key_mask)
    sizes = check(num_heads, *(None if x is None else x.shape for x in inputs))  # type: ignore[arg-type]
    batch, length = query.shape[:2]
    q, k, v, g, read, write = (
        np.asarray(x, np.float64).reshape(batch, length, num_heads, x.shape[2] // num_heads)
        for x in inputs[:6]
        if x is not None
    )
    if key_mask is not None:
        k, g, read = (np.where(key_mask[:, :, None, None], x, 0.0) for x in (k, g, read))
    S: Array = np.zeros((batch, num_heads, sizes.d_k, sizes.d_v))
    if past_state is not None:
        S = S + past_state
    output = np.zeros((batch, length, num_heads, sizes.d_v))
    for t in range(length):
        found = np.einsum("bhk,bhkv->bhv", read[:, t], S)
        S = np.exp(g[:, t])[..., None] * S
        S = (
            S
            + write[:, t][..., None] * found[:, :, None]
            + k[:, t][..., None] * v[:, t][:, :, None]
        )
        output[:, t] = scale * np.einsum("bhk,bhkv->bhv", q[:, t], S)
    return output.reshape(value.shape), S


def eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    a: Tensor,
    b: Tensor,
    past_state: Tensor | None,
    key_mask: Tensor | None,
    *,
    num_heads: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return output and present_state, in differentiable PyTorch; a plain export of it unrolls."""
    import torch

    inputs = (query, key, value, decay, a, b, past_state, key_mask)
    sizes = check(num_heads, *(None if x is None else tuple(x.shape) for x in inputs))  # type: ignore[arg-type]
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v, g, read, write = (
        x.to(dtype).unflatten(-1, (num_heads, x.shape[-1] // num_heads))
        for x in (query * scale, key, value, decay, a, b)
    )
    if key_mask is not None:
        keep = key_mask[:, :, None, None]
        k, g, read = (torch.where(keep, x, 0.0) for x in (k, g, read))
    S = v.new_zeros(query.shape[0], num_heads, sizes.d_k, sizes.d_v)
    if past_state is not None:
        S = past_state.to(dtype)
    alpha = g.exp()
    outputs = [v.new_zeros(query.shape[0], 0, num_heads, sizes.d_v)]
    for t in range(query.shape[1]):
        found = read[:, t, :, None] @ S
        S = alpha[:, t, :, :, None] * S + write[:, t, :, :, None] * found
        S = S + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append((q[:, t, :, None] @ S).transpose(1, 2))
    return torch.cat(outputs, 1).flatten(2).to(query.dtype), S


def _oracle(attributes: Attributes, inputs: Mapping[str, Any]) -> tuple[Array, ...]:
    return generalized_delta_rule(attributes["num_heads"], attributes.get("scale", 1.0), **inputs)


def view(node: Node) -> DeltaRuleSizes:
    """The sizes of a node, checked.

    Raises:
        OpError: its attributes or shapes contradict the definition.
    """
    heads = node.attributes.get("num_heads")
    if not isinstance(heads, int):
        raise OpError("GeneralizedDeltaRule lacks the attribute num_heads.")
    return check(heads, **node.shapes)


def _portable(node: Node) -> tuple[Body, list[str]]:
    """A Scan over tokens; at least one, as a Scan of none has no outputs to speak of.

    A token of zeros leaves the state as it was.
    """
    sizes, b = view(node), Body()
    query, *_, past_state, key_mask = node.inputs
    wide = [b.Cast(x, to=TensorProto.FLOAT) for x in node.inputs[:6]]
    wide[0] = b.Mul(wide[0], b.const(float(node.attributes.get("scale", 1.0))))
    if key_mask:
        keep, zero = b.Unsqueeze(key_mask, b.const([2])), b.const(0.0)
        for masked in (1, 3, 4):
            wide[masked] = b.Where(keep, wide[masked], zero)
    batch, length = b.Shape(query, start=0, end=1), b.Shape(query, start=1, end=2)
    padding = b.Max(b.Sub(b.const([1]), length), b.const([0]))
    pads = b.Concat(b.const([0, 0, 0, 0]), padding, b.const([0]), axis=0)
    split = b.const([0, 0, sizes.heads, -1])
    tokens = [b.Transpose(b.Reshape(b.Pad(x, pads), split), perm=[1, 0, 2, 3]) for x in wide]
    shape = b.Concat(batch, b.const([sizes.heads, sizes.d_k, sizes.d_v]), axis=0)
    S = past_state or b.Expand(b.const(0.0), shape)
    S, output = b.Scan(
        b.Cast(S, to=TensorProto.FLOAT),
        *tokens,
        outputs=2,
        body=_token(b),
        num_scan_inputs=len(tokens),
    )
    output = b.Slice(b.Transpose(output, perm=[1, 0, 2, 3]), b.const([0]), length, b.const([1]))
    packed = b.Reshape(output, b.const([0, 0, sizes.heads * sizes.d_v]))
    return b, [b.CastLike(packed, query), S]


def _token(outer: Body) -> object:
    """The Scan body: S (B, H, d_k, d_v) and one token, (B, H, d) each."""
    b = Body(outer)
    S, *token = (b.fresh(name) for name in ("S", "q", "k", "v", "g", "a", "b"))
    row, column = b.const([2]), b.const([3])
    q, v, a = (b.Unsqueeze(token[i], row) for i in (0, 2, 4))
    k, g, write = (b.Unsqueeze(token[i], column) for i in (1, 3, 5))
    found = b.MatMul(a, S)
    kept = b.Add(b.Mul(b.Exp(g), S), b.Mul(write, found))
    S_next = b.Add(kept, b.Mul(k, v))
    output = b.Squeeze(b.MatMul(q, S_next), row)
    return b.subgraph("token", [S, *token], [S_next, output])


def _infer(node: Node) -> Sequence[Shape]:
    sizes, (batch, length, _) = view(node), node.shapes["query"]
    return [
        (batch, length, sizes.heads * sizes.d_v),
        (batch, sizes.heads, sizes.d_k, sizes.d_v),
    ]


def _describe(node: Node) -> str:
    sizes = view(node)
    return f"{sizes.heads} heads of {sizes.d_k} x {sizes.d_v}, token by token"


def _sizes(node: Node) -> dict[str, int]:
    sizes = view(node)
    return {"d_k": sizes.d_k, "d_v": sizes.d_v}


def _states(node: Node) -> list[StatePort]:
    sizes = view(node)
    return [StatePort(6, 1, "state", (sizes.heads, sizes.d_k, sizes.d_v))]


OP = Op(
    schema=defs.OpSchema(
        "GeneralizedDeltaRule",
        DOMAIN,
        VERSION,
        doc=__doc__ or "",
        inputs=[
            parameter("query", "T", "(B, T, H * d_k)"),
            parameter("key", "T", "(B, T, H * d_k)"),
            parameter("value", "T", "(B, T, H * d_v)"),
            parameter("decay", "T", "(B, T, H * d_k), log space"),
            parameter("a", "T", "(B, T, H * d_k), reads the state"),
            parameter("b", "T", "(B, T, H * d_k), writes what a read"),
            parameter("past_state", "S", "(B, H, d_k, d_v)", "Optional"),
            parameter("key_mask", "tensor(bool)", "(B, T), False: padded token", "Optional"),
        ],
        outputs=[
            parameter("output", "T", "(B, T, H * d_v)"),
            parameter("present_state", "S", "(B, H, d_k, d_v)", "Optional"),
        ],
        type_constraints=activations("T", "S"),
        attributes=[
            defs.OpSchema.Attribute("num_heads", defs.OpSchema.AttrType.INT, "H."),
            defs.OpSchema.Attribute("scale", helper.make_attribute("scale", 1.0)),
        ],
    ),
    infer=_infer,
    portable=_portable,
    torch_schema="""generalized_delta_rule(
        Tensor query, Tensor key, Tensor value, Tensor decay, Tensor a, Tensor b,
        Tensor? past_state, Tensor? key_mask, *, int num_heads, float scale
    ) -> (Tensor, Tensor)""",
    eager=eager,
    oracle=_oracle,
    token_axis=dict.fromkeys((*INPUTS[:6], "key_mask", "output"), 1),
    states=_states,
    sizes=_sizes,
    describe=_describe,
    slow="without the CPU library it is computed token by token, so long sequences are slow",
    summary="A running state that every token decays and corrects along one direction.",
)
