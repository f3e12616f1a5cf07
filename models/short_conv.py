"""A short causal convolution over tokens, one filter per channel.

    y_t = silu(b + sum_j w_j x_{t-(k-1)+j})      j = 0 ... k-1;  x, y (B, T, C)
    state: the last k-1 inputs, (B, C, k-1)

Linear attention sums over keys whatever their order. This gives each token the order of the k
before it, and needs no position embedding, so a model can stream for ever.
"""

from __future__ import annotations

from torch import Tensor, nn

from linexport.models import functional


class ShortConv(nn.Module):
    """The convolution above with kernel size ``size``."""

    def __init__(self, channels: int, size: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, size, groups=channels)

    def initial_state(self, batch: int) -> Tensor:
        """Zeros: as if nothing came before."""
        weight = self.conv.weight
        return weight.new_zeros(batch, weight.shape[0], weight.shape[2] - 1)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, T, C) and the state after the last token."""
        y, present = functional.causal_conv(
            x.transpose(1, 2), self.conv.weight, self.conv.bias, state, "silu"
        )
        return y.transpose(1, 2), present
