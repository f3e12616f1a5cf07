"""The GPU benchmark as far as it goes without a GPU: cases, floors, table, JSON, exit code."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from linexport.plugins.kernels.plan import ARCHITECTURES
from linexport.plugins.kernels.run import run

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    pytest.importorskip("triton", reason="kernels are written in Triton: pip install triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        return importlib.import_module("bench_gpu")


def test_every_case_has_a_plan_everywhere_and_inputs_the_oracle_takes(bench: ModuleType) -> None:
    for case in bench.CASES:
        for sm in ARCHITECTURES:
            assert bench.plans(case, sm).kernels()
        small = replace(case, batch=1, length=5, heads=2, width=8)
        given = small.tensors("cpu")
        wanted = small.wanted({name: x.double().numpy() for name, x in given.items()})
        found = small.results(given, ())
        assert {n: x.shape for n, x in wanted.items()} == {n: found[n].shape for n in wanted}
        element = getattr(torch, case.dtype)
        assert next(iter(given.values())).dtype == next(iter(found.values())).dtype == element


@pytest.mark.parametrize("first", ["prefill", "bidirectional", "decode", "convolution", "map"])
def test_the_kernels_give_what_a_case_wants(bench: ModuleType, first: str) -> None:
    """In Triton's interpreter, for the last case of each kind."""
    case = [c for c in bench.CASES if c.name.split()[0] == first][-1]
    case = replace(case, batch=1, length=min(case.length, 40), heads=2, width=8, dtype="float32")
    given = case.tensors("cpu")
    wanted = case.wanted({name: x.double().numpy() for name, x in given.items()})
    chosen = bench.plans(case, 90)
    found = case.results(given, chosen.in_place)
    run(chosen, {**given, **found}, case.batch, case.length, 132)
    for name, want in wanted.items():
        assert np.linalg.norm(found[name].numpy() - want) <= 1e-5 * np.linalg.norm(want), name


def test_a_state_is_continued_in_place_where_the_plan_allows_it(bench: ModuleType) -> None:
    case = replace(bench.CASES[0], batch=1, length=5, heads=2, width=8)
    given = case.tensors("cpu")
    allowed = bench.plans(case, 90).in_place
    assert allowed == ("present_state",)
    assert case.results(given, allowed)["present_state"] is given["past_state"]


def test_floors_are_bytes_over_bandwidth(bench: ModuleType) -> None:
    """B = 8, H = 16, T = 8192, d = 128 in bfloat16: four sequences, and a state in and out."""
    case = bench.CASES[0]
    assert case.bytes() == 4 * 8 * 8192 * 16 * 128 * 2 + 2 * 8 * 16 * 128 * 128 * 4
    row = bench.roofline(case, bench.COPY)
    assert row["floor_ms"] == pytest.approx(0.25, rel=0.03) and row["ms"] is None
    wanted = {c.name: c.target for c in bench.CASES if c.target}
    assert set(wanted.values()) == {1.6, 2.0, 1.3}


def test_the_readme_has_the_table_as_it_is_drawn(bench: ModuleType) -> None:
    text = (ROOT / "plugins" / "kernels" / "README.md").read_text()
    rows = [bench.line(bench.roofline(case, bench.COPY)) for case in bench.CASES]
    assert "\n".join([bench.HEADER, *rows]) in text


def test_a_peer_that_is_missing_or_fails_is_a_reason(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(case: Any) -> Any:
        raise ImportError("No module named 'fla'")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert bench.measured(missing, bench.CASES[0]) == (None, "ImportError: No module named 'fla'")


def test_without_a_gpu_it_compiles_writes_json_and_ends_with_five(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    case = replace(bench.CASES[3], name="small case", heads=1, width=16, target=1.6)
    monkeypatch.setattr(bench, "CASES", (case,))
    place = tmp_path / "bench.json"
    argv = ["bench_gpu.py", "--quick", "--sm", "89", "--json", str(place)]
    monkeypatch.setattr(sys, "argv", argv)
    assert bench.main() == 5
    said = capsys.readouterr().out
    assert "| small case | 0.0" in said and "| unmeasured | unmeasured | 1.6 |" in said
    result = json.loads(place.read_text())["result"]
    assert result["status"] == "no_gpu" and result["seconds"] > 0
    assert result["machine"]["triton"] and result["times"][0]["ms"] is None
    assert {row["kernel"] for row in result["findings"]} >= {"recurrent.step"}
    assert all(row["sm"] == 89 and row["spilled"] == 0 for row in result["findings"])


def test_an_architecture_without_kernels_is_an_error_and_no_traceback(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--sm", "75"])
    assert bench.main() == 4
    assert "compute capability 75" in capsys.readouterr().err
