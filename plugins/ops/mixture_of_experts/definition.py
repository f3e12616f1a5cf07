"""The definition of MixtureOfExperts: sizes compared, float64 pair by pair, and PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from linexport.errors import OpError
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.op import (
    Attributes,
    Node,
)
from linexport.plugins.ops.shapes import Shape, rank, same_dim

if TYPE_CHECKING:
    from torch import Tensor

INPUTS = ("x", "index", "weight", "up", "down")

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


def options_of(attributes: Attributes) -> tuple[str, bool]:
    """Return the activation and whether it is gated."""
    return str(attributes.get("activation", "silu")), bool(attributes.get("gated", 1))


def view(node: Node) -> ExpertSizes:
    """The sizes of a node, checked.

    Raises:
        OpError: its attributes or shapes contradict the definition.
    """
    return check(*options_of(node.attributes), *(node.shapes[name] for name in INPUTS))
