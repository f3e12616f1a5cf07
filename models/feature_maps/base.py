"""The contract of a feature map: one file per map, found by scanning this folder.

A map is a subclass of ``FeatureMap`` that states, in one place, its formula in PyTorch, the same
formula in ONNX operators, the kernel it represents and its properties. Subclassing it registers
it under its ``kind``.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from linexport.errors import UsageError
from linexport.plugins.ops import feature_map as op
from linexport.plugins.ops.body import Body

_maps: dict[str, type[FeatureMap]] = {}


class FeatureMap(nn.Module, ABC):
    """phi: R^d -> R^M, applied to the last axis.

    Class attributes:
        kind: the name users choose it by.
        kernel: the kernel phi(q) . phi(k) represents, as a formula.
        positive: phi >= 0, so that a normaliser cannot change sign.
        elementwise: M = d and every feature depends on one component only.
    """

    kind: ClassVar[str]
    kernel: ClassVar[str]
    positive: ClassVar[bool]
    elementwise: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__:
            op.register(cls.kind, cls.phi_onnx, cls.elementwise)
            _maps[cls.kind] = cls

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    @property
    def features(self) -> int:
        """M, the width of phi(x)."""
        return self.head_dim

    def frozen(self) -> Sequence[Tensor]:
        """Tensors the formula needs besides x, in the order it takes them."""
        return ()

    @staticmethod
    @abstractmethod
    def phi(x: Tensor, *frozen: Tensor) -> Tensor:
        """phi of (..., d), as (..., M): differentiable PyTorch."""

    @staticmethod
    @abstractmethod
    def phi_onnx(b: Body, x: str, *frozen: str) -> str:
        """Append phi of the value x, (..., d), to an ONNX body; returns the (..., M) value."""

    @abstractmethod
    def kernel_value(
        self, query: NDArray[np.float64], key: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """The kernel for rows of query and key, (n, d) each, in float64 and not through phi."""

    def forward(self, x: Tensor, num_heads: int) -> Tensor:
        """phi on every head of (B, T, num_heads * d), as (B, T, num_heads * M)."""
        frozen = list(self.frozen())
        if torch.compiler.is_exporting():
            out: Tensor = torch.ops.linexport.feature_map(x, frozen, self.kind, num_heads)
            return out
        return apply_packed(self.kind, x, frozen, num_heads)


def apply_packed(kind: str, x: Tensor, frozen: Sequence[Tensor], num_heads: int) -> Tensor:
    """The map ``kind`` on every head of a packed tensor."""
    found = find(kind)
    if found.elementwise:
        return found.phi(x, *frozen)
    return found.phi(x.unflatten(-1, (num_heads, x.shape[-1] // num_heads)), *frozen).flatten(-2)


def kinds() -> list[str]:
    """Names of all maps, sorted."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{module.name}")
    return sorted(_maps)


def find(kind: str) -> type[FeatureMap]:
    """The map of that name.

    Raises:
        UsageError: there is none; names the nearest.
    """
    known = kinds() if kind not in _maps else [kind]
    if kind not in known:
        begun = [name for name in known if kind and name.startswith(kind)]
        near = begun or difflib.get_close_matches(kind, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"Unknown feature map {kind!r}; expected one of {', '.join(known)}.{hint}")
    return _maps[kind]
