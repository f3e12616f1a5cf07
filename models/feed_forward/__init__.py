"""Feed-forward layers y = f(W x + b): the plain one, and replacements as feature maps.

    y_i ~ Phi(W)_i . Psi(x)        Phi(W) computed once

``linearize_feed_forward`` makes the replacement in one of five forms; their theory is in
docs/math.md, "Feed-forward layers".
"""

from linexport.models.feed_forward.activations import ACTIVATIONS, Activation
from linexport.models.feed_forward.block import feed_forward
from linexport.models.feed_forward.chebyshev_layer import ChebyshevFeedForward
from linexport.models.feed_forward.layer import KernelFeedForward, KernelFeedForwardConfig
from linexport.models.feed_forward.linear_activation import (
    NewLayer,
    Pair,
    linear_activation_pairs,
    substitute,
)
from linexport.models.feed_forward.linearize import linearize_feed_forward
from linexport.models.feed_forward.low_rank import LowRankFeedForward
from linexport.models.feed_forward.powers import MAX_COST, Power
from linexport.models.feed_forward.report import FORMS, FeedForwardReport

__all__ = [
    "ACTIVATIONS",
    "FORMS",
    "MAX_COST",
    "Activation",
    "ChebyshevFeedForward",
    "FeedForwardReport",
    "KernelFeedForward",
    "KernelFeedForwardConfig",
    "LowRankFeedForward",
    "NewLayer",
    "Pair",
    "Power",
    "feed_forward",
    "linear_activation_pairs",
    "linearize_feed_forward",
    "substitute",
]
