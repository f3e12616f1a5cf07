"""Sums within sums double in every step of Sinkhorn's iteration; large ones are not followed."""

from __future__ import annotations

import onnx_graphsurgeon as gs
import torch
from torch import Tensor, nn

from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.terms import MAX_NESTED
from linexport.sources.factory import load_module
from linexport.trace import trace


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
