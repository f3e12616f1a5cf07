"""A causal model of transformers as its library runs it: the original.

    input_ids (B, T), attention_mask (B, T) -> logits (B, T, vocabulary)

or another output of the model's head, see ``heads``. Positions count the tokens that are not
padding, as ``generate`` does:

    position_t = max(0, sum_{s <= t} mask_s - 1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from linexport import patches
from linexport.errors import UnsupportedModelError
from linexport.patches import parameters, rotary
from linexport.sources.hugging_face.heads import CAUSAL, Head
from linexport.system.torch_internals.modules import Change, ConvertibleModule
from linexport.system.untyped import LibraryObject
from linexport.system.versions import TRANSFORMERS


def _usual(
    input_ids: object,
    attention_mask: object,
    position_ids: object,
    cache: object,
    inputs_embeds: object,
    use_cache: object,
) -> None:
    """Have the parameters that causal models have, in their order."""


DEFAULT_PARAMETERS = parameters.signature(_usual)


@contextmanager
def last_hidden_states(model: LibraryObject, collect: bool = True) -> Iterator[list[Tensor]]:
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

    def __init__(self, model: LibraryObject, head: Head = CAUSAL) -> None:
        super().__init__()
        self.model, self.head = model, head
        if isinstance(head.pool, nn.Module):
            self.modules_behind = head.pool  # its weights are those of this module
        taken, inner = (
            parameters.signature(f) for f in (model.forward, model.get_decoder().forward)
        )
        named = parameters.match(taken, DEFAULT_PARAMETERS)
        inside = parameters.match(inner, DEFAULT_PARAMETERS)
        # A model with a tower passes on what it does not name, and may annotate it otherwise.
        self.named = {**(inside if parameters.takes_any(taken) else {}), **named}
        self._takes_positions = "position_ids" in named
        # Not a cache of the model's own class, which only its own code knows how to fill.
        self.has_cache = "cache" in self.named and (
            parameters.is_cache(taken, named.get("cache"))
            or parameters.is_cache(inner, inside.get("cache"))
        )
        # Without a cache all states are those of patches, which leave out padding by themselves.
        needed = {"input_ids", "attention_mask"} if self.has_cache else {"input_ids"}
        unread = needed - self.named.keys()
        if unread:
            raise UnsupportedModelError(
                f"{type(model).__name__}.forward has no parameter that linexport knows as "
                f"{' and '.join(sorted(unread))}: its parameters are "
                f"({', '.join(taken.parameters)}). {TRANSFORMERS.advice()}"
            )

    def run(self, **given: Any) -> Any:
        """Return the library's output for arguments by linexport's names."""
        return self.model(**{self.named.get(name, name): value for name, value in given.items()})

    def positions(self, mask: Tensor, length: int, before: Tensor | int = 0) -> dict[str, Tensor]:
        """Return the positions of the last ``length`` tokens, where the model takes them.

        ``before``, (B, 1), counts tokens that the mask does not have.
        """
        if not self._takes_positions:
            return {}
        positions = (mask.cumsum(-1) - 1 + before).clamp(min=0)
        return {"position_ids": positions[:, positions.shape[1] - length :]}


class OriginalCausalModel(ConvertibleModule, CausalModel):
    """The model as its library runs it, in plain PyTorch."""

    def converted(self, change: Change, plain: Callable[[], object]) -> None:
        """Convert it; in float64 without faster forms of experts, which refuse that."""
        plain()
        if self.model.dtype == torch.float64:
            self.model.set_experts_implementation("eager")

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, pooling_mask: Tensor | None = None
    ) -> Tensor:
        """The output of the head: logits, say."""
        input_ids = self.head.padded(self.model, input_ids, attention_mask)
        return self.called({"input_ids": input_ids}, attention_mask, pooling_mask)

    def of_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """The output of the head for what the decoder gives to it."""
        result: Tensor = self.model.get_output_embeddings()(hidden_states)
        return result

    def called(
        self,
        given: Mapping[str, Tensor],
        attention_mask: Tensor,
        pooling_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the output of the head.

        Args:
            given: token ids or embeddings, by the library's name.
            attention_mask: of these tokens.
            pooling_mask: see ``Head.result``.
        """
        rotary.reset(self.model)
        with patches.original(patches.modeling_files(self.model)):
            output = self.run(
                **given,
                attention_mask=attention_mask,
                use_cache=False,
                **self.positions(attention_mask, attention_mask.shape[1]),
            )
        return self.head.result(output, attention_mask, pooling_mask)

    def initial_state(self, batch: int) -> dict[str, Any]:
        """Return the state that ``step`` begins with: the library's own cache, for any batch.

        Raises:
            UnsupportedModelError: the library has none for this model.
        """
        if not self.has_cache:
            raise UnsupportedModelError("its library has no cache for it to go on from")
        return {"cache": DynamicCache(config=self.model.config)}

    def step(self, input_ids: Tensor, attention_mask: Tensor, state: dict[str, object]) -> Tensor:
        """Outputs, with the library's own cache kept in ``state``: for timing, none is padding."""
        with patches.original(patches.modeling_files(self.model)):
            output = self.run(input_ids=input_ids, use_cache=True, **state)
        return self.head.result(output, attention_mask)
