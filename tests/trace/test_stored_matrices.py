"""Matrices that follow from weights by operators that ONNX does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.nn.utils import parametrizations

import linexport
from linexport.errors import UnsupportedModelError
from linexport.sources.factory import load_module
from tests.support.independent import check_independently

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
WIDTH = 8


class Layer(nn.Module):
    """Causal linear attention whose values go through a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 2 * WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def matrix(self):
        return torch.linalg.matrix_exp(self.weight.triu(1) - self.weight.triu(1).mT)

    def forward(self, x):
        q, k = (F.elu(y) + 1 for y in self.project(x).chunk(2, -1))
        return (q @ k.mT).tril() @ (x @ self.matrix())


class Bilinear(Layer):
    """(1 - A / 2)^-1 (1 + A / 2), of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", -torch.rand(WIDTH, WIDTH).tril())

    def matrix(self):
        eye = torch.eye(WIDTH, dtype=self.a.dtype)
        return torch.linalg.inv(eye - self.a / 2 + self.weight) @ (eye + self.a / 2)


class Solved(Layer):
    def matrix(self):
        return torch.linalg.solve(
            torch.eye(WIDTH, dtype=self.weight.dtype) + self.weight, self.weight
        )


class OfSeveralResults(Layer):
    def matrix(self):
        left, values, right = torch.linalg.svd(self.weight)
        return left @ torch.diag(values.clamp(max=1)) @ right + torch.linalg.qr(self.weight).Q


class Parametrized(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.mix = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH, bias=False))
        self.unit = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH, bias=False))
        self.scaled = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH, bias=False))

    def matrix(self):
        return self.mix.weight @ self.unit.weight @ self.scaled.weight


class Householder(Parametrized):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mix = parametrizations.orthogonal(layer, orthogonal_map="householder")


class Varying(Layer):
    """The matrix follows from the tokens."""

    def forward(self, x):
        return x @ torch.linalg.inv(torch.eye(WIDTH) + x.mT @ x)


@pytest.mark.parametrize(
    "kind", [Layer, Bilinear, Solved, OfSeveralResults, Parametrized, Householder]
)
def test_matrices_of_weights_are_weights(kind: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    manifest = linexport.convert(
        (model, (torch.randn(2, 12, WIDTH),), SHAPES), tmp_path / "made", bench=False, threads=1
    )
    assert manifest.status == "ok"
    assert manifest.fused["LinearAttention"] == 1
    check_independently(tmp_path / "made", model, WIDTH)


def test_an_inverse_that_follows_from_inputs_is_refused() -> None:
    source = load_module((Varying().eval(), (torch.randn(2, 12, WIDTH),), SHAPES), "varying")
    with pytest.raises(UnsupportedModelError, match="inverts a matrix"):
        linexport.convert(source, bench=False)
