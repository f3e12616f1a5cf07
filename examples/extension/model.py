"""A layer that uses the map and the op of this package; its double negation is for the pass.

linexport convert model:build --output artifact --target plain-ort
"""

import torch
from linexport_extension.token_shift import OP
from torch import nn

from linexport.models.feature_maps import make
from linexport.models.torch_ops import call

HEADS, WIDTH = 2, 16


class Layer(nn.Module):
    """(B, T, 32) to (B, T, 32): tokens and those before them, then causal linear attention."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.map = make("squareplus", WIDTH)

    def forward(self, x):
        before, _ = call(OP, x)
        query, key, value = self.qkv(x.neg().neg() + before).chunk(3, -1)
        query, key = (self.map(q, HEADS, side) for q, side in ((query, "query"), (key, "key")))
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (query, key, value))
        scores = (q @ k.transpose(-1, -2)).tril()
        return (scores @ v / (scores.sum(-1, keepdim=True) + 1e-6)).transpose(1, 2).flatten(2)


def build():
    """Return the layer and example inputs, as ``linexport convert`` expects."""
    torch.manual_seed(0)
    return Layer(), (torch.randn(2, 8, 32),)
