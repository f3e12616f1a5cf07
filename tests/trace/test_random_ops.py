"""Programs that draw random numbers at every call are refused; those that only could are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import pytest
import torch
from torch import Tensor, nn

from linexport.errors import UnsupportedModelError
from linexport.sources import load_model
from linexport.trace.random_ops import reject_nondeterminism

X = torch.randn(2, 5, 8)


class Redraw(nn.Module):
    """Random features as some libraries compute them."""

    def forward(self, x: Tensor) -> Tensor:
        projection = torch.randn(8, 16)
        return (x @ projection).exp()


class Like(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Branch(nn.Module):
    """The draw is in a graph of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: t + torch.randn(5, 8), lambda t: t * 2, (x,))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("projection", torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        torch.randn(3)
        return (x @ self.projection).exp()


@pytest.mark.parametrize(
    ("module", "operator"),
    [
        (Redraw(), "aten.randn.default"),
        (Like(), "aten.rand_like.default"),
        (Branch(), "aten.randn.default"),
        (nn.Dropout(0.1).train(), "aten.dropout.default"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_a_draw_is_refused(module: nn.Module, operator: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        reject_nondeterminism(torch.export.export(module, (X,)))
    message = str(error.value)
    words = [operator, "register_buffer", "module.eval()", "favor+"]
    assert [w for w in words if w not in message] == []


def test_the_line_is_named() -> None:
    line = r"aten\.randn\.default at .*test_random_ops\.py:\d+"
    with pytest.raises(UnsupportedModelError, match=line):
        reject_nondeterminism(torch.export.export(Redraw(), (X,)))


@pytest.mark.parametrize(
    "module",
    [
        Frozen(),
        nn.Sequential(nn.Dropout(0.1), nn.RReLU()).eval(),
        nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval(),
    ],
    ids=["frozen", "eval", "attention"],
)
def test_what_draws_nothing_is_not(module: Any) -> None:
    reject_nondeterminism(torch.export.export(module, (X,)))


def onnx_file(folder: Path, node: str, constant: bool = True) -> Path:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20]>
        g (float[n, 8] x) => (float[n, 8] y)
        <bool on = {{{int(constant)}}}, float rate = {{0.5}}> {{
            {node}
        }}"""
    )
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize(
    "node",
    [
        "noise = RandomNormalLike <seed = 3.0> (x) y = Add (x, noise)",
        "noise = RandomUniform <shape = [8]> () y = Add (x, noise)",
        "y = Bernoulli (x)",
        "y = Dropout (x, rate, on)",
    ],
)
def test_an_onnx_file_that_draws_is_refused(tmp_path: Path, node: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"draws random numbers.*module\.eval"):
        load_model(onnx_file(tmp_path, node))


def test_dropout_of_nothing_draws_nothing() -> None:
    program = torch.export.export(nn.Dropout(0.0).train(), (torch.randn(2),))
    assert any("dropout" in str(node.target) for node in program.graph.nodes)
    reject_nondeterminism(program)


def test_dropout_that_is_off_draws_nothing(tmp_path: Path) -> None:
    load_model(onnx_file(tmp_path, "y = Dropout (x, rate, on)", constant=False))
