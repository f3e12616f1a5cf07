"""Clusters of keys as features: a query weighs centroids, a key belongs to them.

    phi_q(x) = softmax(d^{-1/2} K^ x + b)                       K^ (M, d) centroids of keys
    phi_k(y) = softmax((K^ y - |K^|^2 / 2) / sigma^2)           the posterior of a Gaussian mixture

With sigma -> 0 each key belongs to its nearest centroid alone, and normalised attention is softmax
attention with every key moved to its centroid: the state sums the values of each cluster, and the
normaliser counts its keys, which is why b = 0 unless the keys are static. Over static keys the
state is fixed instead: S = V^, z = 1, b = log of the cluster sizes
(``linexport.models.static_memory``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from linexport.errors import UsageError
from linexport.models.config import bounded
from linexport.models.feature_maps import draws
from linexport.models.feature_maps.base import FITTED, MOST_FEATURES, Array, FeatureMap
from linexport.models.static_memory.kmeans import kmeans
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter


@dataclass(frozen=True, kw_only=True)
class PseudoKeysOptions:
    """Options of pseudo-keys.

    Attributes:
        features: M, pseudo-keys.
        seed: of the first centroids and of k-means.
    """

    features: int = bounded(64, at_least=1, at_most=MOST_FEATURES)
    seed: int = bounded(0, at_least=0)


class PseudoKeys(FeatureMap):
    """Standard normal centroids with sigma = 1 until ``fit`` is given keys."""

    kind = "pseudo_keys"
    kernel = "softmax(K^ q / sqrt(d) + b) . softmax((K^ k - |K^|^2 / 2) / sigma^2)"
    exactness = FITTED
    positive = True
    kernel_positive = True
    error = "fitted: measured, see compare"
    regime = "Keys that fall into clusters, once fitted to samples of them."
    failure = "Keys far from every centroid are taken for others; unfitted, it is not softmax."
    Options = PseudoKeysOptions

    query_weight: Tensor
    query_bias: Tensor
    key_weight: Tensor
    key_bias: Tensor

    def __init__(self, head_dim: int, options: PseudoKeysOptions | None = None) -> None:
        super().__init__(head_dim, options)
        random = draws.generator(self.options.seed)
        M = self.options.features
        for side in ("query", "key"):
            self.register_buffer(f"{side}_weight", torch.zeros(M, head_dim))
            self.register_buffer(f"{side}_bias", torch.zeros(M))
        self._place(random.standard_normal((M, head_dim)), 1.0)

    def fit(self, queries: Array, keys: Array) -> None:
        """Place the centroids by k-means.

        Args:
            queries: not looked at: clusters are of keys.
            keys: (n, d) samples of the real distribution, as they reach the map.

        Raises:
            UsageError: keys of another shape, not finite, or fewer than M.
        """
        rows = np.asarray(keys, dtype=np.float64)
        if rows.ndim != 2 or rows.shape[1] != self.head_dim:
            raise UsageError(f"keys has shape {rows.shape}; expected (n, {self.head_dim}).")
        if not np.isfinite(rows).all():
            raise UsageError("keys has NaN or infinite entries. Drop those rows.")
        clusters = kmeans(rows, self.options.features, self.options.seed)
        variance = clusters.inertia / rows.size
        # Clusters of a single point have none: then a key belongs to the nearest alone.
        self._place(clusters.centroids, max(variance, 1e-6 * float(rows.var())))

    def _place(self, centroids: Array, variance: float) -> None:
        self.query_weight.copy_(torch.from_numpy(centroids * self.head_dim**-0.5))
        self.query_bias.zero_()
        self.key_weight.copy_(torch.from_numpy(centroids / variance))
        self.key_bias.copy_(torch.from_numpy(-(centroids**2).sum(1) / (2 * variance)))

    def frozen(self) -> tuple[Tensor, ...]:
        return self.query_weight, self.query_bias, self.key_weight, self.key_bias

    @classmethod
    def feature_count(cls, width: int, *shapes: tuple[int, ...]) -> int:
        return shapes[0][0]

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        weight, bias, _, _ = frozen
        return (x @ weight.T + bias).softmax(-1)

    @classmethod
    def phi_key(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        _, _, weight, bias = frozen
        return (x @ weight.T + bias).softmax(-1)

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        return _softmax_onnx(b, x, *parameters[:2])

    @classmethod
    def phi_key_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        return _softmax_onnx(b, x, *parameters[2:])

    def kernel_value(self, query: Array, key: Array) -> Array:
        sides = []
        for x, weight, bias in zip(
            (query, key), self.frozen()[::2], self.frozen()[1::2], strict=True
        ):
            scores = x @ weight.double().numpy().T + bias.double().numpy()
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            sides.append(shares / shares.sum(-1, keepdims=True))
        return np.asarray((sides[0] * sides[1]).sum(-1))


def _softmax_onnx(b: Body, x: str, weight: Parameter, bias: Parameter) -> str:
    scores = b.Add(b.MatMul(x, b.Transpose(weight.name, perm=[1, 0])), bias.name)
    return str(b.Softmax(scores, axis=-1))
