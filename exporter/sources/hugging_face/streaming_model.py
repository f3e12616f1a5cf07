"""A causal model of transformers as the module to trace, with states as inputs and outputs.

    Streaming       input_ids (B, T), attention_mask (B, T), past states -> output, present states
    WholeSequence   the same without states, for heads with one output for a sequence
    WithEmbeddings, WithGrid    the same with embeddings of images in the place of tokens' own

The output is that of the model's head, see ``heads``. The mask of the tokens before is a state
like the others, so a caller only ever gives the mask of the tokens it feeds. Positions count past
and present tokens, see ``causal_model``.

Where all attention has a sliding window, the mask is that of the longest window, and the sum over
the tokens before is a second state: no state grows. The same state is the next position where
images have positions of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from linexport import patches
from linexport.errors import UnsupportedModelError
from linexport.graph.dims import PAST
from linexport.graph.states import PADDING, State
from linexport.manifest.records import INDEXER, KEY_VALUES
from linexport.patches import experts, rotary, text_positions
from linexport.patches.packages import as_ops
from linexport.patches.state_cache import StateCache, UnknownCodeError, using_states
from linexport.plugins.ops import causal_conv, linear_attention, stabilized_exp
from linexport.sources.hugging_face.cache import (
    INDEX,
    KEYS,
    VALUES,
    make_cache,
    presents,
    tell_positions,
    windows,
)
from linexport.sources.hugging_face.causal_model import CausalModel, last_hidden_states
from linexport.sources.hugging_face.heads import CAUSAL, HIDDEN, Head
from linexport.sources.hugging_face.pretrained import supported
from linexport.sources.hugging_face.vision.positions import (
    absent,
    advances,
    embeddings,
    grid_positions,
)
from linexport.sources.loaded_model import DecodeModule, VisionTower
from linexport.system.untyped import LibraryObject
from linexport.system.versions import TRANSFORMERS

MASK = "mask"
"""Name of the state that holds the mask of the tokens before."""

COUNT = "count"
"""Name of the state that counts the tokens before, where no mask of all of them says how many."""

BATCH, SEQUENCE = "batch", "seq"
"""Names of the dynamic dimensions of the inputs."""

OPS = {
    "conv": causal_conv.OP.name,
    "state": linear_attention.OP.name,
    "max": stabilized_exp.OP.name,
    "window": "Window",
    KEYS: KEY_VALUES,
    VALUES: KEY_VALUES,
    INDEX: INDEXER,
    MASK: PADDING,
    COUNT: "TokenCount",
}
"""Ops that read and write a state, by the first part of its name."""

INITIAL_VALUES = {"max": stabilized_exp.LOWEST}
"""Value of a state before the first token, where that is not 0."""

ROWS, BEFORE, NOW, CHUNKS = 2, 3, 5, 128
"""Sizes of example inputs: sequences, tokens before and of the call, and those of two chunks."""

SOFTMAX = (
    *("full_attention", "sliding_attention", "chunked_attention", "indexed_attention"),
    *("dense", "mlp", "moe"),
)
"""Types of layers in a configuration that keep keys and values, or nothing."""

GROWING_AXES = {KEYS: 2, VALUES: 2, INDEX: 1, MASK: 1}
"""The axis along which a state grows, unless it keeps a window."""

Outputs = Tensor | tuple[Tensor, Tensor]
"""The output of the head, and with it the last hidden states where they are requested."""


class Streaming(CausalModel):
    """The model with its states as inputs and outputs; to be called within ``patched``."""

    def __init__(self, model: LibraryObject, head: Head = CAUSAL, hidden: bool = False) -> None:
        super().__init__(model, head)
        self.gives_hidden = hidden
        self.unknown: set[str] = set()
        self.windows = windows(model.config) if self.has_cache else {}
        kept = [rows for rows in self.windows.values() if rows is not None]
        self._longest = max(kept) if kept and len(kept) == len(self.windows) else None
        """Tokens whose mask is kept; None: those of the whole sequence."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past: Mapping[str, Tensor]
    ) -> tuple[Outputs, dict[str, Tensor]]:
        """The outputs, and the present states by the names of the past ones.

        At the beginning of a sequence ``past`` may be empty.
        """
        return self.advance(self.tokens(input_ids, attention_mask), attention_mask, past)

    def tokens(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Return token ids as ``advance`` takes them."""
        return {"input_ids": self.head.padded(self.model, input_ids, attention_mask)}

    def advance(
        self,
        given: Mapping[str, Tensor],
        attention_mask: Tensor,
        past: Mapping[str, Tensor],
        offsets: Tensor | None = None,
        pooling_mask: Tensor | None = None,
    ) -> tuple[Outputs, dict[str, Tensor]]:
        """Return the outputs and the present states for tokens as the library takes them.

        Args:
            given: token ids or embeddings, by the library's name.
            attention_mask: of these tokens.
            past: states.
            offsets: of the tokens' positions, see ``vision.positions``; None: one after another.
            pooling_mask: see ``Head.result``.
        """
        length = attention_mask.shape[1]
        state_cache = StateCache(past, attention_mask.bool())
        mask = torch.cat([past[MASK], attention_mask], -1) if MASK in past else attention_mask
        counted = self._longest is not None or offsets is not None
        before = (
            past[COUNT] if COUNT in past else attention_mask.new_zeros(attention_mask.shape[0], 1)
        )
        steps = attention_mask
        if offsets is not None:
            steps = advances(attention_mask, offsets)
            positions = {"position_ids": grid_positions(steps, offsets, before)}
        elif counted:
            positions = self.positions(attention_mask, length, before)
        else:
            positions = self.positions(mask, length)
        cache = make_cache(self.model.config, state_cache)
        if MASK in past and not counted:
            before_these = self.positions(past[MASK], past[MASK].shape[1])
            tell_positions(cache, before_these.get("position_ids", past[MASK]))
        with using_states(state_cache), last_hidden_states(self.model, self.gives_hidden) as hidden:
            output = self.run(
                **given,
                attention_mask=mask,
                use_cache=False,  # that is, none but the one given
                **({"cache": cache} if self.has_cache else {}),
                **positions,
            )
        found = presents(cache, state_cache)
        if counted:
            found = {COUNT: before + steps.sum(-1, keepdim=True), **found}
        if self._longest is not None:
            rows = F.pad(attention_mask, (self._longest, 0)) if MASK not in past else mask
            found = {MASK: rows.narrow(1, length, self._longest), **found}
        elif any(name.startswith(KEYS) for name in found):
            found = {MASK: mask, **found}
        result = self.head.result(output, attention_mask, pooling_mask)
        return ((result, hidden[-1]) if self.gives_hidden else result), found

    def grows(self, name: str) -> bool:
        """Return whether a state of rows or of their mask keeps those of all tokens."""
        kind, _, layer = name.partition("_")
        if kind == MASK:
            return self._longest is None
        return kind in (KEYS, VALUES, INDEX) and self.windows[int(layer)] is None

    @contextmanager
    def patched(self) -> Iterator[None]:
        """The library's functions swapped for linexport's; restored afterwards."""
        with swapped(self.model) as unknown:
            yield
        self.unknown |= unknown

    @property
    def warnings(self) -> tuple[str, ...]:
        """Arguments of the library's functions that their replacements do not know."""
        return tuple(
            f"The parameter {what} is given a value, and linexport's replacement has no such "
            f"parameter: parity shows whether it matters. {TRANSFORMERS.advice()}"
            for what in sorted(self.unknown)
        )


@contextmanager
def swapped(model: LibraryObject) -> Iterator[set[str]]:
    """Swap the library's functions for linexport's; all are restored afterwards.

    Yields:
        Parameters that are given a value and that replacements do not know.
    """
    files = patches.modeling_files(model)
    with (
        patches.applied(files) as unknown,
        experts.applied(model),
        rotary.applied(model),
        as_ops(model),
    ):
        yield unknown


class WithEmbeddings(Streaming):
    """The model of a decoder behind a vision tower, see ``vision.positions`` for its inputs."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        inputs_embeds: Tensor,
        embeds_mask: Tensor,
        past: Mapping[str, Tensor],
    ) -> tuple[Outputs, dict[str, Tensor]]:
        """The outputs, and the present states."""
        given = {"inputs_embeds": embeddings(self.model, input_ids, inputs_embeds, embeds_mask)}
        return self.advance(given, attention_mask, past)


class WithGrid(Streaming):
    """The model of such a decoder whose tokens of images have row and column as positions."""

    def __init__(self, model: LibraryObject, head: Head = CAUSAL, hidden: bool = False) -> None:
        super().__init__(model, head, hidden)
        text_positions.mark(model)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        inputs_embeds: Tensor,
        embeds_mask: Tensor,
        position_offsets: Tensor,
        past: Mapping[str, Tensor],
    ) -> tuple[Outputs, dict[str, Tensor]]:
        """The outputs, and the present states."""
        given = {"inputs_embeds": embeddings(self.model, input_ids, inputs_embeds, embeds_mask)}
        return self.advance(given, attention_mask, past, position_offsets)


class WholeSequence(nn.Module):
    """The model without states, for whole sequences; to be called within ``patched``."""

    def __init__(self, streaming: Streaming) -> None:
        super().__init__()
        self.streaming = streaming

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, pooling_mask: Tensor | None = None
    ) -> Tensor:
        """The output of the head."""
        given = self.streaming.tokens(input_ids, attention_mask)
        output, _ = self.streaming.advance(given, attention_mask, {}, pooling_mask=pooling_mask)
        assert isinstance(output, Tensor)
        return output


def decode_module(
    model: object, head: Head = CAUSAL, vision: VisionTower | None = None, hidden: bool = False
) -> DecodeModule:
    """Build the module to trace for a model, with examples in the middle of two sequences.

    Args:
        model: of transformers.
        head: the part of it that gives the output. One with an output for a whole sequence is
            traced without states.
        vision: its tower, whose output it then takes.
        hidden: it also gives its last hidden states.

    Raises:
        UnknownCodeError: a layer of linear attention is computed by something that no patch stands
            in for.
        UnsupportedModelError: no such layer exists, or a library function has a parameter that
            its patch does not know.
    """
    kind = Streaming if vision is None else WithGrid if vision.grid_positions else WithEmbeddings
    module = kind(model, head, hidden).eval()
    past = example_past(module, _inputs(BEFORE, vision))
    if not any(name.startswith(("conv_", "state_", "window_")) for name in past):
        raise _stateless(module)
    if not head.by_token:
        given, shapes = whole_inputs(head, NOW)
        whole = WholeSequence(module).eval()
        return DecodeModule(
            module=whole,
            args=given,
            dynamic_shapes=shapes,
            outputs=(head.output,),
            states=(),
            patched=module.patched,
            warnings=module.warnings,
        )
    return stepwise(module, past, _inputs(NOW, vision))


def _stateless(module: Streaming) -> UnsupportedModelError:
    """Return the error of a model that gave no state of a linear layer."""
    model = module.model
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    types = {*(getattr(config, "layer_types", None) or ())} - {*SOFTMAX}
    known = config.model_type.removesuffix("_text") in supported()
    if types or known:
        what = f"layers of type {', '.join(sorted(map(repr, types)))}" if types else "linear layers"
        reason = (
            "its cache has no states of them" if module.has_cache else "its forward has no cache"
        )
        return UnknownCodeError(
            f"The states of {name} cannot be read, which may have {what}: {reason} that linexport "
            f"knows. {TRANSFORMERS.advice()}"
        )
    return UnsupportedModelError(
        f"{name} has no layer of linear attention, state space or short convolution whose state "
        "linexport knows: it has nothing to make faster. Use a plain exporter."
    )


def example_past(module: Streaming, given: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return the states after the first tokens."""
    with torch.no_grad(), module.patched():
        found: dict[str, Tensor] = module(*given, {})[1]
    return found


def stepwise(
    module: Streaming, past: Mapping[str, Tensor], given: tuple[Tensor, ...]
) -> DecodeModule:
    """Describe a module that goes on from states.

    Args:
        module: to trace.
        past: example states.
        given: example inputs.
    """
    batch_dim, sequence, before = Dim(BATCH), Dim(SEQUENCE), Dim(PAST, min=0)
    tokens = {0: batch_dim, 1: sequence}
    states = tuple(_state(name, value, module.grows(name)) for name, value in past.items())
    return DecodeModule(
        module=module,
        args=(*given, {k: v.clone() for k, v in past.items()}),
        dynamic_shapes=(
            *[tokens] * len(given),
            {
                name: {0: batch_dim} | ({state.growing_axis: before} if state.growing_axis else {})
                for name, state in zip(past, states, strict=True)
            },
        ),
        outputs=(
            module.head.output,
            *([HIDDEN] if module.gives_hidden else []),
            *(state.present for state in states),
        ),
        states=states,
        patched=module.patched,
        warnings=module.warnings,
    )


def whole_inputs(
    head: Head, length: int = CHUNKS
) -> tuple[tuple[Tensor, ...], tuple[dict[int, Any], ...]]:
    """Return examples for whole sequences, and their dynamic shapes.

    Args:
        head: that gives the output.
        length: of the sequences; as long as several chunks if not given.
    """
    tokens, (ids, mask) = {0: Dim(BATCH), 1: Dim(SEQUENCE)}, _inputs(length, None)
    given = (ids, mask) if head.takes_prompt else (ids, mask, torch.ones_like(mask))
    return given, (tokens,) * len(given)


def _inputs(length: int, vision: VisionTower | None) -> tuple[Tensor, ...]:
    """Return examples of what a caller gives, states aside."""
    ids = torch.zeros(ROWS, length, dtype=torch.int64)
    given = ids, torch.ones_like(ids)
    return given if vision is None else (*given, *absent(ids, vision))


def _state(name: str, value: Tensor, grows: bool) -> State:
    kind = name.split("_")[0]
    shape: list[int | str | None] = [BATCH, *value.shape[1:]]
    growing_axis = GROWING_AXES.get(kind) if grows else None
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
