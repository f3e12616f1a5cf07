"""The definition of GeneralizedDeltaRule: sizes compared, float64 token by token, and PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from linexport.errors import OpError
from linexport.plugins.ops.op import (
    Node,
)
from linexport.plugins.ops.shapes import (
    PartialShape,
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
    query: PartialShape,
    key: PartialShape,
    value: PartialShape,
    decay: PartialShape,
    a: PartialShape,
    b: PartialShape,
    past_state: PartialShape | None = None,
    key_mask: PartialShape | None = None,
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
        for what, found, size in zip(
            ("batch", "heads", "key width", "value width"), past_state, expected, strict=True
        ):
            same_dim("past_state", what, found, size)
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


def view(node: Node) -> DeltaRuleSizes:
    """The sizes of a node, checked.

    Raises:
        OpError: its attributes or shapes contradict the definition.
    """
    heads = node.attributes.get("num_heads")
    if not isinstance(heads, int):
        raise OpError("GeneralizedDeltaRule lacks the attribute num_heads.")
    return check(heads, **node.shapes)
