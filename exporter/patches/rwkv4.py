"""RWKV-4 of transformers -> ``CausalConvWithState``, ``StabilizedExp`` and ``LinearAttention``.

    S_t = exp(w) S_{t-1} + exp(k_t) v_t,   z_t = exp(w) z_{t-1} + exp(k_t)          per channel
    o_t = (S_{t-1} + exp(u + k_t) v_t) / (z_{t-1} + exp(u + k_t))

(Peng et al. 2023, arXiv:2305.13048, section 3.1; w = -exp(time_decay), u = time_first). Keys and
values are shifted by one token, so that a state that includes its token is S_{t-1}; what has no
token before is masked. Exponents have two features, the running maximum m of the keys and 0, so
that those of the query, exp(m - M) and exp(u + k_t - M) with M the larger exponent, are what state
and token are multiplied by. Nothing overflows, and the larger of them is 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linexport.patches import Patch, Swap
from linexport.patches.state_cache import active
from linexport.plugins.ops.stabilized_exp import LOWEST
from linexport.system.untyped import LibraryObject


def attention(
    self: LibraryObject, hidden: Tensor, state: LibraryObject = None, use_cache: bool = False
) -> tuple[Tensor, LibraryObject]:
    """Stands in for ``RwkvSelfAttention.forward``."""
    shifted = _shifted(hidden, f"{self.layer_id}_0")
    mixed = (
        hidden * mix + shifted * (1 - mix)
        for mix in (self.time_mix_key, self.time_mix_value, self.time_mix_receptance)
    )
    key, value, receptance = (
        project(x)
        for project, x in zip((self.key, self.value, self.receptance), mixed, strict=True)
    )
    average = _weighted_average(self, key, value, str(self.layer_id))
    return self.output(torch.sigmoid(receptance) * average), state


def _weighted_average(layer: LibraryObject, key: Tensor, value: Tensor, name: str) -> Tensor:
    states = active()
    there = torch.ones_like(key[..., :1])
    before = _shifted(torch.cat([key, value, there], -1), f"{name}_1")
    past_key, past_value, known = before.split([key.shape[2], value.shape[2], 1], -1)
    rate = -torch.exp(layer.time_decay).expand_as(key)
    past_key = torch.where(known > 0, past_key, LOWEST)
    zero = torch.zeros_like(key)
    query, features, decay = states.stabilized_exp(
        torch.stack([zero, layer.time_first + key], -1),
        torch.stack([past_key, zero], -1),
        torch.stack([rate, zero], -1),
        name,
    )
    weight = features[..., 0] * known
    sums = torch.cat([weight * past_value, weight], -1)
    lost = torch.cat([decay[..., 0]] * 2, -1)
    numerator, denominator = states.accumulate(sums, lost, name).chunk(2, -1)
    old, new = query.unbind(-1)
    return (old * numerator + new * value) / (old * denominator + new)


def feed_forward(
    self: LibraryObject, hidden: Tensor, state: LibraryObject = None
) -> tuple[Tensor, LibraryObject]:
    """Stands in for ``RwkvFeedForward.forward``."""
    shifted = _shifted(hidden, f"{self.layer_id}_2")
    key, receptance = (
        hidden * mix + shifted * (1 - mix) for mix in (self.time_mix_key, self.time_mix_receptance)
    )
    value = self.value(torch.square(torch.relu(self.key(key))))
    return torch.sigmoid(self.receptance(receptance)) * value, state


def _shifted(x: Tensor, name: str) -> Tensor:
    """x_{t-1} of (B, T, C), zeros before the first token: a convolution with the taps 1, 0."""
    states = active()
    states.begin_convolution(name)
    taps = torch.tensor([1.0, 0.0], dtype=x.dtype).expand(x.shape[2], 2).contiguous()
    return states.convolve(x.transpose(1, 2), taps, None, None).transpose(1, 2)


PATCH = Patch(
    swaps=(
        Swap("RwkvSelfAttention.forward", attention),
        Swap("RwkvFeedForward.forward", feed_forward),
    ),
    families=("rwkv",),
)
