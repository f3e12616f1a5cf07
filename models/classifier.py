"""A digit classifier: every patch of an image attends to every other, in both directions.

h = W x + P                                      x (B, tokens, features), P learned positions
h = h + attention(norm(h))                       layers times, bidirectional
h = h + feed_forward(norm(h))
logits = W_c mean_t norm(h)                      (B, 10)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export import Dim

from linexport.models.feed_forward import feed_forward, substitute
from linexport.models.registry import ReferenceModel
from linexport.models.stack import StackConfig, attention_layer
from linexport.system.untyped import DynamicShapes

CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class DigitClassifierConfig(StackConfig):
    """Configuration of ``DigitClassifier``.

    Attributes:
        tokens: patches an image is cut into.
        features: pixels of a patch.
    """

    tokens: int = 16
    features: int = 4


class ClassifierBlock(nn.Module):
    """Bidirectional attention, then feed-forward, each added to its input."""

    def __init__(self, config: DigitClassifierConfig, at: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = attention_layer(config, at, causal=False)
        self.feed_forward_norm = nn.LayerNorm(config.dim)
        self.feed_forward = feed_forward(config.dim, config.hidden_dim)

    def forward(self, h: Tensor) -> Tensor:
        """(B, tokens, dim)."""
        seen, _ = self.attention(self.attention_norm(h))
        h = h + seen
        return h + self.feed_forward(self.feed_forward_norm(h))


class DigitClassifier(ReferenceModel):
    """Logits of the ten digits from the pixels of an image, cut into patches."""

    name = "digit_classifier"
    Config = DigitClassifierConfig
    gives_classes = True

    def __init__(self, config: DigitClassifierConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Linear(config.features, config.dim)
        self.positions = nn.Parameter(torch.randn(config.tokens, config.dim) * 0.5)
        self.blocks = nn.Sequential(*(ClassifierBlock(config, at) for at in range(config.layers)))
        self.norm = nn.LayerNorm(config.dim)
        self.classes = nn.Linear(config.dim, CLASSES)
        substitute(self, config.kernel_feed_forward)

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits (B, 10) of ``pixels``, (B, tokens, features) in [0, 1]."""
        h = self.blocks(self.embedding(pixels) + self.positions)
        logits: Tensor = self.classes(self.norm(h).mean(1))
        return logits

    def example_inputs(self, batch: int, length: int, seed: int) -> tuple[Tensor, ...]:
        """Random pixels; the number of tokens is the model's own."""
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, self.config["tokens"], self.config["features"])
        return (torch.rand(shape, generator=generator),)

    def dynamic_shapes(self) -> DynamicShapes:
        """Only the batch: positions are learned one by one."""
        return ({0: Dim.DYNAMIC},)
