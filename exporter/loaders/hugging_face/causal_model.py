"""A causal language model of transformers as two modules: the original, and the one to trace.

    OriginalCausalModel   input_ids (B, T), attention_mask (B, T) -> logits (B, T, vocabulary)
    Streaming  the same and the past states -> the same and the present states

The mask of the tokens before is a state like the others, so a caller only ever gives the mask of
the tokens it feeds. Positions count the tokens that are not padding, as ``generate`` does:

    position_t = max(0, sum_{s <= t} mask_s - 1)       over past and present tokens
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from linexport import patches
from linexport.errors import UnsupportedModelError
from linexport.graph.states import State
from linexport.loaders.hugging_face.cache import KEYS, VALUES, make_cache, presents
from linexport.loaders.loaded_model import DecodeModule
from linexport.patches import experts
from linexport.patches.state_cache import StateCache, using_states
from linexport.plugins.ops import causal_conv, linear_attention, stabilized_exp

MASK = "mask"
"""Name of the state that holds the mask of the tokens before."""

BATCH, SEQUENCE, PAST = "batch", "seq", "past"
"""Names of the dynamic dimensions; the last counts the tokens before."""

OPS = {
    "conv": causal_conv.OP.name,
    "state": linear_attention.OP.name,
    "max": stabilized_exp.OP.name,
    KEYS: "KeyValueCache",
    VALUES: "KeyValueCache",
    MASK: "PaddingMask",
}
"""Ops that read and write a state, by the first part of its name."""

INITIAL_VALUES = {"max": stabilized_exp.LOWEST}
"""Value of a state before the first token, where that is not 0."""

GROWING_AXES = {KEYS: 2, VALUES: 2, MASK: 1}
"""The axis along which a state grows."""

BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on how long a sequence is by the end of a call."""

CACHE = re.compile(r"\bCache\b")
"""The library's class for states, in the annotation of such a parameter."""

CACHE_NAMES = ("past_key_values", "cache_params")
"""Names of the parameter for the cache."""


def modeling_files(model: nn.Module) -> list[ModuleType]:
    """The Python modules that the classes of a model are defined in."""
    names = dict.fromkeys(type(part).__module__ for part in model.modules())
    return [sys.modules[name] for name in names if not name.startswith("torch.")]


