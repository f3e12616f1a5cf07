"""Mixtures of experts whose routers have experts with nearly the same score, two and two."""

import torch
from torch import nn

from linexport.models.functional import linear_attention, mixture_of_experts

WIDTH, EXPERTS, CHOSEN, LAYERS = 16, 64, 7, 4
APART = 3e-7


class Mixture(nn.Module):
    """Linear attention, and 7 of 64 experts: the seventh is one of two that score alike."""

    def __init__(self, grouped):
        super().__init__()
        self.grouped = grouped
        router = torch.randn(EXPERTS // 2, WIDTH)
        noise = APART * torch.randn(EXPERTS // 2, WIDTH)
        self.router = nn.Parameter(torch.stack([router, router + noise], 1).flatten(0, 1))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Parameter(torch.randn(EXPERTS, 8, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 8) / 2)

    def scores(self, x):
        """Scores (N, experts) to choose by: logits, or of groups that are chosen themselves."""
        logits = x @ self.router.T
        if not self.grouped:
            return logits
        scores = logits.sigmoid().unflatten(1, (8, 8))
        best = scores.topk(2, -1).values.sum(-1)
        groups = best.topk(4, -1, sorted=False).indices
        kept = torch.zeros_like(best).scatter(1, groups, 1.0)
        return (scores * kept[..., None]).flatten(1)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        heads = {"q_num_heads": 2, "kv_num_heads": 2, "normalize": True, "eps": 1e-6}
        x = x + linear_attention(q.relu(), k.relu(), v, **heads)[0]
        tokens = x.flatten(0, 1)
        tokens = tokens / tokens.square().mean(-1, keepdim=True).add(1e-6).sqrt()
        scores = self.scores(tokens)
        index = scores.topk(CHOSEN, -1, sorted=False).indices
        weight = scores.gather(1, index).softmax(-1)
        return x + mixture_of_experts(
            tokens, index, weight, self.up, self.down, gated=False
        ).view_as(x)


def mixtures(grouped=False):
    torch.manual_seed(0)
    layers = nn.Sequential(*[Mixture(grouped) for _ in range(LAYERS)])
    return layers, (torch.randn(2, 16, WIDTH),)


def grouped_mixtures():
    return mixtures(grouped=True)
