"""The cache object of transformers, filled with states that are inputs of a graph.

    key_<layer>, value_<layer>   (B, H, past, d)    attention; they grow by one row a token
                                 (B, H, W - 1, d)   with a sliding window of W tokens: the last rows
    index_<layer>                (B, past, d)       keys of an indexer, which chooses tokens by them
    conv_<layer>, state_<layer>                     linear attention, see ``patches.state_cache``

Attention layers keep the library's own class. A window that is not full yet begins with rows of
zeros, as if they were padding: its size is the same at every token. Of layers with recurrent states
only the bookkeeping is replaced: it tells the patched functions which layer is at work, and they do
the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from linexport.errors import UnsupportedModelError
from linexport.patches.state_cache import StateCache
from linexport.system.untyped import LibraryObject
from linexport.system.versions import TRANSFORMERS

KEYS, VALUES, INDEX = "key", "value", "index"

KINDS = (
    "DummyLayer",
    "DynamicIndexedLayer",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionLayer",
)
"""The library's classes for what a layer keeps; a class made of one of them keeps more."""


def make_cache(config: LibraryObject, state_cache: StateCache) -> DynamicCache:
    """A cache for one run of a model, holding the past of ``state_cache``."""
    made = DynamicCache(config=config)
    made.layers = _of_all_passes(config)
    for index, layer in enumerate(made.layers):
        if is_linear(layer):
            _tell(layer, state_cache, index)
        if _is_attention(layer):
            _fill(layer, state_cache, index)
    return made


def is_linear(layer: object) -> bool:
    """Return whether a layer of a cache keeps recurrent states or inputs of a convolution."""
    return hasattr(layer, "update_recurrent_state")


def _is_attention(layer: object) -> bool:
    """Return whether a layer of a cache keeps keys and values; a dummy does not."""
    return hasattr(layer, "get_mask_sizes") and hasattr(layer, "lazy_initialization")


def windows(config: object) -> dict[int, int | None]:
    """Return the rows that each layer of attention keeps; None: all rows.

    Raises:
        UnsupportedModelError: a layer keeps something else, too.
    """
    layers = _of_all_passes(config)
    for index, layer in enumerate(layers):
        if type(layer).__name__ not in KINDS:
            raise _unknown_kind(config, index, layer)
    found = {
        index: getattr(layer, "sliding_window", None)
        for index, layer in enumerate(layers)
        if _is_attention(layer)
    }
    return {index: None if window is None else window - 1 for index, window in found.items()}


def _of_all_passes(config: LibraryObject) -> list[Any]:
    """Return the layers of a new cache, those that a model runs several times once for each pass.

    The library adds copies of them at the first call, behind the others, one pass after another.
    """
    layers, text = DynamicCache(config=config).layers, config.get_text_config(decoder=True)
    for _ in range(1, getattr(text, "loop_num_passes", 1)):
        again = slice(text.loop_layer_index_start, text.loop_layer_index_end)
        layers = [*layers, *DynamicCache(config=config).layers[again]]
    return list(layers)


def _unknown_kind(
    config: LibraryObject, index: int, layer: torch.nn.Module
) -> UnsupportedModelError:
    types = config.get_text_config(decoder=True).layer_types
    kind = types[index % len(types)]
    return UnsupportedModelError(
        f"Layer {index} of {config.model_type} is of type {kind!r}, whose states transformers "
        f"keeps in {type(layer).__name__}. linexport knows those of full_attention, "
        "sliding_attention, indexed_attention, linear_attention, conv and hybrid layers. "
        f"{TRANSFORMERS.advice()}"
    )


def tell_positions(made: LibraryObject, positions: Tensor) -> None:
    """Tell a cache the positions of the tokens before, (B, past), where indexers read them."""
    axes = positions.expand(3, -1, -1)
    made.position_ids = axes  # transformers 5.18
    for layer in made.layers:
        if hasattr(layer, "indexer_position_ids"):
            layer.indexer_position_ids = axes


def presents(made: DynamicCache, state_cache: StateCache) -> dict[str, Tensor]:
    """The states after a run, by name, layer after layer."""
    found = dict(state_cache.present)
    for index, layer in enumerate(made.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is not None and values is not None:
            found |= {f"{KEYS}_{index}": keys}
            found |= {f"{VALUES}_{index}": values} if values.shape[-1] else {}
        chosen_by = getattr(layer, "indexer_keys", None)
        found |= {} if chosen_by is None else {f"{INDEX}_{index}": chosen_by}
    return dict(sorted(found.items(), key=lambda item: _place(item[0])))


def _place(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split("_")[1:])


def _fill(layer: LibraryObject, state_cache: StateCache, index: int) -> None:
    keys = state_cache.past.get(f"{KEYS}_{index}")
    if keys is not None:
        # Latents without a part that turns have values of width 0, which are not kept.
        values = state_cache.past.get(f"{VALUES}_{index}", keys[..., :0])
        layer.keys, layer.values = keys, values
        layer.dtype, layer.device = keys.dtype, keys.device
        layer.is_initialized = True
    chosen_by = state_cache.past.get(f"{INDEX}_{index}")
    if chosen_by is not None:
        layer.indexer_keys, layer.is_indexer_initialized = chosen_by, True
    if layer.is_sliding:
        _slide(layer)


def _slide(layer: LibraryObject) -> None:
    """Let ``layer`` keep the rows of its window, always as many."""
    kept = layer.sliding_window - 1

    def joined(past: Tensor | None, new: Tensor) -> Tensor:
        if past is None:
            past = new.new_zeros(*new.shape[:2], kept, new.shape[3])
        return torch.cat([past, new], 2)

    def update(
        key: Tensor, value: Tensor, *args: Any, **kwargs: LibraryObject
    ) -> tuple[Tensor, Tensor]:
        all_keys, all_values = joined(layer.keys, key), joined(layer.values, value)
        layer.keys = all_keys.narrow(2, key.shape[2], kept)
        layer.values = all_values.narrow(2, key.shape[2], kept)
        return all_keys, all_values

    layer.update = update
    layer.get_seq_length = lambda: kept
    layer.get_mask_sizes = lambda query_length: (kept + query_length, 0)


def _tell(layer: LibraryObject, state_cache: StateCache, index: int) -> None:
    """Let ``layer`` tell of states to ``state_cache`` instead of keeping them."""

    def name(state_idx: int) -> str:
        return f"{index}_{state_idx}" if layer.number_of_states > 1 else f"{index}"

    def update_conv_state(conv_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        state_cache.begin_convolution(name(state_idx))
        return conv_states

    def update_recurrent_state(
        recurrent_states: Tensor | None, state_idx: int = 0, **kwargs: object
    ) -> Tensor | None:
        state_cache.end_attention(name(state_idx))
        return recurrent_states

    replaced: tuple[Callable[..., object], ...] = (update_conv_state, update_recurrent_state)
    for function in replaced:
        setattr(layer, function.__name__, function)
