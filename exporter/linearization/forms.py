"""Linear forms: modules that take the place of one call of softmax attention.

    phi_q(g q) (sum_s phi_k(k_s) v_s^T) / (phi_q(g q) . sum_s phi_k(k_s))       g = scale sqrt(d)

Feature maps represent exp(q.k/sqrt(d)), so that g turns it into exp(scale q.k). It is one number a
head, which fine-tuning may change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

from linexport.linearization.find_softmax import Site
from linexport.models import attention_masks
from linexport.models.feature_maps import FeatureMap
from linexport.models.mapped_attention import check_map, mapped_attention
from linexport.models.softmax_calls import Call
from linexport.models.static_memory import StaticMemory
from linexport.plugins.ops.linear_attention.spec import LinearAttentionSpec
from linexport.system.json_object import JsonObject

EPS = 1e-6


class KernelAttention(nn.Module):
    """Linear attention with a feature map in place of the calls of one site.

    Raises:
        UsageError: the map does not fit the attention.
    """

    def __init__(self, site: Site, feature_map: FeatureMap) -> None:
        super().__init__()
        self.spec = LinearAttentionSpec(
            q_num_heads=site.heads,
            kv_num_heads=site.kv_heads,
            causal=site.causal,
            normalize=True,
            eps=EPS,
        )
        check_map(feature_map, self.spec)
        self.cross, self.unmasked = site.cross, site.causal and not site.masked
        self.feature_map = feature_map
        gain = site.scale * math.sqrt(site.head_dim)
        self.gain = nn.Parameter(torch.full((site.heads,), gain))

    @property
    def name(self) -> str:
        """Name of the form, by which it is requested."""
        return self.feature_map.kind

    def options(self) -> JsonObject:
        """Return the options of the form, of JSON types."""
        return asdict(self.feature_map.options)

    def grouped(self, call: Call) -> Call:
        """Return the call with keys and values of each group of heads once.

        transformers repeats them in some calls of a layer and not in others: where it is traced.
        """
        heads, kv_heads = self.spec.q_num_heads, self.spec.kv_num_heads
        if call.key.shape[1] == kv_heads:
            return call
        key, value = (x[:, :: heads // kv_heads] for x in (call.key, call.value))
        return replace(call, key=key, value=value, enable_gqa=True)

    def forward(self, call: Call) -> Tensor:
        """(B, H, T, d_v)."""
        call = self.grouped(call)
        q, k = self.packed(call)
        mask = self.key_mask(call)
        if self.cross:
            output = self._across(q, k, call.value, mask)
        else:
            v = pack(call.value)
            output, _ = mapped_attention(self.feature_map, self.spec, q, k, v, key_mask=mask)
        return output.unflatten(-1, (self.spec.q_num_heads, -1)).transpose(1, 2)

    def denominators(self, call: Call) -> Tensor:
        """phi_q . z of every query, (B, T, H): what an estimate of a positive sum came out as."""
        call = self.grouped(call)
        q, k = self.packed(call)
        mask, heads = self.key_mask(call), self.spec.kv_num_heads
        ones = torch.ones_like(k[..., :heads])
        if not self.cross:
            spec = replace(self.spec, normalize=False)
            return mapped_attention(self.feature_map, spec, q, k, ones, key_mask=mask)[0]
        phi_q = self.feature_map(q, self.spec.q_num_heads, "query")
        phi_k = self.feature_map(k, heads, "key")
        if mask is not None:
            phi_k = torch.where(mask[..., None], phi_k, 0.0)
        return self._products(phi_q, phi_k, _split(ones, heads))[..., 0].mT

    def packed(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return queries times the gain, and keys, both (B, T, H * d)."""
        return pack(call.query * self.gain[:, None, None].to(call.query.dtype)), pack(call.key)

    def key_mask(self, call: Call) -> Tensor | None:
        """(B, S), True for keys that are there; None where all are.

        transformers writes the causal mask out where a layer is traced. Of a layer that is called
        without a mask when it runs it says no more than that, and its last row would be one of the
        end of the sequence: the model could not stream.
        """
        if call.attn_mask is None or (self.unmasked and torch.compiler.is_exporting()):
            return None
        return attention_masks.key_mask(call.attn_mask, call.key.shape[0], call.key.shape[2])

    def _across(self, q: Tensor, k: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention to keys of another sequence, in plain products: the op has one length."""
        heads, stable = self.spec.kv_num_heads, self.feature_map.exponential
        phi_q = self.feature_map(q, self.spec.q_num_heads, "query", stable)
        phi_k = self.feature_map(k, heads, "key", stable)
        if mask is not None:
            phi_k = torch.where(mask[..., None], phi_k, -torch.inf if stable else 0.0)
        if stable:
            # Both maxima cancel in the ratio; without them exponents overflow.
            top = phi_k.detach().amax(1, keepdim=True)
            phi_k = (phi_k - top).exp()
            repeats = self.spec.q_num_heads // heads
            top = top.unflatten(-1, (heads, -1)).repeat_interleave(repeats, 2).flatten(2)
            exponents = _split(phi_q + top, self.spec.q_num_heads)
            exponents = exponents - exponents.detach().amax(-1, keepdim=True)
            phi_q = exponents.exp().transpose(1, 2).flatten(2)
        numerator = self._products(phi_q, phi_k, value)
        denominator = self._products(phi_q, phi_k, torch.ones_like(value[..., :1]))
        return (numerator / (denominator + EPS)).transpose(1, 2).flatten(2).to(value.dtype)

    def _products(self, phi_q: Tensor, phi_k: Tensor, value: Tensor) -> Tensor:
        """phi_q sum_s phi_k v^T, (B, H, T, d_v)."""
        heads = self.spec.kv_num_heads
        state = _split(phi_k, heads).mT @ value.to(phi_k.dtype)
        state = state.repeat_interleave(self.spec.q_num_heads // heads, 1)
        return _split(phi_q, self.spec.q_num_heads) @ state


class MemoryAttention(nn.Module):
    """Attention to fitted pseudo-keys in place of keys and values that never change."""

    def __init__(self, memory: StaticMemory) -> None:
        super().__init__()
        self.memory = memory

    def forward(self, call: Call) -> Tensor:
        """(B, H, T, d_v); keys and values of the call are not looked at."""
        return self.memory.attend(call.query)


class Forms(nn.Module):
    """Linear forms of all replaced sites; every other call is answered as before."""

    def __init__(self, forms: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.by_site = nn.ModuleDict({str(index): form for index, form in forms.items()})

    def answer(self, index: int, call: Call) -> Tensor:
        """See ``softmax_calls.ComputeAttention``."""
        if str(index) not in self.by_site:
            return call.softmax()
        found: Tensor = self.by_site[str(index)](call)
        return found


def pack(x: Tensor) -> Tensor:
    """(B, H, T, width) as (B, T, H * width)."""
    return x.transpose(1, 2).flatten(2)


def _split(x: Tensor, heads: int) -> Tensor:
    """(B, T, H * width) as (B, H, T, width)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
