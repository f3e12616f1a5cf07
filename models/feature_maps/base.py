"""The contract of a feature map: one file per map, found by ``registry``.

A map is a subclass of ``FeatureMap`` that states, in one place, its formulas in PyTorch, the same
formulas in ONNX operators, the kernel it represents, its theory and its properties. Subclassing it
registers it under its ``kind``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linexport.errors import OpError, UsageError
from linexport.models.wide import HALF, WideBuffers
from linexport.plugins.ops import feature_map as op
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter

EXACT, UNBIASED, FITTED = "exact", "unbiased", "fitted"
"""How phi(q) . phi(k) is related to the kernel; unbiased: in expectation over the draws."""

Array = NDArray[np.float64]

MOST_FEATURES = 2**20
"""Features that may be chosen: their draws, of heads of width 128, are 512 MB."""

LEAST_SCALE, LARGEST_SCALE = 1e-6, 1e6
"""Limits of lengths and scales that may be chosen: float32 holds what is computed of them."""

MOST_FACTORS = 32
"""Degree n of a polynomial: float32 holds its multiplicities, of which n! is the largest."""

MAPS: dict[str, type[FeatureMap]] = {}
"""Maps that were defined so far, by kind."""


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Options of a map without any."""


class FeatureMap(WideBuffers, ABC):
    """phi: R^d -> R^M, applied to the last axis; queries and keys may have different ones.

    Frozen tensors stay out of half precision: w . x would lose the digits exp needs.

    Class attributes:
        kind: the name users choose it by.
        kernel: the kernel phi(q) . phi(k) represents, as a formula.
        exactness: ``EXACT``, ``UNBIASED`` or ``FITTED``.
        positive: phi >= 0, so that a normaliser cannot change sign.
        kernel_positive: phi(q) . phi(k) >= 0 always, whatever the features.
        error: formula of ``theoretical_error``; "0" for an exact map.
        regime: when to use it, in one sentence.
        failure: how it fails where it does, in one sentence.
        elementwise: M = d and every feature depends on one component only.
        over_time: keys are normalised over the sequence, so attention must be bidirectional.
        float32_features: products of components leave the range of float16, so that attention
            widens half-precision queries and keys first.
        exponential: the features are exponentials, see ``ExponentialMap``.
        refines: kind of the map that this one applies to a function of x, if any: in a graph that
            is read as either, it is this one.
        Options: a frozen dataclass of JSON types with defaults, see ``options.bounded``.
        kappa_onnx: for a map whose kernel is a function of t = q . k alone, append kappa(t) to an
            ONNX body: ``kappa_onnx(b, t, width, *parameters)``.

    Attributes:
        head_dim: d.
        options: the chosen ``Options``.
    """

    kind: ClassVar[str]
    kernel: ClassVar[str]
    exactness: ClassVar[str] = EXACT
    positive: ClassVar[bool]
    kernel_positive: ClassVar[bool]
    error: ClassVar[str] = "0"
    regime: ClassVar[str]
    failure: ClassVar[str]
    elementwise: ClassVar[bool] = False
    over_time: ClassVar[bool] = False
    float32_features: ClassVar[bool] = False
    exponential: ClassVar[bool] = False
    refines: ClassVar[str] = ""
    Options: ClassVar[type[Any]] = NoOptions
    kappa_onnx: ClassVar[Callable[..., str] | None] = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__:
            taken = MAPS.get(cls.kind)
            if taken is not None and _home(taken) != _home(cls):
                raise UsageError(
                    f"{_home(cls)} defines a feature map {cls.kind!r}, and so does "
                    f"{_home(taken)}. Rename one of them."
                )
            op.register(cls.kind, cls._formulas())
            MAPS[cls.kind] = cls

    @classmethod
    def _formulas(cls) -> op.Formulas:
        return op.Formulas(
            query=cls.phi_onnx,
            key=cls.phi_key_onnx,
            features=cls.feature_count,
            eager=cls.apply_packed,
            module=cls.__module__,
            elementwise=cls.elementwise,
            over_time=cls.over_time,
            kappa=cls.kappa_onnx,
        )

    def __init__(self, head_dim: int, options: Any = None) -> None:
        super().__init__()
        if head_dim < 1:
            raise UsageError(
                f"Feature map {self.kind!r} is made for heads of width {head_dim}; expected at "
                "least 1."
            )
        self.head_dim = head_dim
        self.options = self.Options() if options is None else options

    @property
    def heads(self) -> int | None:
        """Heads that it is made for; None: any number."""
        return None

    @property
    def features(self) -> int:
        """M, the width of phi(x)."""
        return self.feature_count(self.head_dim, *(tuple(p.shape) for p in self.frozen()))

    @classmethod
    def feature_count(cls, width: int, *shapes: tuple[int, ...]) -> int:
        """M for head width d and frozen tensors of these shapes."""
        return width

    def frozen(self) -> Sequence[Tensor]:
        """Tensors the formulas need besides x, in the order they take them: buffers, drawn once."""
        return ()

    @classmethod
    @abstractmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        """Return phi of queries (..., d), as (..., M): differentiable PyTorch."""

    @classmethod
    def phi_key(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        """Return phi of keys; that of queries unless a map says otherwise."""
        return cls.phi(x, *frozen)

    @classmethod
    @abstractmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        """Append phi of the value x, (..., width), to an ONNX body; returns the (..., M) value."""

    @classmethod
    def phi_key_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        """Append phi of keys to an ONNX body; that of queries unless a map says otherwise."""
        return cls.phi_onnx(b, x, width, *parameters)

    @classmethod
    def drawn_like(cls, *frozen: Array) -> bool:
        """Return whether a graph's tensors may be this map's; maps of one formula differ in it."""
        return True

    @abstractmethod
    def kernel_value(self, query: Array, key: Array) -> Array:
        """The kernel for rows of query and key, (n, d) each, in float64 and not through phi."""

    def theoretical_error(self, query: Array, key: Array) -> Array | None:
        """E (phi(q) . phi(k) - kernel)^2 over the draws, for rows (n, d); None for an exact map.

        The closed form of ``error``, in float64.
        """
        return None

    def forward(self, x: Tensor, num_heads: int, side: str = "query", log: bool = False) -> Tensor:
        """phi on every head of (B, T, num_heads * d), as (B, T, num_heads * M).

        ``side`` is "query" or "key"; ``log`` gives log phi, at least in float32, of an exponential
        map.

        Raises:
            OpError: the map has no logarithm, or its frozen tensors are in half precision.
        """
        frozen = list(self.frozen())
        if torch.compiler.is_exporting():
            out: Tensor = torch.ops.linexport.feature_map(
                x, frozen, self.kind, num_heads, side, log
            )
            return out
        return self.apply_packed(x, frozen, num_heads, side, log)

    @classmethod
    def apply_packed(
        cls,
        x: Tensor,
        frozen: Sequence[Tensor],
        num_heads: int,
        side: str = "query",
        log: bool = False,
    ) -> Tensor:
        """One side of the map on every head of a packed tensor.

        In the dtype of x, or at least float32 for ``log``; computed at least in float32 unless the
        map is elementwise.

        Raises:
            OpError: see ``forward``.
        """
        formulas = op.formulas(cls.kind)
        formulas.side(side, log)
        for tensor in frozen:
            if tensor.dtype in HALF:
                raise OpError(
                    f"A parameter of the feature map {cls.kind!r} is in {tensor.dtype}; expected "
                    "float32. Convert the model with .half() or .to(), which keep it, not the "
                    "tensor itself."
                )
        wide = torch.promote_types(x.dtype, torch.float32)
        if log:
            assert issubclass(cls, ExponentialMap)
            x, phi = x.to(wide), (cls.log_phi if side == "query" else cls.log_phi_key)
        else:
            phi = cls.phi if side == "query" else cls.phi_key
        if formulas.packed(side):
            return phi(x, *frozen)
        split = x.to(wide).unflatten(-1, (num_heads, x.shape[-1] // num_heads))
        return phi(split, *frozen).flatten(-2).to(x.dtype)


class ExponentialMap(FeatureMap):
    """A map whose features are exponentials: phi = exp(log_phi).

    Attention that normalises takes log_phi and stabilises it; see ``StabilizedExp``.
    """

    exponential = True
    positive = True
    kernel_positive = True

    @classmethod
    def _formulas(cls) -> op.Formulas:
        return op.Formulas(
            query=cls.phi_onnx,
            key=cls.phi_key_onnx,
            features=cls.feature_count,
            eager=cls.apply_packed,
            module=cls.__module__,
            elementwise=cls.elementwise,
            log_query=cls.log_phi_onnx,
            log_key=cls.log_phi_key_onnx,
        )

    @classmethod
    @abstractmethod
    def log_phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        """Return log phi of queries (..., d), as (..., M)."""

    @classmethod
    def log_phi_key(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        """Return log phi of keys (..., d); that of queries unless a map says otherwise."""
        return cls.log_phi(x, *frozen)

    @classmethod
    @abstractmethod
    def log_phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        """Append log phi of queries to an ONNX body; returns the (..., M) value."""

    @classmethod
    def log_phi_key_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        """Append log phi of keys to an ONNX body; returns the (..., M) value."""
        return cls.log_phi_onnx(b, x, width, *parameters)

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        return cls.log_phi(x, *frozen).exp()

    @classmethod
    def phi_key(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        return cls.log_phi_key(x, *frozen).exp()

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        return str(b.Exp(cls.log_phi_onnx(b, x, width, *parameters)))

    @classmethod
    def phi_key_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        return str(b.Exp(cls.log_phi_key_onnx(b, x, width, *parameters)))


def _home(found: type[FeatureMap]) -> str:
    """Return the qualified name of a map, equal for classes of a module imported twice."""
    return f"{found.__module__}.{found.__qualname__}"
