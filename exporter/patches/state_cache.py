"""The states a traced model carries from call to call: where patched functions find and leave them.

A library hands a layer's states around in a cache object, and its functions for one token, for
several and for several after others each treat them in a way of their own. While a model is
traced, its cache only says which layer is the current one; the functions that stand in for the
library's take the past of that layer from here and leave the present here, as the ops have them:

    conv_<layer>    (B, C, k - 1)        the last inputs of a causal convolution
    window_<layer>  (B, C, n)            the last inputs of a convolution that the op has not
    state_<layer>   (B, H, d_k, d_v)     the state of linear attention
    max_<layer>     (B, H, M)            the running maximum of exponents

A layer that computes its heads in several calls has a state for each: state_<layer>_1 and so on.

Padding is left out here and nowhere else, whatever a library does: a padded token gives zeros to a
convolution, and leaves every other state as it is. So a row gives what it gives alone. transformers
zeroes hidden states before their projection instead, whose bias then enters the convolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from linexport.errors import UnsupportedModelError
from linexport.models import functional
from linexport.patches.library import find
from linexport.system.versions import TRANSFORMERS

_active: ContextVar[StateCache] = ContextVar("state_cache")

ACTIVATIONS = {None: "none", "silu": "silu", "swish": "silu"}
"""Activations that the convolution op has, by the library's names."""


class UnknownCodeError(UnsupportedModelError):
    """A library computes a state by code that no patch stands in for."""


