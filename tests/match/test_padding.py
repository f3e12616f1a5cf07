"""Zeros behind the tokens that are cut off again are gone; other padding stays, and counts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from linexport import passes
from linexport.plugins.ops.registry import attach_functions
from linexport.trace.graph import to_onnx

HEADS, D = 2, 8

Pad = Callable[[Tensor], Tensor]


class Attention(torch.nn.Module):
    """Attention on padded tokens, cut to those that were there."""

    def __init__(self, before: Pad, after: Pad, causal: bool) -> None:
        super().__init__()
        self.before, self.after, self.causal = before, after, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, D)).transpose(1, 2) for y in x.chunk(3, -1))
        q, k = (self.after(F.elu(self.before(y)) + 1) for y in (q, k))
        v = self.after(self.before(v))
        scores = q @ k.transpose(-1, -2)
        if self.causal:
            scores = scores.tril()
        out = scores @ v / (scores.sum(-1, keepdim=True) + 1e-6)
        return out[:, :, : x.shape[1]].transpose(1, 2).flatten(2)


def none(x: Tensor) -> Tensor:
    return x


def zeros(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, 3))


def ones(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, 3), value=1.0)


def whole_chunks(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, -x.shape[2] % 16))


@pytest.mark.parametrize(
    ("before", "after", "ordered", "kept"),
    [
        pytest.param(none, zeros, True, False, id="zeros"),
        pytest.param(none, zeros, False, False, id="zeros, bidirectional"),
        pytest.param(none, whole_chunks, True, False, id="to whole chunks"),
        pytest.param(none, ones, False, True, id="ones"),
        pytest.param(zeros, none, False, True, id="zeros, which the map makes ones"),
    ],
)
def test_padding(before: Pad, after: Pad, ordered: bool, kept: bool) -> None:
    module = Attention(before, after, ordered)
    dynamic = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    example = (torch.randn(2, 20, 3 * HEADS * D),)
    traced = to_onnx(torch.export.export(module, example, dynamic_shapes=dynamic, strict=False), {})
    rewritten = passes.rewrite(traced, passes.STATELESS)
    assert len(rewritten.findings.matches) == 1 and not rewritten.findings.rejected
    operators = [n.op_type for n in rewritten.model.graph.node]
    assert ("Pad" in operators) == kept
    assert kept or operators == [
        "Split",
        *["FeatureMap"] * (0 if ordered else 2),
        "LinearAttention",
    ]
    for length in (1, 16, 33):
        x = torch.randn(3, length, 3 * HEADS * D)
        expected = module(x).numpy()
        got = run(rewritten.model, x.numpy())
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    attach_functions(model)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, {session.get_inputs()[0].name: x})[0]
