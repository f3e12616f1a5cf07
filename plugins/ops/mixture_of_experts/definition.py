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
from linexport.plugins.ops.shapes import PartialShape, rank, same_dim

if TYPE_CHECKING:
    from torch import Tensor

INPUTS = ("x", "index", "weight", "up", "down")

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ExpertActivation:
    """act(c, x), as a definition and as a body: the activation of x where c = x.

    It is linear in c, the part of x that may be capped.
    """

    define: Callable[[Array, Array], Array]
    write: Callable[[Body, str, str], str]


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


ACTIVATIONS = {
    "silu": ExpertActivation(
        lambda c, x: c / (1 + np.exp(-x)), lambda b, c, x: b.Mul(c, b.Sigmoid(x))
    ),
    "relu2": ExpertActivation(
        lambda c, x: np.maximum(c, 0) * np.maximum(x, 0),
        lambda b, c, x: b.Mul(b.Relu(c), b.Relu(x)),
    ),
    "gelu": ExpertActivation(
        lambda c, x: c / 2 * (1 + _erf(x / 2**0.5)),
        lambda b, c, x: b.Mul(
            b.Mul(c, b.CastLike(b.const(0.5), x)),
            b.Add(b.Erf(b.Mul(x, b.CastLike(b.const(0.5**0.5), x))), b.CastLike(b.const(1.0), x)),
        ),
    ),
}
"""By name."""


@dataclass(frozen=True)
class ExpertFunction:
    """f of the definition.

    Attributes:
        activation: one of ``ACTIVATIONS``.
        gated: half of the values are factors of the other half.
        gate_cap: soft cap of what the activation is linear in, 0 without one.
        value_cap: soft cap of the factors, 0 without one.
    """

    activation: str = "silu"
    gated: bool = True
    gate_cap: float = 0.0
    value_cap: float = 0.0

    def check(self) -> None:
        """Check that there is such a function.

        Raises:
            OpError: unknown activation, or a cap that is not one.
        """
        if self.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise OpError(f"activation is {self.activation!r}; expected one of {known}.")
        for name, cap in (("gate_cap", self.gate_cap), ("value_cap", self.value_cap)):
            if not 0 <= cap < math.inf:
                raise OpError(f"{name} is {cap}; expected a positive number, or 0 for no cap.")
        if self.value_cap and not self.gated:
            raise OpError(f"value_cap is {self.value_cap}, and experts without a gate have none.")

    def __str__(self) -> str:
        """Return it in words."""
        caps = {"gate": self.gate_cap, "value": self.value_cap}
        capped = [f"{name} capped at {cap:g}" for name, cap in caps.items() if cap]
        kind = f"gated {self.activation}" if self.gated else self.activation
        return ", ".join([kind, *capped])


@dataclass(frozen=True)
class ExpertSizes:
    """Fixed sizes of a node: experts, experts a token, and widths."""

    experts: int
    chosen: int
    width_out: int


def check(
    function: ExpertFunction,
    x: PartialShape,
    index: PartialShape,
    weight: PartialShape,
    up: PartialShape,
    down: PartialShape,
) -> ExpertSizes:
    """ExpertSizes implied by the shapes of the inputs.

    Raises:
        OpError: no such function, or shapes that contradict each other.
    """
    function.check()
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
    same_dim("up", "rows", up[1], inner * (2 if function.gated else 1))
    same_dim("up", "columns", up[2], x[1])
    return ExpertSizes(experts, chosen, width_out)


def mixture_of_experts(
    function: ExpertFunction,
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
    check(function, x.shape, index.shape, weight.shape, up.shape, down.shape)
    act = ACTIVATIONS[function.activation].define

    def capped(x: Array, cap: float) -> Array:
        return cap * np.tanh(x / cap) if cap else x

    y = np.zeros((x.shape[0], down.shape[1]))
    for n, j in np.ndindex(*index.shape):
        e = index[n, j]
        h = np.float64(up[e]) @ x[n]
        gate, *values = np.split(h, 2) if function.gated else [h]
        h = act(capped(gate, function.gate_cap), gate)
        for value in values:
            h = h * capped(value, function.value_cap)
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
    gate_cap: float = 0.0,
    value_cap: float = 0.0,
) -> Tensor:
    """Return y in differentiable PyTorch.

    No size depends on values: all tokens go through all experts.
    """
    import torch
    from torch.nn import functional as F

    tensors = (x, index, weight, up, down)
    function = ExpertFunction(activation, bool(gated), gate_cap, value_cap)
    check(function, *(tuple(t.shape) for t in tensors))
    forms: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "silu": lambda c, x: c * torch.sigmoid(x),
        "gelu": lambda c, x: c * (torch.erf(x * 0.5**0.5) + 1) / 2,
        "relu2": lambda c, x: F.relu(c) * F.relu(x),
    }

    def capped(x: Tensor, cap: float) -> Tensor:
        return cap * torch.tanh(x / cap) if cap else x

    h = x @ up.transpose(1, 2)
    gate, *values = h.chunk(2, -1) if gated else [h]
    h = forms[activation](capped(gate, gate_cap), gate)
    for value in values:
        h = h * capped(value, value_cap)
    y = h @ down.transpose(1, 2)
    share = weight.new_zeros(x.shape[0], up.shape[0]).scatter_add(1, index, weight)
    return torch.einsum("ne,enh->nh", share, y).to(x.dtype)


def function_of(attributes: Attributes) -> ExpertFunction:
    """Return f of a node with these attributes."""
    return ExpertFunction(
        str(attributes.get("activation", "silu")),
        bool(attributes.get("gated", 1)),
        float(attributes.get("gate_cap", 0.0)),
        float(attributes.get("value_cap", 0.0)),
    )


def view(node: Node) -> ExpertSizes:
    """The sizes of a node, checked.

    Raises:
        OpError: its attributes or shapes contradict the definition.
    """
    return check(function_of(node.attributes), *(node.shapes[name] for name in INPUTS))
