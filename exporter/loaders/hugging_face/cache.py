"""The cache object of transformers, filled with states that are inputs of a graph.

    key_<layer>, value_<layer>   (B, H, past, d)   attention; they grow by one row a token
    conv_<layer>, state_<layer>                    linear attention, see ``patches.state_cache``

Attention layers keep the library's own class. Of layers with recurrent states only the bookkeeping
is replaced: it tells the patched functions which layer is at work, and they do the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
)

from linexport.patches.state_cache import StateCache

KEYS, VALUES = "key", "value"


def make_cache(config: Any, state_cache: StateCache) -> DynamicCache:
    """A cache for one run of a model, holding the past of ``state_cache``."""
    made = DynamicCache(config=config)
    for index, layer in enumerate(made.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            _tell(layer, state_cache, index)
        if isinstance(layer, CacheLayerMixin):
            _fill(layer, state_cache, index)
    return made


def presents(made: DynamicCache, state_cache: StateCache) -> dict[str, Tensor]:
    """The states after a run, by name, layer after layer."""
    found = dict(state_cache.present)
    for index, layer in enumerate(made.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is not None and values is not None:
            found |= {f"{KEYS}_{index}": keys, f"{VALUES}_{index}": values}
    return dict(sorted(found.items(), key=lambda item: _place(item[0])))


def _place(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split("_")[1:])


def _fill(layer: Any, state_cache: StateCache, index: int) -> None:
    if layer.is_sliding:
        # The window is a matter of the mask: rows are kept, so that one past length fits all.
        for method in ("update", "get_mask_sizes", "get_seq_length"):
            setattr(layer, method, functools.partial(getattr(DynamicLayer, method), layer))
    keys = state_cache.past.get(f"{KEYS}_{index}")
    if keys is not None:
        layer.keys, layer.values = keys, state_cache.past[f"{VALUES}_{index}"]
        layer.dtype, layer.device = keys.dtype, keys.device
        layer.is_initialized = True


def _tell(layer: Any, state_cache: StateCache, index: int) -> None:
    """Let ``layer`` tell of states to ``state_cache`` instead of keeping them."""

    def name(state_idx: int) -> str:
        return f"{index}_{state_idx}" if layer.number_of_states > 1 else f"{index}"

    def update_conv_state(conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        state_cache.begin_convolution(name(state_idx))
        return conv_states

    def update_recurrent_state(
        recurrent_states: Tensor | None, state_idx: int = 0, **kwargs: Any
    ) -> Tensor | None:
        state_cache.end_attention(name(state_idx))
        return recurrent_states

    replaced: tuple[Callable[..., Any], ...] = (update_conv_state, update_recurrent_state)
    for function in replaced:
        setattr(layer, function.__name__, function)
