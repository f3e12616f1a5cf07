"""Heads of queries that share keys and values, and fade each at a rate of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.pieces import in_pieces, rewritten

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, WIDTH = 4, 5


class Gated(nn.Module):
    """S_t[h] = a_t[h] S_{t-1}[h] + k_t v_t^T, o_t[h] = q_t[h] S_t[h], in one of several notations.

    Args:
        groups: heads of keys and values, each of which several queries share.
        notation: a loop over tokens, or the matrix of all decays.
    """

    def __init__(self, groups: int, notation: str) -> None:
        super().__init__()
        self.groups, self.notation = groups, notation
        self.sizes = (HEADS * WIDTH, groups * WIDTH, groups * WIDTH, HEADS)
        self.project = nn.Linear(8, sum(self.sizes))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8) -> (B, T, HEADS * WIDTH)."""
        q, k, v, g = self.project(x).split(self.sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, WIDTH)) for part in (q, k, v))
        k, v = (part.repeat_interleave(HEADS // self.groups, 2) for part in (k, v))
        g = F.logsigmoid(g)
        made = self.loop if self.notation == "loop" else self.matrix
        return made(q, k, v, g).flatten(2)

    @staticmethod
    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        """Compute token by token."""
        state, found = q.new_zeros(q.shape[0], HEADS, WIDTH, WIDTH), []
        for t in range(q.shape[1]):
            state = g[:, t, :, None, None].exp() * state + k[:, t, ..., None] * v[:, t, :, None]
            found.append((q[:, t, ..., None] * state).sum(-2))
        return torch.stack(found, 1)

    @staticmethod
    def matrix(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        """Compute by the products of decays between all pairs of tokens."""
        total = g.cumsum(1).mT
        rates = total[..., :, None] - total[..., None, :]
        later = torch.ones(rates.shape[-2:], dtype=torch.bool).triu(1)
        decays = rates.masked_fill(later, -torch.inf).exp()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return ((q @ k.mT * decays) @ v).transpose(1, 2)


@pytest.mark.parametrize("notation", ["loop", "matrix"])
@pytest.mark.parametrize("groups", [1, 2])
def test_keys_of_several_decays_are_fused(groups: int, notation: str) -> None:
    torch.manual_seed(groups)
    module = Gated(groups, notation).eval()
    model = rewritten(module, torch.randn(2, 12, 8))
    (fused,) = (n for n in model.graph.node if n.op_type == "LinearAttention")
    counts = {a.name: a.i for a in fused.attribute if a.name.endswith("num_heads")}
    assert counts == {"q_num_heads": HEADS, "kv_num_heads": HEADS}, "a state for each decay"
    for length, pieces in ((1, ()), (37, (5, 1)), (70, (64,))):
        x = torch.randn(3, length, 8)
        with torch.no_grad():
            expected = module.double()(x.double()).numpy()
        found = in_pieces(model, x.numpy(), pieces)
        assert abs(found - expected).max() < 2e-6 * abs(expected).max()
