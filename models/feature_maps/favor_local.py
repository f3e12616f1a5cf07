"""Softmax's kernel inside an L1 ball, exp(q.k/sqrt(d)) for keys near the query: favor+ and local.

See ``favor``, ``local`` and ``product`` for the formulas. For heads of up to four components.
"""

from __future__ import annotations

from dataclasses import dataclass

from linexport.models.config import bounded
from linexport.models.feature_maps.base import LARGEST_SCALE, LEAST_SCALE, MOST_FEATURES
from linexport.models.feature_maps.favor import Favor
from linexport.models.feature_maps.local import Local, LocalOptions
from linexport.models.feature_maps.product import ProductMap
from linexport.models.feature_maps.projected import ProjectionOptions


@dataclass(frozen=True, kw_only=True)
class FavorLocalOptions:
    """Options of ``favor+*local``.

    Attributes:
        features: M, even: a cosine and a sine for each exponential.
        delta: radius of the ball.
        tau: standard deviation of its smoothing.
        seed: of the draws.
    """

    features: int = bounded(256, multiple_of=2, at_most=MOST_FEATURES)
    delta: float = bounded(1.0, at_least=LEAST_SCALE, at_most=LARGEST_SCALE)
    tau: float = bounded(0.25, at_least=LEAST_SCALE, at_most=LARGEST_SCALE)
    seed: int = bounded(0, at_least=0)


class FavorLocal(ProductMap):
    """Feature map ``favor+*local``: the product of ``favor+`` and ``local``."""

    kind = "favor+*local"
    kernel = "exp(q.k/sqrt(d)) P(|q - k + tau g|_1 <= delta), g ~ N(0, I)"
    positive = False
    kernel_positive = False
    regime = "Softmax attention to near keys only, for d <= 4 and small queries and keys."
    failure = "The errors of both factors multiply, and estimates of 0 can be negative."
    Options = FavorLocalOptions
    first, second, blocks, taken = Favor, Local, (1, 2), 1

    def __init__(self, head_dim: int, options: FavorLocalOptions | None = None) -> None:
        chosen = options or FavorLocalOptions()
        favor = ProjectionOptions(
            features=self.draws(chosen.features), seed=2 * chosen.seed, orthogonal=False
        )
        # Another seed: paired draws must be independent.
        local = LocalOptions(
            features=chosen.features,
            delta=chosen.delta,
            tau=chosen.tau,
            seed=2 * chosen.seed + 1,
        )
        super().__init__(head_dim, chosen, [Favor(head_dim, favor), Local(head_dim, local)])
