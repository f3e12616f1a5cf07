"""Parts common to all layouts: settings, the stack of blocks, embedding and head.

h = E[token];   h = block(h) for each layer;   logits = norm(h) W^T
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from linexport.errors import UnsupportedModelError
from linexport.models.config import parse
from linexport.models.functional import linear_attention

BOUNDS = "lower bounds"
"""Name of the lower bounds of gates (layers, width) among the values that layers share."""


@dataclass(frozen=True, kw_only=True)
class LayoutSettings:
    """LayoutSettings common to every configuration; defaults are the library's."""

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    intermediate_size: int | None = None
    hidden_ratio: float | None = 4
    fuse_norm: bool = True


@dataclass(frozen=True)
class Context:
    """Values shared by all layers of one run.

    Attributes:
        keep: (B, T) bool, False for a padded token.
        shared: values that one layer leaves for later ones.
    """

    keep: Tensor
    shared: dict[str, Tensor] = field(default_factory=dict)

    def zero_padding(self, x: Tensor) -> Tensor:
        """x (B, T, C) with zeros for padded tokens."""
        return torch.where(self.keep[:, :, None], x, 0.0)

    def positions(self) -> Tensor:
        """(B, T, 1), from 0: linear attention of ones counts, and its state holds the count."""
        if "positions" not in self.shared:
            one = torch.ones_like(self.keep[:, :, None], dtype=torch.float32)
            count, _, _ = linear_attention(
                one, one, one, key_mask=self.keep, q_num_heads=1, kv_num_heads=1
            )
            self.shared["positions"] = count - 1
        return self.shared["positions"]


@dataclass(frozen=True)
class WeightLayout:
    """One model type.

    Attributes:
        model_type: as configurations name it.
        causal: the library's class of its causal language models.
        settings: the dataclass of its settings; keys it does not name change nothing here.
        block: makes a layer from settings and its index.
        norm: makes the last normalisation.
        only: values that are implemented, of settings with others.
        bounds: gives the width of the lower bounds of gates that the model has for each layer;
            None where it has none.
        stack: what weights call embeddings and layers together.
        last_norm: what they call the last normalisation.
    """

    model_type: str
    causal: str
    settings: type[LayoutSettings]
    block: Callable[[Any, int], nn.Module]
    norm: Callable[[Any], nn.Module]
    only: Mapping[str, tuple[object, ...]]
    bounds: Callable[[Any], int | None] = lambda settings: None
    stack: str = "model"
    last_norm: str = "norm"

    def read(self, config: Mapping[str, object]) -> LayoutSettings:
        """The settings of a configuration.

        Raises:
            UsageError: one is of the wrong type.
            UnsupportedModelError: one has a value that is not implemented.
        """
        for name, known in {**_EVERYWHERE, **self.only}.items():
            if name in config and config[name] not in known:
                raise UnsupportedModelError(
                    f"{self.model_type} with {name} = {config[name]!r} is not implemented; "
                    f"expected {' or '.join(map(repr, known))}."
                )
        names = {f.name for f in fields(self.settings)}
        given = {name: value for name, value in config.items() if name in names}
        return parse(self.settings, given, self.model_type)


_EVERYWHERE: dict[str, tuple[Any, ...]] = {"attn": (None,), "attnres_block_size": (None,)}
"""Softmax attention in some layers, and attention over the residuals, are not."""


class _Stack(nn.Module):
    def __init__(self, layout: WeightLayout, settings: LayoutSettings) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(settings.vocab_size, settings.hidden_size)
        width = layout.bounds(settings)
        if width is not None:
            self.lower_bounds = nn.Parameter(torch.zeros(settings.num_hidden_layers, width))
        self.layers = nn.ModuleList(
            layout.block(settings, index) for index in range(settings.num_hidden_layers)
        )
        self.last_norm = layout.last_norm
        self.add_module(layout.last_norm, layout.norm(settings))

    def forward(self, input_ids: Tensor, keep: Tensor) -> Tensor:
        """(B, T, hidden)."""
        h, context = self.embeddings(input_ids), Context(keep)
        if hasattr(self, "lower_bounds"):
            shares = self.lower_bounds.softmax(0)
            context.shared[BOUNDS] = shares.cumsum(0) - shares[0]
        for layer in self.layers:
            h = layer(h, context)
        out: Tensor = getattr(self, self.last_norm)(h)
        return out


class CausalLM(nn.Module):
    """A language model of one layout.

    Args:
        layout: of its model type.
        config: the content of config.json.

    Raises:
        UsageError, UnsupportedModelError: see ``WeightLayout.read``.
    """

    def __init__(self, layout: WeightLayout, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.settings, self.stack = layout.read(config), layout.stack
        stack = _Stack(layout, self.settings)
        self.add_module(layout.stack, stack)
        self.lm_head = nn.Linear(self.settings.hidden_size, self.settings.vocab_size, bias=False)
        if self.settings.tie_word_embeddings:
            self.lm_head.weight = stack.embeddings.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits of the token after each."""
        logits: Tensor = self.lm_head(getattr(self, self.stack)(input_ids, attention_mask != 0))
        return logits
