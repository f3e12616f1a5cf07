"""Sums of the rows of decay masks, as functions of the position."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from linexport import passes
from linexport.sources.loaded_model import LoadedModel, Source
from linexport.trace import trace

pytestmark = pytest.mark.usefixtures("one_thread")

RATES = torch.tensor([0.0, -(2.0**-20), -(2.0**-12), -0.03, -1.0, -40.0])


class Divided(nn.Module):
    """Values over the sums of the rows of a mask, a rate for each channel."""

    def __init__(self, offset: int) -> None:
        super().__init__()
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 6)."""
        t = torch.arange(x.shape[1])
        apart = (t[:, None] - t).clamp(min=0).to(x.dtype)
        mask = torch.exp(RATES[:, None, None].to(x) * apart).tril(self.offset)
        return x / mask.sum(-1).T


def rewritten(module: nn.Module) -> tuple[onnxruntime.InferenceSession, set[str]]:
    """The session of a module after the passes, and its operators."""
    source, sizes = Source("factory", "a", None, "b"), ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    loaded = LoadedModel(module, (torch.randn(2, 6, len(RATES)),), {}, sizes, source)
    model = passes.run(trace(loaded).model, passes.STATELESS)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session, {node.op_type for node in model.graph.node}


def test_sums_of_any_rate_and_length() -> None:
    session, operators = rewritten(Divided(0))
    assert not operators & {"ReduceSum", "Trilu", "CumSum"}
    t, rates = np.arange(20_000)[:, None], RATES.double().numpy()
    with np.errstate(invalid="ignore"):
        sums = np.expm1(rates * (t + 1)) / np.expm1(rates)
    sums[:, 0] = t[:, 0] + 1
    x = np.ones((1, len(t), len(rates)), np.float32)
    (got,) = session.run(None, {session.get_inputs()[0].name: x})
    np.testing.assert_allclose(1 / got[0].astype(np.float64), sums, rtol=2e-6)


@pytest.mark.parametrize("offset", [-1, pytest.param(2, marks=pytest.mark.slow)])
def test_other_triangles_are_left(offset: int) -> None:
    session, operators = rewritten(Divided(offset))
    assert "ReduceSum" in operators
    x = torch.randn(2, 40, len(RATES)).abs() + 1
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = Divided(offset)(x.double()).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-5)
