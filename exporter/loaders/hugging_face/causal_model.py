"""A causal model of transformers as its library runs it: the original.

    input_ids (B, T), attention_mask (B, T) -> logits (B, T, vocabulary)

or another output of the model's head, see ``heads``. Positions count the tokens that are not
padding, as ``generate`` does:

    position_t = max(0, sum_{s <= t} mask_s - 1)
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from linexport import patches
from linexport.errors import UnsupportedModelError
from linexport.loaders.hugging_face.heads import CAUSAL, Head
from linexport.patches import rotary

CACHE = re.compile(r"\bCache\b")
"""The library's class for states, in the annotation of such a parameter."""

CACHE_NAMES = ("past_key_values", "cache_params")
"""Names of the parameter for the cache."""


@contextmanager
def last_hidden_states(model: Any, collect: bool = True) -> Iterator[list[Tensor]]:
    """Collect what the decoder of a model gives to its head, call by call: (B, T, width) each."""
    found: list[Tensor] = []
    if not collect:
        yield found
        return
    handle = model.get_decoder().register_forward_hook(lambda *call: found.append(call[-1][0]))
    try:
        yield found
    finally:
        handle.remove()


class CausalModel(nn.Module):
    """A model of transformers with what is to be known of its call."""

    def __init__(self, model: Any, head: Head = CAUSAL) -> None:
        super().__init__()
        self.model, self.head = model, head
        taken = inspect.signature(model.forward).parameters
        # Models with a tower pass the cache on, and may call it otherwise.
        inner = inspect.signature(model.get_decoder().forward).parameters
        self._takes_positions = "position_ids" in taken
        # Not a cache of the model's own class, which only its own code knows how to fill.
        self.cache_name = next(
            (n for n in CACHE_NAMES if n in taken and (_is_cache(taken, n) or _is_cache(inner, n))),
            None,
        )

    def positions(self, mask: Tensor, length: int, before: Tensor | int = 0) -> dict[str, Tensor]:
        """Return the positions of the last ``length`` tokens, where the model takes them.

        ``before``, (B, 1), counts tokens that the mask does not have.
        """
        if not self._takes_positions:
            return {}
        positions = (mask.cumsum(-1) - 1 + before).clamp(min=0)
        return {"position_ids": positions[:, positions.shape[1] - length :]}


def _is_cache(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    return name in parameters and CACHE.search(str(parameters[name].annotation)) is not None


class OriginalCausalModel(CausalModel):
    """The model as its library runs it, in plain PyTorch."""

    def _apply(self, fn: Any, recurse: bool = True) -> OriginalCausalModel:
        moved = super()._apply(fn, recurse)
        if self.model.dtype == torch.float64:  # which faster forms of experts refuse
            self.model.set_experts_implementation("eager")
        return moved

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The output of the head: logits, say."""
        input_ids = self.head.padded(self.model, input_ids, attention_mask)
        if self.ignores_padding:
            return self._without_padding(input_ids, attention_mask)
        return self._whole(input_ids, attention_mask)

    @property
    def ignores_padding(self) -> bool:
        """True if the library's code does not know which tokens are padding."""
        return patches.ignore_padding(patches.modeling_files(self.model))

    def of_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """The output of the head for what the decoder gives to it."""
        result: Tensor = self.model.get_output_embeddings()(hidden_states)
        return result

    def _whole(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.called({"input_ids": input_ids}, attention_mask)

    def called(self, given: Mapping[str, Tensor], attention_mask: Tensor) -> Tensor:
        """Return the output of the head.

        Args:
            given: token ids or embeddings, by the library's name.
            attention_mask: of these tokens.
        """
        rotary.reset(self.model)
        with patches.original(patches.modeling_files(self.model)):
            output = self.model(
                **given,
                attention_mask=attention_mask,
                use_cache=False,
                **self.positions(attention_mask, attention_mask.shape[1]),
            )
        return self.head.result(output, attention_mask)

    def _without_padding(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Outputs of rows that are run one by one where any has padding; 0 for what is padding."""
        if bool(attention_mask.all()):
            return self._whole(input_ids, attention_mask)
        kept = attention_mask.bool()
        rows = [
            self._whole(row[real][None], mask[real][None])[0]
            for row, mask, real in zip(input_ids, attention_mask, kept, strict=True)
        ]
        if not self.head.by_token:
            return torch.stack(rows)
        logits = rows[0].new_zeros(*input_ids.shape, rows[0].shape[-1])
        logits[kept] = torch.cat(rows)
        return logits

    def initial_state(self, batch: int) -> dict[str, Any]:
        """Return the state that ``step`` begins with: the library's own cache, for any batch.

        Raises:
            UnsupportedModelError: the library has none for this model.
        """
        if self.cache_name is None:
            raise UnsupportedModelError("its library has no cache for it to go on from")
        return {self.cache_name: DynamicCache(config=self.model.config)}

    def step(self, input_ids: Tensor, attention_mask: Tensor, state: dict[str, Any]) -> Tensor:
        """Outputs, with the library's own cache kept in ``state``: for timing, none is padding."""
        with patches.original(patches.modeling_files(self.model)):
            output = self.model(input_ids=input_ids, use_cache=True, **state)
        return self.head.result(output, attention_mask)
