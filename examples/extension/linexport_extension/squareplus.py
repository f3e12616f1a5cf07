"""The feature map squareplus: phi(x) = (x + sqrt(x^2 + 4)) / 2, a relu without a corner.

Source: Barron, "Squareplus: a softplus-like algebraic rectifier", 2021, with b = 4.
"""

import numpy as np

from linexport.models.feature_maps.base import FeatureMap


class SquarePlus(FeatureMap):
    """Positive everywhere, without an exponential."""

    kind = "squareplus"
    kernel = "squareplus(q) . squareplus(k)"
    positive = True
    kernel_positive = True
    regime = "Where softplus is wanted without exp."
    failure = "Attends broadly, like relu: features grow only linearly."
    elementwise = True

    @classmethod
    def phi(cls, x, *frozen):
        """Return phi of queries and keys, in PyTorch."""
        return (x + (x.square() + 4).sqrt()) / 2

    @classmethod
    def phi_onnx(cls, b, x, width, *parameters):
        """Append the same in ONNX operators."""
        four, half = (b.CastLike(b.const(c), x) for c in (4.0, 0.5))
        return b.Mul(b.Add(x, b.Sqrt(b.Add(b.Mul(x, x), four))), half)

    def kernel_value(self, query, key):
        """Return the kernel in float64, for rows of queries and keys."""
        phi_q, phi_k = ((x + np.sqrt(x**2 + 4)) / 2 for x in (query, key))
        return (phi_q * phi_k).sum(-1)
