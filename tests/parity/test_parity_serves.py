"""Comparisons that neither fail an artifact for being better, nor leave a failure unexplained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import linexport
from linexport.manifest import read
from linexport.manifest.proof import DivergenceRecord
from linexport.parity.cases import Case
from linexport.parity.noise.low_precision_ops import lost_to_operators
from linexport.parity.reference.module import Reference
from linexport.parity.reference.outputs import run_reference
from linexport.parity.reference.plain_export import run_plain_export
from linexport.parity.tolerances import TOLERANCES
from linexport.report.verdict import parity_check, verdict
from linexport.sources.factory import load_module
from linexport.trace import trace

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.services
def test_an_original_that_overflows_at_4097_tokens_does_not_fail_the_artifact(
    converted: Callable[..., Path],
) -> None:
    manifest = read(converted("quotients"))
    assert manifest.status == "ok" and manifest.fused.get("LinearAttention") == 1
    said = "overflows in float32 on the random inputs at batch 1, seq 4097 ("
    assert any(said in w for w in manifest.warnings)
    long = [c for c in manifest.parity.cases if c.length == 4097]
    assert [c.reference for c in long] == ["float64"] and long[0].passed
    artifact = linexport.load(manifest.artifact, threads=1)
    found = artifact.run(np.random.default_rng(0).standard_normal((1, 6000, 8)).astype(np.float32))
    assert np.isfinite(found["output"]).all()


class Gives:
    """A reference that gives one value, in some precision."""

    denominator = None

    def __init__(self, dtype: torch.dtype, value: float) -> None:
        self.dtype, self.name, self.value = dtype, str(dtype).removeprefix("torch."), value

    def __call__(self, inputs: Any) -> list[np.ndarray]:
        return [np.full(4, self.value)]


def test_an_original_that_is_mostly_rounding_is_compared_in_float64_alone() -> None:
    """At random inputs of unit variance as well, where its float32 says nothing of another."""
    tolerance, notes = TOLERANCES["float32"], []
    references: list[Any] = [Gives(torch.float32, 1.1), Gives(torch.float64, 1.0)]
    case = Case("random", {"seq": 4}, 0)
    [found] = run_reference(references, case, ((), {}), tolerance, notes)
    assert found.name == "float64"
    assert "compared in float64 only" in notes[-1]
    references[0].value = 1.001  # of which four times are within the two in a hundred
    assert len(run_reference(references, case, ((), {}), tolerance, notes)) == 2


@pytest.mark.parametrize(
    ("magnitude", "value", "excused"),
    [(100.0, np.nan, True), (100.0, np.inf, False), (1.0, np.nan, False)],
)
def test_numbers_in_place_of_a_quotient_of_zeros_are_no_error(
    magnitude: float, value: float, excused: bool
) -> None:
    """At inputs a hundred times too large alone, and not where the original is infinite."""
    references: list[Any] = [Gives(torch.float32, value), Gives(torch.float64, value)]
    case = Case("large", {"seq": 4}, 0, magnitude)
    found = run_reference(references, case, ((), {}), TOLERANCES["float32"], [])
    assert [output.overflows for output in found] == [excused, excused]


@pytest.mark.services
def test_limits_are_those_of_the_lowest_precision_inside(
    converted: Callable[..., Path], factories: Any
) -> None:
    manifest = read(converted("half_inside"))
    assert manifest.status == "ok"
    tolerance = manifest.parity.tolerance
    # A part of the original in half precision: it is run as it is, and in float32 and float64.
    assert (tolerance.dtype, tolerance.whole) == ("float16", True)
    assert {c.reference for c in manifest.parity.cases} == {"float16", "float32", "float64"}
    assert tolerance.relative == TOLERANCES["float16"].relative
    again = linexport.validate(
        converted("half_inside"), source=factories.source("half_inside"), threads=1
    )
    assert again.status == "ok" and again.parity.tolerance == tolerance


@pytest.mark.services
def test_a_failure_names_the_token_the_line_and_the_plain_export(
    factories: Any,
    miscompile: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("linexport.parity.diverge.run_plain_export", run_plain_export)
    miscompile("onnx", lambda n: replace(n, attributes={**n.attributes, "scale": 0.3}))
    manifest = linexport.convert(
        factories.source("quotients"), tmp_path / "out", target="onnx", bench=False, threads=1
    )
    assert manifest.status == "parity_failed"
    first = manifest.parity.first_divergence
    assert first is not None and (first.row, first.position) == (0, 0)
    assert first.plain_relative_error is not None and first.plain_relative_error < 1e-4
    text = verdict(manifest).sentence
    assert "at token 0" in text and "PyTorch's own ONNX export does not differ" in text
    bad = sum(not case.passed for case in manifest.parity.cases)
    assert parity_check(manifest).detail.startswith(f"{bad} of {len(manifest.parity.cases)} checks")


class Halves(torch.nn.Module):
    """A Fourier transform, doubled, and back: ONNX Runtime cannot run its plain export."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x, dim=1) * 2, n=x.shape[1], dim=1)


