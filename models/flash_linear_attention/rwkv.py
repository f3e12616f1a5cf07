"""Parts common to RWKV-6 and RWKV-7: blocks on layer norms, and low-rank projections."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from linexport.models.flash_linear_attention.base import Context, LayoutSettings


@dataclass(frozen=True, kw_only=True)
class RWKVSettings(LayoutSettings):
    """LayoutSettings of ``rwkv6`` and ``rwkv7``."""

    norm_eps: float = 1e-5
    norm_first: bool = True
    norm_bias: bool = True

    def feed_forward_width(self, ratio: float) -> int:
        """Width as configured, or the hidden size times a ratio, rounded up to a multiple of 32."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        return 32 * -(-int(self.hidden_size * (self.hidden_ratio or ratio)) // 32)


class LoRA(nn.Module):
    """B f(A x) (+ b), A and B of low rank."""

    def __init__(
        self, inputs: int, outputs: int, rank: int, activation: nn.Module, bias: bool = True
    ) -> None:
        super().__init__()
        self.lora = nn.Sequential(
            nn.Linear(inputs, rank, bias=False), activation, nn.Linear(rank, outputs, bias=bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lora(x)
        return y


class RWKVBlock(nn.Module):
    """h = h + attn(norm(h)); h = h + ffn(norm(h)); the first layer normalises what it is given."""

    def __init__(self, settings: RWKVSettings, index: int, attn: nn.Module, ffn: nn.Module) -> None:
        super().__init__()
        if settings.norm_first and index == 0:
            self.pre_norm = layer_norm(settings)
        self.attn_norm = layer_norm(settings)
        self.attn = attn
        self.ffn_norm = layer_norm(settings)
        self.ffn = ffn

    def forward(self, h: Tensor, context: Context) -> Tensor:
        if hasattr(self, "pre_norm"):
            h = self.pre_norm(h)
        h = h + self.attn(context.zero_padding(self.attn_norm(h)), context)
        out: Tensor = h + self.ffn(context.zero_padding(self.ffn_norm(h)))
        return out


def layer_norm(settings: RWKVSettings) -> nn.Module:
    """Layer norm of the hidden states."""
    return nn.LayerNorm(settings.hidden_size, eps=settings.norm_eps, bias=settings.norm_bias)
