"""Quantised artifacts past a limit: what is told of them, and what would hold."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import linexport
from linexport.ci import outcome
from linexport.errors import ParityError
from linexport.manifest import read
from linexport.manifest.quantisation import AlternativeRecord
from linexport.report.quantisation import advice
from linexport.report.verdict import verdict
from tests.support.command_line import Result

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_limit_that_cannot_be_met_fails_and_keeps_the_earlier_artifact(
    cli: Callable[..., Result], exact: Path, quantised: Callable[[str], Path], tmp_path: Path
) -> None:
    place = shutil.copytree(quantised("int8"), tmp_path / "q")
    before = (place / "manifest.json").read_bytes()
    limits = ("--weights", "int4", "--max-kld", "1e-9", "--overwrite")
    result = cli("quantize", exact, "-o", place, *limits)
    assert result.code == 3 and "above the 1.0e-09 allowed" in " ".join(result.out.split())
    assert (place / "manifest.json").read_bytes() == before
    failed = tmp_path / "q.failed"
    lost = read(failed)
    assert lost.status == "quantisation_failed" and lost.parity and lost.parity.passed
    summary = " ".join(result.out.split())
    assert "Weights in int4 are past their limit: mean KL divergence" in summary
    assert "In float32 this model equals the PyTorch original" in summary
    assert "No other weights of linexport would hold: int8 has about" in summary
    assert "Parity ✓ passed" in summary and "Weights ✗ failed mean KL divergence" in summary
    told = "equals its original in float32, and is past the limit of what its quantised weights"
    with pytest.raises(ParityError, match=told):
        linexport.load(failed)
    for command in (
        ("generate", failed, "--prompt", "import "),
        ("package", failed, "--for", "triton", "-o", tmp_path / "packaged"),
        ("quantize", failed, "-o", tmp_path / "again"),
    ):
        result = cli(*command)
        assert result.code == 3 and told in " ".join(result.err.split())
    assert told in " ".join(cli("inspect", failed).out.split())
    page = (failed / "report.html").read_text()
    assert "are past their limit" in page and "does not equal" not in page


def test_ci_counts_the_numbers_of_quantised_weights_that_have_a_limit(
    quantised: Callable[[str], Path],
) -> None:
    manifest = read(quantised("int8"))
    record = manifest.quantisation
    assert record and record.divergence and record.drift
    found = [c for c in outcome.checks(manifest) if c.group == "quantisation"]
    assert [c.passed for c in found] == [True, None] and "--max-kld limits it" in found[1].found
    limited = replace(record, max_kld=record.divergence.mean / 2)
    checks = outcome.checks(replace(manifest, quantisation=limited))
    [failed] = [c for c in checks if c.passed is False]
    assert (failed.group, failed.name) == ("quantisation", "mean KL divergence")
    assert failed.allowed == f"{limited.max_kld:.1e}"
    nan = replace(record, drift=replace(record.drift, streaming=float("nan")))
    assert not nan.passed


@pytest.mark.parametrize(
    ("weights", "finer", "advised"),
    [("int4", "int8", "auto or --weights int8"), ("bf16", "fp16", "fp16")],
)
def test_advice_names_weights_that_were_measured_to_hold(
    weights: str,
    finer: str,
    advised: str,
    exact: Path,
    quantised: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """The limit lies between two choices of which both artifacts are there."""
    coarse, fine = mean(quantised(weights)), mean(quantised(finer))
    limit = 0.95 * coarse
    manifest = linexport.quantize(exact, tmp_path / "q", weights=weights, max_kld=limit, threads=1)
    record = manifest.quantisation
    assert manifest.status == "quantisation_failed" and record and record.divergence
    sentence = verdict(manifest).sentence
    assert f"--weights {advised} would hold: {finer} has about" in sentence
    assert f"--max-kld {1.1 * record.divergence.mean:.2g} would hold for {weights}" in sentence
    [other] = record.alternatives
    assert other.weights == finer and 0.9 * fine < other.divergence < 1.5 * fine < 1.5 * limit


def test_auto_is_not_advised_where_its_last_choice_failed(quantised: Callable[[str], Path]) -> None:
    manifest = read(quantised("auto"))
    assert manifest.quantisation
    known = (AlternativeRecord("bf16", 1e-6), AlternativeRecord("fp16", 1e-8))
    for tried, limit, advised in (
        (known[:1], 1e-5, "--weights bf16 would hold: bf16 has about 1.0e-06"),
        (known, 1e-7, "--weights fp16 would hold"),
        (known, 1e-9, "No other weights of linexport would hold: bf16 has about 1.0e-06, fp16"),
        ((), 1e-9, "--max-kld"),
    ):
        record = replace(manifest.quantisation, max_kld=limit, alternatives=tried)
        assert advice(record).startswith(advised)
    assert advice(replace(manifest.quantisation, max_kld=1.0)) == ""


def mean(artifact: Path) -> float:
    """Return the mean divergence of an artifact."""
    record = read(artifact).quantisation
    assert record and record.divergence
    return record.divergence.mean