def test_a_plain_export_that_does_not_run_is_named_and_silent(
    converted: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    dynamic = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    loaded = load_module((Halves(), (torch.randn(2, 16, 8),), dynamic), "halves:layer")
    tested: Any = SimpleNamespace(loaded=loaded, tolerance=TOLERANCES["float32"])
    plain = run_plain_export(tested, trace(loaded), ((torch.randn(1, 4097, 8),), {}))
    assert plain.relative_error is None and plain.failure is not None
    assert "DFT" in plain.failure and "\n" not in plain.failure
    assert not capfd.readouterr().err
    manifest = read(converted("quotients"))
    case = replace(manifest.parity.cases[0], passed=False)
    first = DivergenceRecord("y", "node", "DFT", 1.0, None, plain_failure=plain.failure)
    failed = replace(manifest.parity, passed=False, cases=(case,), first_divergence=first)
    text = verdict(replace(manifest, status="parity_failed", parity=failed)).sentence
    assert f"PyTorch's own ONNX export does not run: {plain.failure}" in text


class FadingScores(torch.nn.Module):
    """Decays of all pairs of tokens, as differences of sums that float32 has few digits of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = torch.nn.functional.logsigmoid(x[..., 0] - 1).cumsum(1)
        faded = (sums[:, :, None] - sums[:, None]).masked_fill(
            torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -torch.inf
        )
        return (x @ x.transpose(1, 2) * faded.exp()) @ x


@pytest.mark.slow
def test_a_case_that_fails_is_run_in_float64_however_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_reference, "__defaults__", (-1.0,))
    dims = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    source = (FadingScores(), (torch.randn(2, 16, 4),), dims)
    loaded = load_module(source, "fading")
    manifest = linexport.convert(loaded, tmp_path / "artifact", bench=False, threads=1)
    assert manifest.status == "ok"
    assert manifest.parity is not None
    second = {case.length for case in manifest.parity.cases if case.reference == "float64"}
    assert second == {4097}


class NormedGates(torch.nn.Module):
    """Attention of SiLU features whose output is divided by its norm, as TransNormer's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = torch.nn.functional.silu(x)
        out = (q @ q.transpose(1, 2)).tril() @ x
        return out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + 1e-5)


def test_what_a_norm_makes_of_coarse_sigmoids_is_measured() -> None:
    loaded = load_module((NormedGates(), (torch.zeros(3, 37, 2),)), "gates")
    single, double = (Reference(loaded, kind) for kind in (torch.float32, torch.float64))
    drawn = torch.randn(3, 37, 2, generator=torch.Generator().manual_seed(0))
    inputs: list[Any] = [((scale * drawn,), {}) for scale in (1.0, 100.0)]
    usual, large = (lost_to_operators(single, given, double(given)) for given in inputs)
    assert usual[0] < 1e-4 < large[0]


@pytest.mark.slow
def test_sigmoids_of_the_runtime_do_not_fail_an_artifact_of_large_inputs(tmp_path: Path) -> None:
    dims = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    loaded = load_module((NormedGates(), (torch.randn(2, 16, 2),), dims), "gates")
    manifest = linexport.convert(
        loaded, tmp_path / "artifact", target="onnx", bench=False, threads=1
    )
    assert manifest.status == "ok" and manifest.fused == {"LinearAttention": 1}
    assert any("sums as coarse as ONNX Runtime's" in text for text in manifest.warnings)


class Turned(torch.nn.Module):
    """Angles that are added up, as of a rotation whose steps depend on the token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos((1000.3 * x).cumsum(1))


def test_what_a_cosine_makes_of_coarse_cumulative_sums_is_measured() -> None:
    loaded = load_module((Turned(), (torch.zeros(3, 37, 2),)), "turned")
    single, double = (Reference(loaded, kind) for kind in (torch.float32, torch.float64))
    x = torch.rand(3, 37, 2, generator=torch.Generator().manual_seed(0))
    exact = double(((x,), {}))
    own = float(np.abs(single(((x,), {}))[0] - exact[0]).max())
    (lost,) = lost_to_operators(single, ((x,), {}), exact)
    artifact = np.cos(np.cumsum(np.float32(1000.3) * x.numpy(), 1, dtype=np.float32))
    assert 1.5 * own < np.abs(artifact - exact[0]).max() < 2 * lost


def test_the_epsilon_of_a_norm_is_that_of_the_original() -> None:
    """torch takes that of the dtype where none is given, and float64's makes another function."""
    norm = torch.nn.RMSNorm(4)
    x = torch.full((1, 4), 1e-4)
    loaded = load_module((norm, (x,)), "a:norm")
    with torch.no_grad():
        expected = norm(x).numpy()
    (found,) = Reference(loaded, torch.float64)(((x,), {}))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.max() < 0.5


def test_tensors_without_a_dtype_are_float64_in_the_reference() -> None:
    class State(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros(x.shape[0], 4).addmm(x, torch.eye(4))

    x = torch.randn(3, 4)
    (found,) = Reference(load_module((State(), (x,)), "a:state"), torch.float64)(((x,), {}))
    assert found.dtype == np.float64 and torch.get_default_dtype() == torch.float32


def test_an_original_that_overflows_in_float64_as_well_does_not_fail_the_artifact(
    tmp_path: Path,
) -> None:
    """A selective scan as exp(A) cumsum(b exp(-A)): float64 holds some of the tokens."""

    class Scan(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = -torch.nn.functional.softplus(x).cumsum(1)
            return total.exp() * (x * (-total).exp()).cumsum(1)

    sizes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    loaded = load_module((Scan(), (torch.randn(2, 16, 4),), sizes), "a:scan")
    manifest = linexport.convert(loaded, tmp_path / "artifact", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.fused == {"LinearAttention": 1}
    assert manifest.streaming is not None and manifest.streaming.passed
    long = [c for c in manifest.parity.cases if c.length == 4097]
    assert [(c.reference, c.passed) for c in long] == [("float64", True)]
    assert any("of them in float64 as well" in w for w in manifest.warnings)
