"""The layer that replaces y = f(W x + b): one feature map and one matrix product.

    y = Psi(x) Phi(W)^T,   Psi(x) = [x', phi_2(x'), ..., phi_n(x')],   x' = [x - centre, 1]

phi_k(v) . phi_k(x') = (v . x')^k, exactly or in expectation, so that for polynomials
p_i(x) = sum_k c_ik (v_i . x')^k the rows of Phi(W) are

    Phi(W)_i = [c_i1 v_i + c_i0 e, c_i2 phi_2(v_i), ..., c_in phi_n(v_i)],   e . x' = 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linexport.models.config import parse
from linexport.models.feature_maps import make
from linexport.models.feature_maps.base import Array
from linexport.models.feed_forward.following import Following
from linexport.models.feed_forward.polynomials import Polynomials
from linexport.models.wide import WideBuffers


@dataclass(frozen=True, kw_only=True)
class KernelFeedForwardConfig:
    """Configuration that, with its state_dict, rebuilds a layer.

    Attributes:
        in_features: d.
        out_features: rows of Phi(W).
        maps: feature maps of x', each a dict of its ``kind`` and its ``options``.
        folded: the linear layer after the activation is in Phi(W).
    """

    in_features: int
    out_features: int
    maps: list[dict[str, Any]]
    folded: bool = False


class KernelFeedForward(WideBuffers):
    """y ~ f(W x + b) of (..., d), as (..., out); computed at least in float32.

    Everything it computes with is a buffer, zero until ``fill`` or ``load_state_dict``.

    Attributes:
        config: the fields of ``KernelFeedForwardConfig``, as a plain dict.
        maps: phi_2, ..., phi_n, those that occur.
        centre: subtracted from x, (d,).
        weight: Phi(W), (out, M).
    """

    centre: Tensor
    weight: Tensor

    def __init__(self, config: KernelFeedForwardConfig) -> None:
        super().__init__()
        self.config = asdict(config)
        width = config.in_features + 1
        maps = [make(m["kind"], width, m["options"]) for m in config.maps]
        features = width + sum(phi.features for phi in maps)
        self.maps = nn.ModuleList(maps)
        self.register_buffer("centre", torch.zeros(config.in_features))
        self.register_buffer("weight", torch.zeros(config.out_features, features))

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> KernelFeedForward:
        """The layer of a ``config``, to load a state_dict into.

        Raises:
            UsageError: names what does not fit.
        """
        return cls(parse(KernelFeedForwardConfig, config, "a feed-forward layer"))

    def forward(self, x: Tensor) -> Tensor:
        """(..., out) of (..., d), in the dtype of x."""
        wide = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        augmented = F.pad(wide - self.centre, (0, 1), value=1.0)
        # Feature maps take (B, T, d).
        packed = augmented.flatten(1, -2) if x.dim() > 3 else augmented[(None,) * (3 - x.dim())]
        features = torch.cat([packed, *(phi(packed, 1) for phi in self.maps)], -1)
        y = features @ self.weight.to(features.dtype).mT
        return y.reshape(*x.shape[:-1], y.shape[-1]).to(x.dtype)

    def fill(
        self,
        centre: Array,
        polynomials: Polynomials,
        degrees: Sequence[int],
        following: Following | None = None,
    ) -> Tensor:
        """Compute Phi(W), with the linear layer after the activation in it where one is given.

        ``degrees`` are those of ``maps``.

        Returns:
            Phi(W) in float64, (out, M), of which ``weight`` is the rounded copy.
        """
        c, v = polynomials.coefficients, torch.from_numpy(polynomials.vectors)
        linear = torch.from_numpy(c[:, 1:2]) * v
        linear[:, -1] += torch.from_numpy(c[:, 0])
        parts = [linear]
        parts += [
            torch.from_numpy(c[:, k : k + 1]) * _exactly(phi, v)
            for k, phi in zip(degrees, self.maps, strict=True)
        ]
        weight = torch.cat(parts, -1)
        if following is not None:
            weight = torch.from_numpy(following.weight) @ weight
            weight[:, v.shape[1] - 1] += torch.from_numpy(following.bias)
        self.centre.copy_(torch.from_numpy(centre))
        self.weight.copy_(weight)
        return weight

    def exactly(self, weight: Tensor, rows: Array) -> Array:
        """Psi(x) weight^T in float64, of rows x'."""
        x = torch.from_numpy(np.ascontiguousarray(rows))
        features = torch.cat([x, *(_exactly(phi, x) for phi in self.maps)], -1)
        return (features @ weight.mT).numpy()


def _exactly(phi: nn.Module, x: Tensor) -> Tensor:
    """Return phi(x) of x (..., d) in float64, by the frozen tensors that phi has."""
    frozen = [p.double() if p.is_floating_point() else p for p in phi.frozen()]  # type: ignore[operator]
    features: Tensor = phi.phi(x, *frozen)  # type: ignore[operator]
    return features
