"""Softmax's kernel that fades with the L1 distance, by favor+ and laplace; for heads of any width.

See ``favor``, ``laplace`` and ``product`` for the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from linexport.models.config import bounded
from linexport.models.feature_maps.base import LARGEST_SCALE, LEAST_SCALE, MOST_FEATURES
from linexport.models.feature_maps.favor import Favor
from linexport.models.feature_maps.laplace import Laplace, LaplaceOptions
from linexport.models.feature_maps.product import ProductMap
from linexport.models.feature_maps.projected import ProjectionOptions


@dataclass(frozen=True, kw_only=True)
class FavorLaplaceOptions:
    """Options of ``favor+*laplace``.

    Attributes:
        features: M, even: a cosine and a sine for each exponential.
        delta: L1 distance over which the second kernel falls by e; None: d.
        seed: of the draws.
    """

    features: int = bounded(256, multiple_of=2, at_most=MOST_FEATURES)
    delta: float | None = bounded(None, at_least=LEAST_SCALE, at_most=LARGEST_SCALE)
    seed: int = bounded(0, at_least=0)


class FavorLaplace(ProductMap):
    """Feature map ``favor+*laplace``: the product of ``favor+`` and ``laplace``."""

    kind = "favor+*laplace"
    kernel = "exp(q.k/sqrt(d)) exp(-|q - k|_1/delta)"
    positive = False
    kernel_positive = False
    regime = "Softmax attention that prefers near keys, where d > 4; delta of the order of d."
    failure = "The errors of both factors multiply, and small kernels can come out negative."
    Options = FavorLaplaceOptions
    first, second, blocks, taken = Favor, Laplace, (1, 2), 1

    def __init__(self, head_dim: int, options: FavorLaplaceOptions | None = None) -> None:
        chosen = options or FavorLaplaceOptions()
        favor = ProjectionOptions(
            features=self.draws(chosen.features), seed=2 * chosen.seed, orthogonal=False
        )
        # Another seed: paired draws must be independent.
        laplace = LaplaceOptions(
            features=chosen.features, delta=chosen.delta, seed=2 * chosen.seed + 1
        )
        super().__init__(head_dim, chosen, [Favor(head_dim, favor), Laplace(head_dim, laplace)])
