"""A model that tells digits by looking them up: cross-attention to thousands of stored images.

    q = W_q x        K_h = W_k m, V_h = E[label]     m the stored images, computed once
    logits = W_o softmax(q K^T / sqrt(d)) V          (B, T, 10)

Its keys and values never change: fewer can take their place (``linexport.models.static_memory``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from linexport.models.classifier import CLASSES
from linexport.models.config import bounded
from linexport.models.registry import ReferenceModel
from linexport.system.untyped import DynamicShapes


@dataclass(frozen=True, kw_only=True)
class DigitMemoryConfig:
    """Configuration of ``DigitMemory``.

    Attributes:
        rows: images that are stored.
        features: pixels of an image.
        num_heads: of the attention.
        head_dim: d, of keys and of values.
    """

    rows: int = bounded(4096, at_least=1)
    features: int = bounded(64, at_least=1)
    num_heads: int = bounded(4, at_least=1)
    head_dim: int = bounded(16, at_least=1)


class DigitMemory(ReferenceModel):
    """Logits of the ten digits for each image of a sequence.

    Attributes:
        keys: (H, rows, d), zero until ``store`` or ``load_state_dict``.
        values: (H, rows, d).
    """

    name = "digit_memory"
    Config = DigitMemoryConfig
    gives_classes = True

    keys: Tensor
    values: Tensor

    def __init__(self, config: DigitMemoryConfig) -> None:
        super().__init__(config)
        self.heads, width = config.num_heads, config.num_heads * config.head_dim
        self.query = nn.Linear(config.features, width)
        self.key = nn.Linear(config.features, width)
        self.value = nn.Embedding(CLASSES, width)
        self.classes = nn.Linear(width, CLASSES)
        shape = (config.num_heads, config.rows, config.head_dim)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))

    def memory(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, both (H, rows, d), of images (rows, features) and labels (rows,)."""
        return self._split(self.key(images)), self._split(self.value(labels))

    @torch.no_grad()
    def store(self, images: Tensor, labels: Tensor) -> None:
        """Keep what ``memory`` gives with the weights there are now."""
        for kept, computed in zip(
            (self.keys, self.values), self.memory(images, labels), strict=True
        ):
            kept.copy_(computed)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, T, 10) of ``images``, (B, T, features) in [0, 1]."""
        return self.look_up(images, self.keys, self.values)

    def look_up(self, images: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Logits (B, T, 10) of images, looked up in given keys and values, (H, rows, d) each."""
        rows = (images.shape[0], -1, -1, -1)
        found = F.scaled_dot_product_attention(
            self._split(self.query(images)), keys.expand(rows), values.expand(rows)
        )
        logits: Tensor = self.classes(found.transpose(1, 2).flatten(2))
        return logits

    def _split(self, packed: Tensor) -> Tensor:
        """(..., n, H * d) as (..., H, n, d)."""
        return packed.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def example_inputs(self, batch: int, length: int, seed: int) -> tuple[Tensor, ...]:
        """Random images."""
        generator = torch.Generator().manual_seed(seed)
        return (torch.rand(batch, length, self.config["features"], generator=generator),)

    def dynamic_shapes(self) -> DynamicShapes:
        """Batch and number of images."""
        return ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
