"""A byte-level causal language model that streams by its states alone.

h = E[token]                                     (B, T, dim), no position embedding
h = h + attention(short_conv(norm(h)))           layers times
h = h + feed_forward(norm(h))
logits = norm(h) E^T                             (B, T, 256)

With softmax attention the state grows by a row of keys and values a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from linexport.models.attention import AttentionState
from linexport.models.feed_forward import feed_forward, substitute
from linexport.models.registry import ReferenceModel
from linexport.models.short_conv import ShortConv
from linexport.models.softmax_attention import KeysAndValues
from linexport.models.stack import StackConfig, attention_layer
from linexport.system.untyped import DynamicShapes

VOCABULARY = 256


class BlockState(NamedTuple):
    """State of one block: the last inputs of its convolution, and its attention state."""

    conv: Tensor
    attention: AttentionState | KeysAndValues


State = tuple[BlockState, ...]
"""One entry per block."""


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(StackConfig):
    """Configuration of ``LanguageModel``.

    Attributes:
        conv_size: tokens each short convolution sees.
    """

    conv_size: int = 4


class LanguageModelBlock(nn.Module):
    """Convolution and causal attention, then feed-forward, each added to its input."""

    def __init__(self, config: LanguageModelConfig, at: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.conv = ShortConv(config.dim, config.conv_size)
        self.attention = attention_layer(config, at, causal=True)
        self.feed_forward_norm = nn.LayerNorm(config.dim)
        self.feed_forward = feed_forward(config.dim, config.hidden_dim)

    def initial_state(self, batch: int) -> BlockState:
        """Zeros."""
        return BlockState(self.conv.initial_state(batch), self.attention.initial_state(batch))

    def forward(self, h: Tensor, state: BlockState | None) -> tuple[Tensor, BlockState]:
        """(B, T, dim) and the state after the last token."""
        conv, attention = (None, None) if state is None else state
        local, conv = self.conv(self.attention_norm(h), conv)
        seen, attention = self.attention(local, state=attention)
        h = h + seen
        return h + self.feed_forward(self.feed_forward_norm(h)), BlockState(conv, attention)


class LanguageModel(ReferenceModel):
    """Next-byte logits; tokens are bytes."""

    name = "language_model"
    Config = LanguageModelConfig

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        # Tied to the logits: unit rows would start the loss far above the uniform guess.
        nn.init.normal_(self.embedding.weight, std=config.dim**-0.5)
        self.blocks = nn.ModuleList(LanguageModelBlock(config, at) for at in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        substitute(self, config.kernel_feed_forward)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, 256) of the byte after each of ``tokens``, (B, T) int64."""
        return self._run(tokens, (None,) * len(self.blocks))[0]

    def initial_state(self, batch: int) -> State:
        """Zeros: the state before the first token."""
        return tuple(block.initial_state(batch) for block in self.blocks)  # type: ignore[operator]

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Logits of further tokens, any number of them, and the state to go on from."""
        return self._run(tokens, state)

    def _run(self, tokens: Tensor, states: tuple[BlockState | None, ...]) -> tuple[Tensor, State]:
        h = self.embedding(tokens)
        present = []
        for block, state in zip(self.blocks, states, strict=True):
            h, state = block(h, state)
            present.append(state)
        return F.linear(self.norm(h), self.embedding.weight), tuple(present)

    @torch.inference_mode()
    def generate(self, prompt: Tensor, n: int) -> Tensor:
        """Greedy decoding of ``n`` bytes, (B, n), after a prompt (B, T), T >= 1."""
        tokens, state, produced = prompt, self.initial_state(prompt.shape[0]), []
        for _ in range(n):
            logits, state = self.step(tokens, state)
            tokens = logits[:, -1:].argmax(-1)
            produced.append(tokens)
        return torch.cat([prompt[:, :0], *produced], dim=1)

    def example_inputs(self, batch: int, length: int, seed: int) -> tuple[Tensor, ...]:
        """Random bytes, (batch, length)."""
        generator = torch.Generator().manual_seed(seed)
        return (torch.randint(VOCABULARY, (batch, length), generator=generator),)

    def dynamic_shapes(self) -> DynamicShapes:
        """Batch and length."""
        return ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)

    def integer_ranges(self) -> dict[int, tuple[int, int]]:
        """Tokens are bytes."""
        return {0: (0, VOCABULARY)}
