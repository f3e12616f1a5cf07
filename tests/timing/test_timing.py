"""Timing: baselines take turns, failures become reasons, memory is measured apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from linexport.artifact.checked import checked_artifact
from linexport.conversion import revalidate
from linexport.manifest.measured import RUNNERS
from linexport.timing import baselines
from linexport.timing.admission import Admission
from linexport.timing.baselines import Bench
from linexport.timing.latency import BenchPlan, Settings, interleaved, latency_table, measure
from linexport.timing.peak_memory import peak_megabytes

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = Settings(warmup=1, repeats=3, threads=1)
QUICK = BenchPlan("full", SETTINGS)


def test_baselines_take_turns_and_warm_calls_do_not_count() -> None:
    calls: list[str] = []
    times = interleaved({n: lambda n=n: calls.append(n) for n in "ab"}, Settings(2, 5))
    assert calls == list("aabb" * 7)
    assert [len(t) for t in times.values()] == [5, 5]


def test_the_first_call_after_a_pause_does_not_count() -> None:
    """Its threads sleep: here it takes a hundred times as long."""
    asleep = [True]

    def call() -> None:
        time.sleep(0.2 if asleep[0] else 0.002)
        asleep[0] = False

    def other() -> None:
        asleep[0] = True

    times = interleaved({"call": call, "other": other}, Settings(0, 2))
    assert max(times["call"]) < 200


def test_a_long_call_is_not_made_uncounted() -> None:
    calls: list[str] = []

    def call() -> None:
        calls.append("long")
        time.sleep(0.06)

    assert len(interleaved({"long": call}, Settings(0, 3, lead_in=2))["long"]) == 3
    assert len(calls) == 5  # before the first it is not known how long they take


def test_a_slow_baseline_stops_early_with_three_calls_that_count() -> None:
    calls: list[str] = []
    both = {"slow": lambda: calls.append("slow"), "fast": lambda: calls.append("fast")}
    times = interleaved(both, Settings(1, 20, seconds=-1.0, lead_in=0))
    assert calls.count("slow") == 3
    assert len(times["slow"]) == 3


def test_a_call_that_takes_too_long_is_not_repeated() -> None:
    calls: list[str] = []
    both = {"artifact": lambda: calls.append("fast"), "pytorch": lambda: calls.append("slow")}
    row = measure(both, {}, Settings(1, 4, patience=-1.0))
    assert calls == ["fast", "slow"]
    assert row.pytorch_ms is not None and row.pytorch_ms > 0 and row.reasons == {}


def test_what_cannot_run_gets_a_reason_in_place_of_numbers() -> None:
    def broken() -> None:
        raise ValueError("too long\nand more")

    row = measure(
        {"artifact": lambda: None, "plain_export": None, "pytorch": broken},
        {"plain_export": "it was not made"},
        SETTINGS,
    )
    assert row.artifact_ms is not None and row.artifact_p90_ms is not None
    assert row.artifact_p90_ms >= row.artifact_ms
    assert row.plain_export_ms is row.pytorch_ms is row.pytorch_p90_ms is None
    assert row.reasons == {"plain_export": "it was not made", "pytorch": "too long"}


def test_a_table_has_a_row_per_length() -> None:
    rows = latency_table((4, 9), lambda n: {"artifact": lambda: None}, {}, SETTINGS, batch=2)
    assert [(r.length, r.batch) for r in rows] == [(4, 2), (9, 2)]


@pytest.fixture
def bench(
    converted: Callable[..., Path], factories: SimpleNamespace, tmp_path: Path
) -> Callable[[str], Bench]:
    def open_bench(name: str) -> Bench:
        folder = converted(name)
        watch = SimpleNamespace(stage=lambda name: _nothing())
        checked = checked_artifact(folder)
        tested = revalidate.reopen(checked, factories.source(name), 1, False, watch)
        native = checked.manifest.trusts_library
        return Bench(
            tested, folder / "model.onnx", checked.manifest.target, native, tmp_path, QUICK
        )

    return open_bench


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def test_all_baselines_are_measured_at_every_length(bench: Callable[[str], Bench]) -> None:
    runner = bench("small")
    runner.export_plainly()
    rows = runner.latency((8, 33))
    assert [(r.length, r.batch) for r in rows] == [(8, 1), (33, 1)]
    for row in rows:
        assert all(row.median(name) > 0 for name in RUNNERS)
        assert row.reasons == {}
    assert runner.plain_nodes and runner.plain_nodes > 1


def test_a_plain_export_that_is_wrong_is_not_timed(
    bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = bench("small")
    runner.export_plainly()
    assert runner.plain is not None
    right = runner.plain.run
    monkeypatch.setattr(
        runner.plain, "run", lambda fed: {k: 1.001 * v for k, v in right(fed).items()}
    )
    row = runner.latency((8,))[0]
    assert row.plain_export_ms is None
    assert "wrong at this size: relative error 1" in row.reasons["plain_export"]


@pytest.mark.services
def test_a_slow_original_is_not_waited_for_at_longer_lengths(
    bench: Callable[[str], Bench],
) -> None:
    """The plain export is then compared with the artifact."""
    runner = bench("small")
    runner.export_plainly()
    runner.admission = Admission(longest=2.0)
    runner.admission.slowest["pytorch"] = (8, 1.0)
    short, long = runner.latency((8, 33))
    assert short.pytorch_ms > 0 and long.pytorch_ms is None
    assert "not waited for: it took 1.0 s at 8 tokens, so 4 s" in long.reasons["pytorch"]
    assert long.plain_export_ms > 0
    (memory,) = runner.memory((33,))
    assert memory.io_mb == pytest.approx(2 * 33 * 8 * 4 / 2**20, rel=0.2)
    assert memory.pytorch_mb is None and "not waited for" in memory.reasons["pytorch"]


def test_a_slow_plain_export_is_not_waited_for_at_longer_lengths(
    bench: Callable[[str], Bench],
) -> None:
    runner = bench("small")
    runner.export_plainly()
    runner.admission = Admission(longest=0.0)
    short, long = runner.latency((8, 33))
    assert short.plain_export_ms > 0 and long.plain_export_ms is None
    assert "; 0 s are allowed" in long.reasons["plain_export"]
    assert long.artifact_ms > 0


def test_a_plain_export_that_fails_says_why(
    bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> object:
        raise RuntimeError("no such thing\nas this")

    monkeypatch.setattr(baselines.trace, "plain_export", fail)
    runner = bench("small")
    runner.export_plainly()
    row = runner.latency((8,))[0]
    assert row.plain_export_ms is None
    assert "no such thing" in row.reasons["plain_export"]
    assert row.pytorch_ms > 0


def test_lengths_the_model_does_not_take_are_left_out(bench: Callable[[str], Bench]) -> None:
    runner = bench("named")
    assert [r.length for r in runner.latency((8, 512, 513))] == [8, 512]
    assert runner.latency((8,))[0].batch == 1
    assert [r.length for r in runner.latency((9999,))] == [16]


def test_the_batch_of_a_fixed_batch_is_said(bench: Callable[[str], Bench]) -> None:
    assert [(r.length, r.batch) for r in bench("fixed_batch").latency((8,))] == [(8, 3)]
    assert [(r.length, r.batch) for r in bench("all_fixed").latency()] == [(16, 3)]


def test_one_token_is_measured_with_states(bench: Callable[[str], Bench]) -> None:
    row = bench("language_model").decode()
    assert row and row.artifact_ms > 0 and row.pytorch_ms > 0
    assert row.plain_export_ms is None and "no state" in row.reasons["plain_export"]
    row = bench("small").decode()
    assert row and row.pytorch_ms is None and "no step" in row.reasons["pytorch"]
    assert bench("averaging").decode() is None


def test_peak_memory_is_measured_in_a_process_of_its_own(
    converted: Callable[..., Path], tmp_path: Path
) -> None:
    for name, length in (("small", 4), ("large", 400_000)):
        state = {"s": np.zeros((1, 2, 4, 4), np.float32), "z": np.zeros((1, 2, 4), np.float32)}
        x = np.zeros((1, length, 8), np.float32)
        np.savez(tmp_path / f"{name}.npz", allow_pickle=False, x=x, **state)
    model = str(converted("small") / "model.onnx")
    files = tmp_path / "large.npz", tmp_path / "small.npz"
    peak, reason = peak_megabytes("onnx", model, *files)
    assert reason is None
    assert peak is not None and peak > 400_000 * 8 * 4 / 2**20
    peak, reason = peak_megabytes("onnx", str(tmp_path / "missing.onnx"), *files)
    assert peak is None and reason is not None and "missing.onnx" in reason
