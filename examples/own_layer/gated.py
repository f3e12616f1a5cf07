"""A layer of your own: gated linear attention as plain PyTorch, found and fused by linexport.

    linexport convert gated:build --output artifact

The decay of head h at token t is a sigmoid of the input. Two keys s and t positions apart are
weighed by the product of the decays between them, exp(G_t - G_s) with G the cumulative sum of the
logarithms: the whole layer is a few matrix products and a mask, quadratic in the length. The
artifact holds a recurrence with a state instead, linear in the length.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

HEADS, WIDTH = 2, 16


class GatedAttention(nn.Module):
    """(B, T, dim) to (B, T, dim)."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * HEADS * WIDTH)
        self.gate = nn.Linear(dim, HEADS)
        self.out = nn.Linear(HEADS * WIDTH, dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        total = logsigmoid(self.gate(x)).transpose(1, 2).cumsum(-1)  # (B, heads, T)
        decay = (total[..., :, None] - total[..., None, :]).exp()
        scores = (query @ key.transpose(-1, -2) * decay).tril()
        return self.out((scores @ value).transpose(1, 2).flatten(2))


def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the module and example arguments, as ``linexport convert`` expects."""
    return GatedAttention(), (torch.randn(2, 16, 32),)
