"""A network of two layers that classifies digits: logits = W_2 gelu(W_1 x + b_1) + b_2.

The smallest model with a feed-forward layer worth replacing (``linexport.models.feed_forward``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export import Dim

from linexport.models.classifier import CLASSES
from linexport.models.registry import ReferenceModel
from linexport.system.untyped import DynamicShapes


@dataclass(frozen=True, kw_only=True)
class DigitNetworkConfig:
    """Configuration of ``DigitNetwork``.

    Attributes:
        features: brightnesses an image is given as.
        hidden_dim: rows of W_1.
    """

    features: int = 64
    hidden_dim: int = 32


class DigitNetwork(ReferenceModel):
    """Logits of the ten digits from the brightness of an image's parts."""

    name = "digit_network"
    Config = DigitNetworkConfig
    gives_classes = True

    def __init__(self, config: DigitNetworkConfig) -> None:
        super().__init__(config)
        self.hidden = nn.Linear(config.features, config.hidden_dim)
        self.activation = nn.GELU()
        self.classes = nn.Linear(config.hidden_dim, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits (B, 10) of ``pixels``, (B, features) in [0, 1]."""
        logits: Tensor = self.classes(self.activation(self.hidden(pixels)))
        return logits

    def example_inputs(self, batch: int, length: int, seed: int) -> tuple[Tensor, ...]:
        """Random pixels."""
        generator = torch.Generator().manual_seed(seed)
        return (torch.rand(batch, self.config["features"], generator=generator),)

    def dynamic_shapes(self) -> DynamicShapes:
        """Only the batch."""
        return ({0: Dim.DYNAMIC},)
