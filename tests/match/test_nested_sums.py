"""Sums within sums double in every step of Sinkhorn's iteration; large ones are not followed.

A sum of quotients whose denominators are sums as well is a sum of what they are at each token.
"""

from __future__ import annotations

import copy

import onnx_graphsurgeon as gs
import torch
from torch import Tensor, nn

from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.terms import MAX_NESTED
from linexport.sources.factory import load_module
from linexport.trace import trace
from tests.support.pieces import in_pieces, largest_error, rewritten


class Sinkhorn(nn.Module):
    """Rows and columns of a matrix of each token, normalised in turn, as hyper-connections do."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 4)."""
        weights = x.sigmoid().unflatten(-1, (2, 2))
        for _ in range(20):
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
            weights = weights / (weights.sum(-2, keepdim=True) + 1e-6)
        mixed = (weights @ x.unflatten(-1, (2, 2))).flatten(-2)
        scores = (mixed @ mixed.mT).tril()
        return scores @ mixed / mixed.square().mean(-1, keepdim=True)


def test_forty_steps_of_sinkhorn_are_followed_as_far_as_they_are_small(one_thread: None) -> None:
    """Without an end, the time doubles with every step: years."""
    graph = trace(load_module((Sinkhorn(), (torch.randn(2, 12, 4),)), "own:make")).graph
    found = Evaluator(gs.import_onnx(graph))
    sizes = [form.nested for form in found._forms.values() if form is not None]
    assert len(sizes) > 100
    assert 10 < max(sizes) <= MAX_NESTED


class Flow(nn.Module):
    """Flowformer's causal attention: sums of keys over what flows out of each are summed again."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        q, k = q.sigmoid(), k.sigmoid()
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        sink = count / (q * k.cumsum(1)).sum(-1, keepdim=True)
        source = count / (k * q.cumsum(1)).sum(-1, keepdim=True)
        kept = (q * (k * source).cumsum(1)).sum(-1, keepdim=True) / count
        given = ((k * (q * sink).cumsum(1)).sum(-1, keepdim=True) / count).clamp(-1, 1).exp()
        share = count * given / given.cumsum(1)
        sums = torch.einsum("btd,bte->btde", k, v * share).cumsum(1)
        return torch.einsum("btd,btde->bte", q * sink / count, sums) * kept.sigmoid()


def test_sums_of_quotients_of_sums_stream(one_thread: None) -> None:
    torch.manual_seed(0)
    module, x = Flow().eval(), torch.randn(2, 60, 8)
    model = rewritten(module, x[:, :20])
    with torch.no_grad():
        expected = copy.deepcopy(module).double()(x.double()).numpy()
    assert largest_error(in_pieces(model, x.numpy(), [1, 3, 1, 20]), expected) < 1e-5
