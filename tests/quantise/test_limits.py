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
    assert "--weights auto raises bits until the limit holds" in " ".join(result.out.split())
    whole = read(quantised("int8"))
    assert whole.quantisation
    unmet = replace(whole, quantisation=replace(whole.quantisation, max_kld=1e-9))
    assert "No choice of 4 and 8 bits is nearer; --max-kld" in verdict(unmet).sentence
    assert (place / "manifest.json").read_bytes() == before
    failed = tmp_path / "q.failed"
    lost = read(failed)
    assert lost.status == "quantisation_failed" and lost.parity and lost.parity.passed
    summary = " ".join(result.out.split())
    assert "Weights in int4 are past their limit: mean KL divergence" in summary
    assert "In float32 this model equals the PyTorch original" in summary
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
