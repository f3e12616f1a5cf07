"""HGRN2 (Qin et al. 2024, arXiv 2404.07904): HGRN with a state of vectors, as linear attention.

    S_t = diag(e^{g_t}) S_{t-1} + (1 - e^{g_t}) i_t^T,   o_t = norm(S_t^T silu(q_t) / sqrt(d_k))
    e^{g_t} = l + (1 - l) sigmoid(W_f x_t)

l as in ``hgrn``. The norm is over all heads together.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from linexport.errors import UsageError
from linexport.models.flash_linear_attention.base import Context, LayoutSettings, WeightLayout
from linexport.models.flash_linear_attention.layers import (
    GatedBlock,
    GatedRMSNorm,
    add_projections,
    bounded_gate,
    projected,
    rms_norm,
)
from linexport.models.functional import linear_attention

EPSILON = 1e-5
"""Epsilon of the norm of a layer: the library does not pass on the one of the configuration."""


@dataclass(frozen=True, kw_only=True)
class HGRN2Settings(LayoutSettings):
    """LayoutSettings of ``hgrn2``."""

    num_heads: int | None = None
    expand_ratio: int | None = 128
    use_short_conv: bool = False
    conv_size: int = 4
    use_lower_bound: bool = True
    elementwise_affine: bool = True


class GatedStateExpansion(nn.Module):
    """The layer above, from (B, T, hidden) to (B, T, hidden)."""

    def __init__(self, s: HGRN2Settings, index: int) -> None:
        super().__init__()
        self.index, (self.heads, self.d_k) = index, _heads(s)
        keys = self.heads * self.d_k
        add_projections(self, s, "none", q=keys, f=keys, i=s.hidden_size)
        self.g_norm = GatedRMSNorm(s.hidden_size, EPSILON, s.elementwise_affine)
        self.o_proj = nn.Linear(s.hidden_size, s.hidden_size, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, f, i = (projected(self, name, x) for name in "qfi")
        decay, key = bounded_gate(f, context, self.index)
        o, _, _ = linear_attention(
            F.silu(q),
            key,
            i,
            decay=decay,
            key_mask=context.keep,
            q_num_heads=self.heads,
            kv_num_heads=self.heads,
            update_rule="gated",
            scale=self.d_k**-0.5,
        )
        y: Tensor = self.o_proj(self.g_norm(o))
        return y


def _heads(s: HGRN2Settings) -> tuple[int, int]:
    """Return the heads and the width of a key.

    Raises:
        UsageError: neither is given, or they divide the hidden size with a rest.
    """
    if s.expand_ratio is not None:
        heads, width = s.hidden_size // s.expand_ratio, s.expand_ratio
    elif s.num_heads is not None:
        heads, width = s.num_heads, s.hidden_size // s.num_heads
    else:
        raise UsageError("The configuration has neither expand_ratio nor num_heads.")
    if heads < 1 or s.hidden_size % heads:
        raise UsageError(f"The configuration has {heads} heads for a width of {s.hidden_size}.")
    return heads, width


LAYOUT = WeightLayout(
    "hgrn2",
    "HGRN2ForCausalLM",
    HGRN2Settings,
    lambda settings, index: GatedBlock(settings, GatedStateExpansion(settings, index)),
    rms_norm,
    {"hidden_act": ("swish",)},
    lambda settings: settings.hidden_size if settings.use_lower_bound else None,
)
