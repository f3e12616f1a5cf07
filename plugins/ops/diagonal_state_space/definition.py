"""The definition of DiagonalStateSpace: sizes compared, float64 token by token, and PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from linexport.errors import OpError
from linexport.plugins.ops.op import Node
from linexport.plugins.ops.shapes import PartialShape, rank, same_dim, width_per_head

if TYPE_CHECKING:
    from torch import Tensor

INPUTS = ("input", "rate", "cosine", "sine", "angle", "past_state")

Array = NDArray[np.float64]


@dataclass(frozen=True)
class StateSpaceSizes:
    """Heads, the poles of one, and the values that share them.

    Attributes:
        turns: poles are complex, and the state has two numbers for each.
    """

    heads: int
    poles: int
    d_v: int
    turns: bool

    @property
    def d_k(self) -> int:
        """Numbers of the state for each value."""
        return 2 * self.poles if self.turns else self.poles


def check(
    input: PartialShape,
    rate: PartialShape,
    cosine: PartialShape,
    sine: PartialShape | None = None,
    angle: PartialShape | None = None,
    past_state: PartialShape | None = None,
) -> StateSpaceSizes:
    """StateSpaceSizes implied by the shapes of the inputs.

    Raises:
        OpError: a shape contradicts another one.
    """
    rank("rate", rate, 2)
    heads, poles = rate
    if not isinstance(heads, int) or not isinstance(poles, int) or not heads * poles:
        raise OpError(f"rate has shape {tuple(rate)}; expected heads and poles, fixed.")
    if (sine is None) != (angle is None):
        raise OpError("of sine and angle one is given; expected both, or none.")
    for name, shape in (("cosine", cosine), ("sine", sine), ("angle", angle)):
        if shape is not None:
            rank(name, shape, 2)
            same_dim(name, "heads", shape[0], heads)
            same_dim(name, "poles", shape[1], poles)
    d_v = width_per_head("input", input, heads)
    sizes = StateSpaceSizes(heads, poles, d_v, angle is not None)
    if past_state is not None:
        rank("past_state", past_state, 4)
        expected = (input[0], heads, sizes.d_k, d_v)
        for what, found, size in zip(
            ("batch", "heads", "poles", "value width"), past_state, expected, strict=True
        ):
            same_dim("past_state", what, found, size)
    return sizes


def diagonal_state_space(
    input: Array,
    rate: Array,
    cosine: Array,
    sine: Array | None = None,
    angle: Array | None = None,
    past_state: Array | None = None,
) -> tuple[Array, Array]:
    """The definition above in float64, token by token: output and present_state.

    Raises:
        OpError: shapes that do not fit.
    """
    optional = (None if x is None else x.shape for x in (sine, angle, past_state))
    sizes = check(input.shape, rate.shape, cosine.shape, *optional)
    batch, length, _ = input.shape
    u = np.float64(input).reshape(batch, length, sizes.heads, 1, sizes.d_v)
    factor, weight = np.exp(np.float64(rate) + 0j), np.float64(cosine) + 0j
    if angle is not None and sine is not None:
        factor = factor * np.exp(2j * np.pi * np.float64(angle))
        weight = weight + 1j * np.float64(sine)
    S = np.zeros((batch, sizes.heads, sizes.poles, sizes.d_v), complex)
    if past_state is not None:
        S.real = past_state[:, :, : sizes.poles]
        if sizes.turns:
            S.imag = past_state[:, :, sizes.poles :]
    output = np.zeros((batch, length, sizes.heads, sizes.d_v))
    for t in range(length):
        S = factor[..., None] * S + u[:, t]
        output[:, t] = np.einsum("hn,bhnv->bhv", weight, S).real
    present = np.concatenate([S.real, S.imag], 2) if sizes.turns else S.real
    return output.reshape(input.shape), present


def eager(
    input: Tensor,
    rate: Tensor,
    cosine: Tensor,
    sine: Tensor | None,
    angle: Tensor | None,
    past_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return output and present_state, in differentiable PyTorch; a plain export of it unrolls."""
    import torch

    optional = (None if x is None else tuple(x.shape) for x in (sine, angle, past_state))
    sizes = check(tuple(input.shape), tuple(rate.shape), tuple(cosine.shape), *optional)
    dtype = torch.promote_types(input.dtype, torch.float32)
    u = input.to(dtype).unflatten(-1, (sizes.heads, 1, sizes.d_v))
    grown = rate.to(dtype).exp()[..., None]
    turn = torch.zeros_like(grown) if angle is None else (2 * math.pi * angle)[..., None].to(dtype)
    a, b = grown * turn.cos(), grown * turn.sin()
    re = im = u.new_zeros(input.shape[0], sizes.heads, sizes.poles, sizes.d_v)
    if past_state is not None:
        re = past_state[:, :, : sizes.poles].to(dtype)
        im = past_state[:, :, sizes.poles :].to(dtype) if sizes.turns else im
    c = cosine.to(dtype)[..., None]
    d = torch.zeros_like(c) if sine is None else sine.to(dtype)[..., None]
    outputs = [u.new_zeros(input.shape[0], 0, sizes.heads, sizes.d_v)]
    for t in range(input.shape[1]):
        re, im = a * re - b * im + u[:, t], b * re + a * im
        outputs.append((c * re - d * im).sum(2)[:, None])
    present = torch.cat([re, im], 2) if sizes.turns else re
    return torch.cat(outputs, 1).flatten(2).to(input.dtype), present


def view(node: Node) -> StateSpaceSizes:
    """The sizes of a node, checked.

    Raises:
        OpError: its shapes contradict the definition.
    """
    return check(**node.shapes)