class _CausalModel(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        taken = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in taken
        # Not a cache of the model's own class, which only its own code knows how to fill.
        self.cache_name = next(
            (n for n in CACHE_NAMES if n in taken and CACHE.search(str(taken[n].annotation))), None
        )

    def _positions(self, mask: Tensor, length: int) -> dict[str, Tensor]:
        """Return the positions of the last ``length`` tokens, where the model takes them."""
        if not self._takes_positions:
            return {}
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return {"position_ids": positions[:, positions.shape[1] - length :]}


class OriginalCausalModel(_CausalModel):
    """The model as its library runs it, in plain PyTorch."""

    def _apply(self, fn: Any, recurse: bool = True) -> OriginalCausalModel:
        moved = super()._apply(fn, recurse)
        if self.model.dtype == torch.float64:  # which faster forms of experts refuse
            self.model.set_experts_implementation("eager")
        return moved

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits."""
        if patches.ignore_padding(modeling_files(self.model)):
            return self._without_padding(input_ids, attention_mask)
        return self._whole(input_ids, attention_mask)

    def _whole(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        with patches.original(modeling_files(self.model)):
            logits: Tensor = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                use_cache=False,
                **self._positions(attention_mask, input_ids.shape[1]),
            ).logits
        return logits

    def _without_padding(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits of rows that are run one by one where any has padding; 0 for what is padding."""
        if bool(attention_mask.all()):
            return self._whole(input_ids, attention_mask)
        kept = attention_mask.bool()
        rows = [
            self._whole(row[real][None], mask[real][None])[0]
            for row, mask, real in zip(input_ids, attention_mask, kept, strict=True)
        ]
        logits = rows[0].new_zeros(*input_ids.shape, rows[0].shape[-1])
        logits[kept] = torch.cat(rows)
        return logits

    def initial_state(self, batch: int) -> dict[str, Any]:
        """Return the state that ``step`` begins with: no cache yet, for any batch."""
        return {}

    def step(self, input_ids: Tensor, attention_mask: Tensor, state: dict[str, Any]) -> Tensor:
        """Logits, with the library's own cache kept in ``state``: for timing, none is padding."""
        with patches.original(modeling_files(self.model)):
            output = self.model(input_ids=input_ids, use_cache=True, **state)
        assert self.cache_name is not None  # models without one have no step
        state[self.cache_name] = output[self.cache_name]
        logits: Tensor = output.logits
        return logits


class Streaming(_CausalModel):
    """The model with its states as inputs and outputs; to be called within ``patched``."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits, and the present states by the names of the past ones.

        At the beginning of a sequence ``past`` may be empty.
        """
        state_cache = StateCache(past, attention_mask.bool())
        mask = torch.cat([past[MASK], attention_mask], -1) if MASK in past else attention_mask
        cache = make_cache(self.model.config, state_cache)
        with using_states(state_cache):
            logits = self.model(
                input_ids=input_ids,
                attention_mask=mask,
                use_cache=False,  # that is, none but the one given
                **({self.cache_name: cache} if self.cache_name else {}),
                **self._positions(mask, input_ids.shape[1]),
            ).logits
        found = presents(cache, state_cache)
        if any(name.startswith(KEYS) for name in found):
            found = {MASK: mask, **found}
        return logits, found

    @contextmanager
    def patched(self) -> Iterator[None]:
        """The library's functions swapped for linexport's; restored afterwards."""
        with patches.applied(modeling_files(self.model)), experts.applied(self.model):
            yield


def decode_module(model: Any) -> DecodeModule:
    """Build the module to trace for a model, with examples in the middle of two sequences.

    Raises:
        UnsupportedModelError: a layer of linear attention is computed by something that no patch
            stands in for, a library function has other parameters than its patch expects, or the
            rotary embedding is one of ``BY_LENGTH``.
    """
    for part in model.modules():
        if getattr(part, "rope_type", None) in BY_LENGTH:
            raise UnsupportedModelError(
                f"The rotary embedding of {type(model).__name__} is of rope_type "
                f"{part.rope_type!r}: its frequencies change with the length, so that states kept "
                "of a shorter sequence are not those of a longer one. Set rope_type to one that "
                "is the same at every length, such as yarn or linear, if the model allows it."
            )
    module = Streaming(model).eval()
    past_length, length, batch = 3, 5, 2
    with torch.no_grad(), module.patched():
        ids = torch.zeros(batch, past_length, dtype=torch.int64)
        _, past = module(ids, torch.ones_like(ids), {})
    if not any(name.startswith(("conv_", "state_")) for name in past):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no layer of linear attention, state space or short "
            "convolution whose state linexport knows: it has nothing to make faster. Use a plain "
            "exporter."
        )
    states = tuple(_state(name, value) for name, value in past.items())
    ids = torch.zeros(batch, length, dtype=torch.int64)
    batch_dim, sequence, before = Dim(BATCH), Dim(SEQUENCE), Dim(PAST, min=0)
    tokens = {0: batch_dim, 1: sequence}
    return DecodeModule(
        module=module,
        args=(ids, torch.ones_like(ids), {k: v.clone() for k, v in past.items()}),
        dynamic_shapes=(
            tokens,
            tokens,
            {
                name: {0: batch_dim} | ({state.growing_axis: before} if state.growing_axis else {})
                for name, state in zip(past, states, strict=True)
            },
        ),
        outputs=("logits", *(state.present for state in states)),
        states=states,
        patched=module.patched,
    )


def _state(name: str, value: Tensor) -> State:
    kind = name.split("_")[0]
    shape: list[int | str | None] = [BATCH, *value.shape[1:]]
    growing_axis = GROWING_AXES.get(kind)
    if growing_axis is not None:
        shape[growing_axis] = PAST
    dtype = str(value.dtype).removeprefix("torch.")
    return State(
        f"past_{name}",
        f"present_{name}",
        dtype,
        tuple(shape),
        OPS[kind],
        growing_axis,
        INITIAL_VALUES.get(kind, 0.0),
    )
