"""Recurrent layers of PyTorch: loops of any length, beside the layers in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import linexport
from linexport.patches.packages import swapped
from linexport.patches.recurrent_layers import LAYERS
from linexport.sources.factory import load_module
from tests.support.independent import Independent

WIDTH, HIDDEN = 5, 6

KINDS: dict[str, nn.RNNBase] = {
    "tanh": nn.RNN(WIDTH, HIDDEN, batch_first=True),
    "relu": nn.RNN(WIDTH, HIDDEN, nonlinearity="relu", bias=False),
    "gru": nn.GRU(WIDTH, HIDDEN, batch_first=True),
    "gru of two layers": nn.GRU(WIDTH, HIDDEN, 2, bias=False),
    "gru in both directions": nn.GRU(WIDTH, HIDDEN, 2, batch_first=True, bidirectional=True),
    "lstm": nn.LSTM(WIDTH, HIDDEN, batch_first=True),
    "lstm of two layers": nn.LSTM(WIDTH, HIDDEN, 2, batch_first=True, dropout=0.3),
    "lstm that projects": nn.LSTM(WIDTH, HIDDEN, 2, proj_size=3, bidirectional=True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("rows", [3, None])
def test_the_loops_are_the_layers(kind: str, given: bool, rows: int | None) -> None:
    layer = KINDS[kind].eval()
    x = torch.randn(*((7, rows) if rows else (7,)), WIDTH)
    x = x.transpose(0, 1) if layer.batch_first and rows else x
    _, states = layer(x)
    args = (x, states) if given else (x,)
    expected = layer(*args)
    with swapped(LAYERS, layer):
        found = layer(*args)
    torch.testing.assert_close(found, expected)


class Given(nn.Module):
    """A layer whose state is taken and returned, behind a prefix sum."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = KINDS[kind]

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, last = self.layer(0.1 * x.cumsum(1), state)
        return y, last


class Pair(Given):
    """The same of an LSTM, which has two."""

    def forward(self, x: Tensor, state: Tensor, cell: Tensor) -> tuple[Tensor, ...]:
        y, last = self.layer(0.1 * x.cumsum(1), (state, cell))
        return y, *last


@pytest.mark.parametrize(("kind", "build"), [("gru", Given), ("lstm of two layers", Pair)])
def test_states_are_given_and_returned_in_a_stream(
    kind: str, build: type[Given], tmp_path: Path
) -> None:
    module = build(kind).eval()
    sizes = [(module.layer.num_layers, 3, HIDDEN)] * (2 if build is Pair else 1)
    examples = (torch.randn(3, 9, WIDTH), *(torch.randn(*size) for size in sizes))
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, *({1: Dim.DYNAMIC} for _ in sizes))
    loaded = load_module((module, examples, dynamic), "given:make")
    manifest = linexport.convert(loaded, tmp_path / "a", target="onnx", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.streaming.passed
    found, x = Independent(tmp_path / "a"), torch.randn(3, 60, WIDTH)
    rows = [torch.randn(*size) for size in sizes]
    with torch.no_grad():
        expected = module.double()(*(a.double() for a in (x, *rows)))
    module.float()
    for pieces in ([60], [1] * 60, [13, 40, 7]):
        got = found.outputs(x.numpy(), pieces, [a.numpy() for a in rows])
        for one, exact in zip(got, expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(one).double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["tanh", "gru in both directions"])
def test_layers_convert_from_their_example(kind: str, tmp_path: Path) -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = KINDS[kind]

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0]

    loaded = load_module((Alone(), (torch.randn(2, 11, WIDTH),)), "alone:make")
    manifest = linexport.convert(loaded, tmp_path / "a", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.dims["seq"].max is None