class StateCache:
    """Past and present states by name, during one run of a model.

    Args:
        past: empty at the beginning of a sequence.
        mask: (B, T), False for padding, of the tokens of this run.
    """

    def __init__(self, past: Mapping[str, Tensor], mask: Tensor | None = None) -> None:
        self.past, self.mask = past, mask
        self.present: dict[str, Tensor] = {}
        self._layer: str | None = None
        self._convolving: str | None = None
        self._attended: list[Tensor] = []

    def begin_convolution(self, layer: str) -> None:
        """The next convolution is that of ``layer``."""
        self.finish()
        self._layer = self._convolving = layer

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        """``functional.causal_conv`` of (B, C, T) with the past of the current layer.

        ``weight`` is (C, k).
        """
        name = f"conv_{self._convolving}"
        output, present = functional.causal_conv(
            self._without_padding(x),
            weight.unsqueeze(1),
            bias,
            self.past.get(name),
            ACTIVATIONS.get(activation, "none"),
        )
        if self._convolving is not None:
            self.present[name] = present
            self._convolving = None
        return output if activation in ACTIVATIONS else _activate(output, activation)

    def window(self, x: Tensor, kept: int) -> Tensor:
        """Return x (B, C, T) behind the ``kept`` inputs before it of the current convolution.

        For convolutions that the op does not describe. Before the first token inputs are zero.
        """
        name = f"window_{self._convolving}"
        past = self.past.get(name)
        if past is None:
            past = x.new_zeros(*x.shape[:2], kept)
        joined = torch.cat([past, self._without_padding(x)], 2)
        if self._convolving is not None:
            self.present[name] = joined.narrow(2, x.shape[2], kept)
            self._convolving = None
        return joined

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: str | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Run ``functional.linear_attention`` with the past of the current layer.

        Args:
            query: (B, T, H_q, d_k).
            key: (B, T, H_k, d_k).
            value: (B, T, H_kv, d_v).
            layer: its name, where the layer has no convolution that tells which it is.
            options: decay, beta and the attributes of the op.

        Returns:
            The output (B, T, H, d_v) and the state.
        """
        past = self.past.get(_state(layer or self._layer, len(self._attended)))
        output, state, _ = functional.linear_attention(
            query.flatten(2),
            key.flatten(2),
            value.flatten(2),
            past_state=past,
            key_mask=self.mask,
            q_num_heads=query.shape[2],
            kv_num_heads=value.shape[2],
            **options,
        )
        if layer is None:
            self._attended.append(state)
        else:
            self.present[f"state_{layer}"] = state
        return output.unflatten(2, (-1, value.shape[3])), state

    def next_layer(self) -> str:
        """Name a layer that does not know its place, by how many have a state already."""
        return str(sum(name.startswith("state_") for name in self.present))

    def _without_padding(self, x: Tensor) -> Tensor:
        """Return (B, C, T) with zeros where a token is padding."""
        if self.mask is None:
            return x
        # On tokens before channels, as libraries have them: their transpose and this one cancel.
        return torch.where(self.mask[..., None], x.transpose(1, 2), 0.0).transpose(1, 2)

    def accumulate(self, value: Tensor, decay: Tensor, layer: str) -> Tensor:
        """Return h_t = exp(decay_t) h_{t-1} + value_t with the past of ``layer``.

        Args:
            value: (B, T, C).
            decay: (B, T, C), at most 0.
            layer: its name.
        """
        # Linear attention with a head for each channel, whose queries and keys are 1.
        one = torch.ones_like(value[..., :1]).unsqueeze(2)
        output, _ = self.attend(
            one, one, value.unsqueeze(3), layer, decay=decay, update_rule="gated", scale=1.0
        )
        return output.squeeze(3)

    def stabilized_exp(
        self, query: Tensor, key: Tensor, decay: Tensor, layer: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``functional.stabilized_exp`` of exponents with the past of ``layer``.

        Args:
            query: (B, T, H, M).
            key: (B, T, H, M).
            decay: (B, T, H, M), at most 0.
            layer: its name.

        Returns:
            Features of query and key, and the decay of the state, (B, T, H, M) each.
        """
        heads = key.shape[2]
        *found, present = functional.stabilized_exp(
            query.flatten(2),
            key.flatten(2),
            self.past.get(f"max_{layer}"),
            self.mask,
            decay.flatten(2),
            q_num_heads=heads,
            k_num_heads=heads,
        )
        self.present[f"max_{layer}"] = present
        features, key_features, lost = (x.unflatten(2, (heads, -1)) for x in found)
        return features, key_features, lost

    def end_attention(self, layer: str) -> None:
        """Keep the states of the linear attention just computed as those of ``layer``.

        Raises:
            UnknownCodeError: it was computed by something that no patch stands in for.
        """
        if not self._attended or layer != self._layer:
            raise UnknownCodeError(
                f"The recurrent state of layer {layer} is computed by code that linexport does "
                f"not know, so no fused op can stand in for it. {TRANSFORMERS.advice()}"
            )
        for call, state in enumerate(self._attended):
            self.present[_state(layer, call)] = state
        self._attended = []

    def finish(self) -> None:
        """Check at the end of a run, or of a layer, that nothing was left to the library's code.

        Raises:
            UnknownCodeError: a convolution was.
        """
        if self._convolving is not None:
            raise UnknownCodeError(
                f"The convolution of layer {self._convolving} is computed by code that linexport "
                "does not know, so no fused op can stand in for it. "
                f"{TRANSFORMERS.advice()}"
            )


def _state(layer: str | None, call: int) -> str:
    return f"state_{layer}_{call}" if call else f"state_{layer}"


@contextmanager
def using_states(state_cache: StateCache) -> Iterator[None]:
    """Let patched functions that are called inside use these states."""
    token = _active.set(state_cache)
    try:
        yield
        state_cache.finish()
    finally:
        _active.reset(token)


def active() -> StateCache:
    """Return the cache of the innermost ``using_states``; without one, a new and empty one."""
    return _active.get(None) or StateCache({})


def _activate(x: Tensor, activation: str | None) -> Tensor:
    """By the library's name, as its own convolutions do it."""
    functions = find("activations", "ACT2FN")
    try:
        result: Tensor = functions[activation](x)
    except KeyError:
        raise UnsupportedModelError(
            f"A convolution with the activation {activation!r}, which transformers does not have; "
            f"expected one of {', '.join(functions)}."
        ) from None
    return result
