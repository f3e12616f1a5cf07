"""The delta rule in users' code: triangular systems, inverses, and loops over chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import linexport
from linexport.errors import UnsupportedModelError
from linexport.graph.monomials import parse
from linexport.match.emit.whole_chunks import is_whole
from linexport.sources.factory import load_module
from linexport.sources.loaded_model import LoadedModel, Source
from linexport.trace import trace
from tests.support.formulations.delta_rules import (
    delta_rule_in_chunks_by_a_solve,
    gated_delta_rule_in_padded_chunks,
)
from tests.support.formulations.notation import WIDTH
from tests.support.independent import check_independently

pytestmark = pytest.mark.usefixtures("one_thread")

N = 8


def traced(module: nn.Module) -> onnxruntime.InferenceSession:
    source = Source("factory", "a", None, "b")
    sizes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    model = trace(LoadedModel(module, (torch.randn(2, 6, N),), {}, sizes, source)).model
    return onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )


class Solve(nn.Module):
    """A triangular system for the tokens."""

    def __init__(self, upper: bool, unit: bool, left: bool) -> None:
        super().__init__()
        self.given = {"upper": upper, "unitriangular": unit, "left": left}

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, N) -> (B, T, N), or (B, N, T) from the right."""
        matrix = x @ x.mT / N + 2 * torch.eye(x.shape[1])
        matrix = matrix.triu() if self.given["upper"] else matrix.tril()
        known = x if self.given["left"] else x.mT
        return torch.linalg.solve_triangular(matrix, known, **self.given)


@pytest.mark.parametrize(
    ("upper", "unit", "left"),
    [
        (False, True, True),
        pytest.param(False, False, True, marks=pytest.mark.slow),
        (True, False, False),
        pytest.param(True, True, True, marks=pytest.mark.slow),
    ],
)
def test_triangular_systems_of_any_length(upper: bool, unit: bool, left: bool) -> None:
    module = Solve(upper, unit, left)
    session = traced(module)
    for length in (1, 2, 3, 7, 64, 100):
        x = torch.randn(3, length, N, generator=torch.Generator().manual_seed(length))
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        expected = module(x.double()).numpy()
        assert np.abs(got - expected).max() <= 2e-6 * np.abs(expected).max()


class Same(nn.Module):
    """Tokens that are all alike: powers of the matrix have entries up to 1e37, its inverse 1."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, N)."""
        matrix = (torch.ones_like(x) @ torch.ones_like(x).mT / N).tril(-1) + torch.eye(x.shape[1])
        return torch.linalg.inv(matrix) @ x


def test_an_inverse_is_exact_where_powers_of_the_matrix_overflow() -> None:
    session = traced(Same())
    x = torch.randn(2, 128, N)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(got, Same()(x.double()).numpy(), rtol=0, atol=1e-5)


class Invert(nn.Module):
    """A matrix that is inverted, made in some way."""

    def __init__(self, make: object) -> None:
        super().__init__()
        self.make = make
        self.register_buffer("mask", torch.ones(6, 6).tril(-1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 6, N)."""
        return torch.inverse(self.make(self, x @ x.mT / N)) @ x


EYE = torch.eye(6)
TRIANGULAR = {
    "tril": lambda m, a: a.tril(-1) + EYE,
    "mask": lambda m, a: EYE - a * m.mask,
    "fill": lambda m, a: a.masked_fill(torch.ones(6, 6).triu(1).bool(), 0.0) + 9 * EYE,
    "where": lambda m, a: torch.where(m.mask == 0, 0.0, a) + EYE,
    "upper": lambda m, a: 9 * EYE + a.tril(-1).neg().triu(-6) * 0 + a.triu(1),
    "added": lambda m, a: written(a.tril(-1), EYE),
    "filled": lambda m, a: a.masked_fill_(torch.ones(6, 6).triu().bool(), 0.0).add_(9 * EYE),
}
FULL = {
    "add": lambda m, a: a.tril(-1) + EYE + 1e-3,
    "diagonal": lambda m, a: a.tril(1) + 9 * EYE,
    "written": lambda m, a: written(a.tril(-1) + EYE, a),
    "above": lambda m, a: above(a.tril(-1) + EYE),
    "row": lambda m, a: row_of(a.tril(-1) + EYE),
    "mask": lambda m, a: a.masked_fill(a > 0, 0.0) + 9 * EYE,
}


def written(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return x


def above(x: Tensor) -> Tensor:
    x.diagonal(1, -2, -1).add_(1)
    return x


def row_of(x: Tensor) -> Tensor:
    x[:, 0] += 1
    return x


@pytest.mark.parametrize("name", TRIANGULAR)
def test_inverses_of_what_is_triangular(name: str) -> None:
    module = Invert(TRIANGULAR[name])
    x = torch.randn(3, 6, N)
    source = Source("factory", "a", None, "b")
    loaded = LoadedModel(module, (x,), {}, ({0: Dim.DYNAMIC},), source)
    session = onnxruntime.InferenceSession(
        trace(loaded).model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(got, module(x).numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FULL)
def test_other_matrices_are_refused(name: str) -> None:
    source = Source("factory", "a", None, "b")
    x = (torch.randn(3, 6, N),)
    with pytest.raises(UnsupportedModelError, match="not seen to be triangular"):
        trace(LoadedModel(Invert(FULL[name]), x, {}, ({0: Dim.DYNAMIC},), source))


@pytest.mark.parametrize(
    ("size", "whole"),
    [
        ("seq", True),
        ("16*((seq//16))", True),
        ("64*((seq//64))", True),
        ("16*(((seq+15)//16))", False),
        ("(seq//16)", False),
        ("(seq+1)", False),
        ("(16*seq)//(8*(seq//8))", False),
        ("batch", False),
    ],
)
def test_sizes_in_whole_chunks(size: str, whole: bool) -> None:
    assert is_whole(parse(size), "seq") is whole


class Layers(nn.Module):
    """Two layers of a delta rule, with norms, projections and residuals."""

    def __init__(self, rule: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rule = rule
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.inside = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH)."""
        for norm, inside, out in zip(self.norms, self.inside, self.out, strict=True):
            x = x + out(self.rule(*inside(norm(x)).chunk(3, -1)))
        return x


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [delta_rule_in_chunks_by_a_solve, gated_delta_rule_in_padded_chunks]
)
def test_layers_of_chunks_are_converted(tmp_path: Path, rule: object) -> None:
    loaded = load_module((Layers(rule).eval(), (torch.randn(2, 64, WIDTH),)), "delta:rule")
    manifest = linexport.convert(loaded, tmp_path / "a", target="onnx", bench=False, threads=1)
    assert manifest.fused == {"LinearAttention": 2}
    if rule is gated_delta_rule_in_padded_chunks:
        assert manifest.streaming.passed
        check_independently(tmp_path / "a", Layers(rule), WIDTH)
