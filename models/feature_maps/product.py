"""The product of two random kernels, by pairing their draws.

    phi(x) = m^{1/2} [a_j(x) b_j(x)]  for every pair of the features that draw j gives on each side
    E phi(x).phi(y) = k_a k_b         Var = ((m Var_a + k_a^2)(m Var_b + k_b^2) - (k_a k_b)^2) / m

where a_j and b_j are of independent draws, m of each: a cosine and a sine with one exponential
make M = 2m, with another pair 4m. Maps that are not an average over independent draws, such as a
tensor sketch or orthogonal projections, cannot be paired like this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, cat

from linexport.models.feature_maps.base import UNBIASED, Array, FeatureMap
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


class ProductMap(FeatureMap):
    """A subclass names two maps and makes them, with the same number of draws.

    Class attributes:
        first, second: the maps.
        blocks: features each of them has per draw, all firsts before all seconds.
        taken: frozen tensors of the first.
    """

    exactness = UNBIASED
    error = "((m Var_1 + k_1^2) (m Var_2 + k_2^2) - k_1^2 k_2^2) / m"
    first: ClassVar[type[FeatureMap]]
    second: ClassVar[type[FeatureMap]]
    blocks: ClassVar[tuple[int, int]]
    taken: ClassVar[int]

    def __init__(self, head_dim: int, options: Any, factors: Sequence[FeatureMap]) -> None:
        super().__init__(head_dim, options)
        self.factors = tuple(factors)
        tensors = [t for factor in factors for t in factor.frozen()]
        self.names = [f"parameter_{i}" for i in range(len(tensors))]
        for name, tensor in zip(self.names, tensors, strict=True):
            self.register_buffer(name, tensor)

    def frozen(self) -> Sequence[Tensor]:
        return [self._buffers[name] for name in self.names]  # type: ignore[misc]

    @classmethod
    def draws(cls, features: int) -> int:
        """m of M."""
        return features // (cls.blocks[0] * cls.blocks[1])

    @classmethod
    def feature_count(cls, width: int, *shapes: tuple[int, ...]) -> int:
        return cls.first.feature_count(width, *shapes[: cls.taken]) * cls.blocks[1]

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        a, b = cls.first.phi(x, *frozen[: cls.taken]), cls.second.phi(x, *frozen[cls.taken :])
        return cls._pair(a, b)

    @classmethod
    def phi_key(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        a = cls.first.phi_key(x, *frozen[: cls.taken])
        return cls._pair(a, cls.second.phi_key(x, *frozen[cls.taken :]))

    @classmethod
    def _pair(cls, a: Tensor, b: Tensor) -> Tensor:
        halves = [x.chunk(count, -1) for x, count in zip((a, b), cls.blocks, strict=True)]
        draws = halves[0][0].shape[-1]
        return cat([p * q for p in halves[0] for q in halves[1]], -1) * draws**0.5

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        one, two = parameters[: cls.taken], parameters[cls.taken :]
        sides = cls.first.phi_onnx(b, x, width, *one), cls.second.phi_onnx(b, x, width, *two)
        return cls._pair_onnx(b, width, sides, one)

    @classmethod
    def phi_key_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        one, two = parameters[: cls.taken], parameters[cls.taken :]
        sides = (
            cls.first.phi_key_onnx(b, x, width, *one),
            cls.second.phi_key_onnx(b, x, width, *two),
        )
        return cls._pair_onnx(b, width, sides, one)

    @classmethod
    def _pair_onnx(
        cls, b: Body, width: int, sides: tuple[str, str], one: Sequence[Parameter]
    ) -> str:
        draws = cls.first.feature_count(width, *(p.shape for p in one)) // cls.blocks[0]
        scaled = b.Mul(sides[0], b.const(draws**0.5)), sides[1]
        halves = [
            [x] if n == 1 else list(b.Split(x, outputs=n, axis=-1, num_outputs=n))
            for x, n in zip(scaled, cls.blocks, strict=True)
        ]
        products = [b.Mul(p, q) for p in halves[0] for q in halves[1]]
        return str(products[0] if len(products) == 1 else b.Concat(*products, axis=-1))

    def kernel_value(self, query: Array, key: Array) -> Array:
        first, second = (factor.kernel_value(query, key) for factor in self.factors)
        return first * second

    def theoretical_error(self, query: Array, key: Array) -> Array | None:
        draws, squares, seconds = self.draws(self.features), [], []
        for factor in self.factors:
            error = factor.theoretical_error(query, key)
            assert error is not None
            squares.append(factor.kernel_value(query, key) ** 2)
            seconds.append(draws * error + squares[-1])
        return np.asarray((seconds[0] * seconds[1] - squares[0] * squares[1]) / draws)
