"""Linear attention in a body of If is fused, and its state carried, whichever body is chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import linexport
from linexport import passes
from linexport.sources.factory import load_module
from linexport.system.torch_internals.exports import control_flow_as_it_is
from linexport.trace import trace

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 23
"""Tokens of a run; 16 were traced."""


class Chosen(nn.Module):
    """Linear attention where the sum of a flag is positive, and twice the values elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        x = torch.cond(self.condition(x, flag), self.attention, self.other, self.projected(x))
        return F.relu(x)

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q(x), self.k(x), self.v(x)

    def condition(self, x: Tensor, flag: Tensor) -> Tensor:
        return flag.sum() > 0

    @staticmethod
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((F.elu(q) + 1) @ (F.elu(k) + 1).transpose(1, 2)).tril() @ v

    @staticmethod
    def other(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v * 2


class OfTokens(Chosen):
    """The tokens decide: the choice is not known before the last of them."""

    def condition(self, x: Tensor, flag: Tensor) -> Tensor:
        # In heads: their sizes say in which shape the tokens decide.
        return x.view(x.shape[0], x.shape[1], 2, 8).sum() > 0


class Softmax(Chosen):
    """No body has linear attention."""

    @staticmethod
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(1, 2)).softmax(-1) @ v


class Looked(Chosen):
    """A body takes values by indices, which may be wrong where the other one is chosen."""

    @staticmethod
    def other(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.gather(2, q.argsort(-1))


class OfSizes(Chosen):
    """The number of tokens decides."""

    def condition(self, x: Tensor, flag: Tensor) -> Tensor:
        return torch.tensor(x.shape[1]) > 20


def loaded(kind: type[Chosen]) -> Any:
    torch.manual_seed(0)
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, {})
    return load_module(
        (kind().eval(), (torch.randn(2, 16, 16), torch.ones(1)), dynamic), "tests:if"
    )


def inputs(sign: float) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(3, LENGTH, 16)).astype(np.float32)
    return {"x": x, "flag": np.full(1, sign, np.float32)}


def error(module: nn.Module, feeds: dict[str, np.ndarray], got: np.ndarray) -> float:
    with torch.no_grad(), control_flow_as_it_is():
        want = module.double()(*(torch.from_numpy(x).double() for x in feeds.values())).numpy()
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_attention_of_a_body_streams(tmp_path: Path, sign: float) -> None:
    source = loaded(Chosen)
    manifest = linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.streaming.passed
    assert manifest.fused["LinearAttention"] == 1
    # The original was run in float32 and in float64, at every size.
    assert len(manifest.parity.cases) == 24
    assert all("Slower than a plain export" in warning for warning in manifest.warnings)
    model, feeds = linexport.load(tmp_path / "artifact", threads=1), inputs(sign)
    assert error(source.module, feeds, model.run(feeds)["output"]) < 1e-5
    stream = model.stream()
    parts = np.split(feeds["x"], [5, 6], axis=1)
    found = [stream.step(x=part, flag=feeds["flag"])["output"] for part in parts]
    assert error(source.module, feeds, np.concatenate(found, 1)) < 1e-5


def test_a_choice_by_all_tokens_is_computed_and_has_no_state(tmp_path: Path) -> None:
    source = loaded(OfTokens)
    manifest = linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)
    assert manifest.status == "ok" and not manifest.states
    assert "ReduceSum" in (manifest.why_stateless or "")
    session = onnxruntime.InferenceSession(tmp_path / "artifact" / "model.onnx")
    for shift in (1.0, -1.0):
        feeds = {**inputs(1.0), "x": inputs(1.0)["x"] + np.float32(shift)}
        (got,) = session.run(None, feeds)
        assert error(source.module, feeds, got) < 1e-5


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Softmax, ""), (Looked, "Gather of a body may fail"), (OfSizes, "")],
)
def test_other_bodies_stay(kind: type[Chosen], reason: str) -> None:
    rewritten = passes.rewrite(trace(loaded(kind)).graph, passes.STATELESS)
    operators = [n.op_type for n in rewritten.model.graph.node]
    assert any(reason in u.reason for u in rewritten.findings.unmatched) or not reason
    assert "Where" not in operators and "LinearAttention" not in operators
    if kind is not OfSizes:  # whose condition is a constant for torch where sizes are
        assert "If" in operators
