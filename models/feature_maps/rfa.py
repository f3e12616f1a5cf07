"""Random feature attention: the Gaussian kernel of queries and keys of norm 1.

    phi(x) = gaussian(x / |x|)      kernel = exp(-|q/|q| - k/|k||^2 / (2 sigma^2))
                                           = exp((cos(q, k) - 1) / sigma^2)

That is softmax's kernel of unit vectors over sigma^2, up to a factor that cancels in attention that
normalises: at any scale of the inputs features are bounded and the kernel is at least
exp(-2 / sigma^2). Source: Peng et al. 2021 (arXiv 2103.02143).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from linexport.models.feature_maps.base import LARGEST_SCALE, LEAST_SCALE, Array
from linexport.models.feature_maps.gaussian import Gaussian, GaussianOptions
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter

SMALLEST = 1e-6
"""Norm that is divided by at least."""


@dataclass(frozen=True, kw_only=True)
class RfaOptions(GaussianOptions):
    """Options of ``rfa``: those of ``gaussian``.

    Attributes:
        bandwidth: sigma, of vectors of norm 1, or those of each head; None: 1.
    """

    bandwidth: float | list[float] | None = field(
        default=None, metadata={"at_least": LEAST_SCALE, "at_most": LARGEST_SCALE}
    )


class Rfa(Gaussian):
    """Feature map ``rfa``: ``gaussian`` of x / |x|."""

    kind = "rfa"
    refines = "gaussian"
    kernel = "exp((cos(q, k) - 1) / sigma^2)"
    regime = "Softmax of unit vectors, trained so: a bounded kernel and bounded features."
    failure = "Forgets norms; below sigma of about 0.5 small kernels drown, as those of gaussian."
    Options = RfaOptions

    def _default(self) -> float:
        return 1.0

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        return super().phi(F.normalize(x, dim=-1, eps=SMALLEST), *frozen)

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        # A product: ONNX Runtime's reductions have the wrong shape where there are no tokens.
        square = b.MatMul(b.Mul(x, x), b.const(np.ones((width, 1))))
        norm = b.Max(b.Sqrt(square), b.const(SMALLEST))
        return super().phi_onnx(b, b.Div(x, norm), width, *parameters)

    @classmethod
    def _seen(cls, x: Array) -> Array:
        return np.asarray(x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), SMALLEST))
