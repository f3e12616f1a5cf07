"""Rotary embeddings of transformers whose frequencies depend on how long the sequence is.

    n = 1 + the last position of a call, of all rows

    longrope    f_i = 1 / (s_i b^(2i/d)),  s the short factors where n <= N, else the long ones
    dynamic     f_i = 1 / b'^(2i/d),  b' = b (r max(n, N) / N - (r - 1))^(d / (d - 2))

The library sets them in a buffer at every call, for ``dynamic`` behind a Python if; here they are
computed in the graph, by its own functions. Up to N tokens they are the same for all lengths. As in
the library, keys that are kept stay as they were when a sequence goes beyond N in steps, so that
it differs from the same sequence in one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from linexport.patches.library import find
from linexport.system.untyped import LibraryObject


def limit(model: nn.Module) -> int | None:
    """Return N, the tokens for which frequencies are the same; None if they are for any number."""
    found = [int(_limit(part, layer)) for part, layer in _by_length(model)]
    return min(found, default=None)


def reset(model: nn.Module) -> None:
    """Let the library forget the longest sequence that it computed frequencies for."""
    for part, layer in _by_length(model):
        prefix = _prefix(layer)
        setattr(part, f"{prefix}inv_freq", getattr(part, f"{prefix}original_inv_freq").clone())
        setattr(part, f"{prefix}max_seq_len_cached", part.original_max_seq_len)


@contextmanager
def applied(model: nn.Module) -> Iterator[None]:
    """Frequencies computed from the positions; restored afterwards."""
    with ExitStack() as restore:
        for part in {part for part, _ in _by_length(model)}:
            part.forward = _Forward(part)
            restore.callback(delattr, part, "forward")
        yield


class _Forward:
    """Cosines and sines of one rotary embedding."""

    def __init__(self, part: LibraryObject) -> None:
        self.part, self.original = part, inspect.unwrap(type(part).forward)

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        given = () if layer_type is None else (layer_type,)
        frequencies = None
        if _is_by_length(self.part, layer_type):
            frequencies = self._frequencies(position_ids.max() + 1, layer_type)
        seen = _Seen(self.part, f"{_prefix(layer_type)}inv_freq", frequencies)
        return self.original(seen, x, position_ids, *given)

    def _frequencies(self, length: Tensor, layer: str | None) -> Tensor:
        kind, config = _types(self.part)[layer], self.part.config
        compute = find("modeling_rope_utils", "ROPE_INIT_FUNCTIONS")[kind]

        def at(n: Tensor | int) -> Tensor:
            found: Tensor = compute(config, seq_len=n, layer_type=layer)[0]
            return found

        if kind != "longrope":
            return at(length)
        most = _limit(self.part, layer)
        return torch.where(length > most, at(most + 1), at(most))


class _Seen:
    """A rotary embedding with other frequencies, as its own method sees it."""

    def __init__(self, part: LibraryObject, name: str, frequencies: Tensor | None) -> None:
        self._part = part
        if frequencies is not None:
            setattr(self, name, frequencies)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


def _by_length(model: nn.Module) -> Iterator[tuple[Any, str | None]]:
    """Yield such embeddings, each with the types of layers for which it is one."""
    for part in model.modules():
        for layer in _types(part):
            if _is_by_length(part, layer):
                yield part, layer


def _types(part: LibraryObject) -> dict[str | None, str]:
    """Return the kinds of an embedding by the type of layers it is for, None where for all."""
    kinds = getattr(part, "rope_type", None)
    if kinds is None:
        return {}
    return kinds if isinstance(kinds, dict) else {None: kinds}


def _is_by_length(part: object, layer: str | None) -> bool:
    kind = _types(part).get(layer, "")
    return kind == "longrope" or "dynamic" in kind


def _limit(part: LibraryObject, layer: str | None) -> int:
    if _types(part)[layer] != "longrope":
        return int(part.original_max_seq_len)
    settings = part.config.rope_parameters
    settings = settings if layer is None else settings[layer]
    return int(settings["original_max_position_embeddings"])


def _prefix(layer: str | None) -> str:
    return "" if layer is None else f"{layer}_"
