"""An engine's life on a GPU, played on stand-ins for TensorRT and for the driver.

The engine computes with ONNX Runtime, in memory behind the driver's addresses: results must be
those of the ONNX model, and the log shows what was allocated, copied, captured and left behind.
"""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import linexport
from linexport.errors import UsageError
from linexport.targets.runtime.memory_pool import rounded_up
from linexport.targets.trt import engine_form
from tests.support import device_scenarios, stand_in_driver
from tests.support.device_scenarios import PROMPT, TOKENS
from tests.support.stand_in_driver import LEFT, between
from tests.support.stand_in_engine import ACTIVATIONS

pytestmark = pytest.mark.services

VOCABULARY, BYTES = 256, 1024
"""Logits of a token, and their bytes."""


@pytest.fixture(scope="module")
def artifact(rtx: Any, converted: Callable[..., Path]) -> Path:
    options = {"target": "tensorrt-rtx", "sms": (89,), "dims": ("seq=1:16:64", "batch=1:1:4")}
    return converted("language_model", **options)


@pytest.fixture(scope="module")
def reference(artifact: Path) -> linexport.Artifact:
    """The ONNX model of the artifact."""
    return linexport.load(artifact, engine=False, threads=1)


@pytest.fixture(scope="module")
def growing(rtx: Any, converted: Callable[..., Path]) -> Path:
    """A model with keys and values of softmax attention."""
    options = {"target": "tensorrt-rtx", "sms": (89,), "dims": ("seq=1:16:64",)}
    return converted("beside_softmax", **options)


@pytest.fixture(scope="module")
def play(
    artifact: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., SimpleNamespace]:
    """``play(name, library, place, as_name)``: result and log of a scenario, played once a name."""
    folder = tmp_path_factory.mktemp("stand-in")
    driver = stand_in_driver.compiled(folder)
    played: dict[tuple[str, str], SimpleNamespace] = {}

    def played_once(
        name: str, library: str = "tensorrt", place: Path = artifact, as_name: str = ""
    ) -> SimpleNamespace:
        key = as_name or name, library
        if key not in played:
            played[key] = stand_in_driver.play(driver, place, library, name, folder)
        return played[key]

    return played_once


SCENARIOS = (
    "generate",
    "stream",
    "pool",
    "on_device",
    "threads",
    "timed",
    "second_gpu",
    "calls",
    "not_captured",
)


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_left_on_the_device(play: Callable[..., Any], name: str) -> None:
    """Closed, or dropped without a word."""
    assert play(name).log[-1] == {"call": "end"} | dict.fromkeys(LEFT, 0)


@pytest.mark.parametrize("library", ["tensorrt-10", "tensorrt", "tensorrt-rtx"])
def test_the_text_is_that_of_the_onnx_model(
    play: Callable[..., Any], reference: Any, library: str
) -> None:
    wanted = list(reference.generate(PROMPT, max_tokens=TOKENS))
    assert play("generate", library).result == [wanted, wanted]


@pytest.mark.parametrize("library", ["tensorrt", "tensorrt-rtx"])
def test_only_tokens_and_logits_cross(play: Callable[..., Any], library: str) -> None:
    """The place of the token whose logits are read is copied where it is another."""
    log = play("generate", library).log
    copies = [
        (row["kind"], row["size"])
        for row in between(log, "first", "second token 12")
        if row["call"] == "copy"
    ]
    prompt = [("HtoD", 8 * len(PROMPT)), ("HtoD", 8), ("DtoH", BYTES)]
    first, step = [("HtoD", 8), ("HtoD", 8), ("DtoH", BYTES)], [("HtoD", 8), ("DtoH", BYTES)]
    assert copies == 2 * (prompt + first + (TOKENS - 2) * step)


@pytest.mark.parametrize("library", ["tensorrt", "tensorrt-rtx"])
def test_memory_is_taken_for_the_first_token_and_for_none_after_it(
    play: Callable[..., Any], library: str
) -> None:
    """Nor for the next text."""
    log = play("generate", library).log
    assert any(row["call"] == "alloc" for row in between(log, "first", "first token 1"))
    later = between(log, "first token 1", "second token 12")
    assert not [row for row in later if row["call"] in ("alloc", "free")]


KEPT = 5
"""Tokens of a row that logits are computed of at most, in an artifact with little room for them."""


@pytest.fixture(scope="module")
def tight(rtx: Any, factories: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact with room for the logits of five tokens of four rows."""
    place = tmp_path_factory.mktemp("tight") / "tight"
    options = {"target": "tensorrt-rtx", "sms": (89,), "dims": ("seq=1:16:64", "batch=1:1:4")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_form, "LOGITS_BYTES", KEPT * 4 * BYTES)
        linexport.convert(
            factories.source("language_model"), place, **options, bench=False, threads=1
        )
    return place


def test_an_engine_says_of_how_many_tokens_it_gives_logits(artifact: Path, tight: Path) -> None:
    for folder, most in ((artifact, 64), (tight, KEPT)):
        (engine,) = linexport.load(folder, engine=False).manifest.engines
        assert engine.logits == "output"
        kept = [profile.dims["logits_to_keep"] for profile in engine.profiles]
        assert kept == [(1, 1, most), (1, 1, 1)]


def test_logits_beyond_the_room_are_those_of_several_runs(
    play: Callable[..., Any], reference: Any, tight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_scenarios, "opened", lambda folder: reference)
    monkeypatch.setattr(device_scenarios, "mark", lambda name: None)
    monkeypatch.setattr(reference, "hold", lambda arrays: arrays)
    monkeypatch.setattr(reference, "close", lambda: None)
    wanted, played = device_scenarios.logits(Path()), play("logits", place=tight)
    assert len(wanted) == len(played.result)
    for found, expected in zip(played.result, wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    sizes = [
        [r["size"] for r in between(played.log, first, last) if r.get("kind") == "DtoH"]
        for first, last in (
            ("9 tokens, 0 kept", "1 tokens, 1 kept"),
            ("1 tokens, 1 kept", "6 tokens, 6 kept"),
            ("6 tokens, 6 kept", "stepped"),
        )
    ]
    rows = 2 * BYTES
    assert sizes == [[5 * rows, 4 * rows], [rows], [5 * rows, rows]]
    assert played.log[-1] == {"call": "end"} | dict.fromkeys(LEFT, 0)


def test_an_engine_without_places_gives_all_logits(
    play: Callable[..., Any], artifact: Path, reference: Any, tmp_path: Path
) -> None:
    """As those that were built before there were any."""
    before = Path(shutil.copytree(artifact, tmp_path / "before"))
    manifest = json.loads((before / "manifest.json").read_text())
    engine = manifest["engines"][0]
    assert engine.pop("logits")
    for profile in engine["profiles"]:
        assert profile["dims"].pop("logits_to_keep")
    (before / "manifest.json").write_text(json.dumps(manifest))
    found = play("generate", "tensorrt", before, "before")
    assert found.result == 2 * [list(reference.generate(PROMPT, max_tokens=TOKENS))]
    sizes = [r["size"] for r in found.log if r.get("kind") == "DtoH"]
    assert sizes[0] == BYTES * len(PROMPT)


def test_profiles_share_the_memory_of_their_activations(play: Callable[..., Any]) -> None:
    """One block as large as the larger of them needs."""
    taken = [row["size"] for row in play("generate").log if row["call"] == "alloc"]
    (block,) = [size for size in taken if size >= ACTIVATIONS]
    assert 2 * ACTIVATIONS <= block < 2.5 * ACTIVATIONS


def test_a_token_is_one_replay_of_a_graph(play: Callable[..., Any]) -> None:
    """States go back and forth between two places: two calls of each text are captured at most."""
    log = play("generate").log
    for token in range(3, TOKENS):
        rows = between(log, f"second token {token}", f"second token {token + 1}")
        calls = [row["call"] for row in rows if row["call"] != "capture"]
        assert calls == ["copy", "replay", "copy"]
    captured = [row for row in log if row["call"] == "capture"]
    assert 2 <= len(captured) <= 4  # the second text may find calls of the first


def test_tensorrt_rtx_captures_its_own_graphs_and_keeps_its_kernels(
    play: Callable[..., Any], artifact: Path
) -> None:
    assert not [r for r in play("generate", "tensorrt-rtx").log if r["call"] == "replay"]
    digest = linexport.load(artifact, engine=False).manifest.engines[0].sha256[:32]
    (kept,) = play("rtx_settings", "tensorrt-rtx").result["kept"]
    assert kept == f"{digest}-89.kernels"
    assert play("rtx_settings", "tensorrt-rtx").result["given"].startswith("kernels")
    assert play("rtx_settings", "tensorrt-rtx").result["strategy"] == "WHOLE_GRAPH_CAPTURE"


def test_a_stream_forks_goes_back_and_is_restored(
    play: Callable[..., Any], reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_scenarios, "opened", lambda folder: reference)
    monkeypatch.setattr(device_scenarios, "mark", lambda name: None)
    wanted = device_scenarios.stream(Path())
    assert np.allclose(play("stream").result, wanted, rtol=1e-6, atol=1e-6)


def test_sessions_of_a_pool_keep_their_states_on_the_device(
    play: Callable[..., Any], reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_scenarios, "opened", lambda folder: reference)
    monkeypatch.setattr(device_scenarios, "mark", lambda name: None)
    wanted = device_scenarios.pool(Path())
    found = play("pool")
    assert found.result.keys() == wanted.keys()
    for name, rows in wanted.items():
        assert np.allclose(found.result[name], rows, rtol=1e-5, atol=1e-5)
    steady = between(found.log, "decode 7", "decoded")
    copies = {(row["kind"], row["size"]) for row in steady if row["call"] == "copy"}
    assert copies == {("HtoD", 3 * 8), ("DtoH", 3 * BYTES)}
    assert not [row for row in steady if row["call"] in ("alloc", "free")]
    assert [r["call"] for r in between(found.log, "decode 11", "decoded")].count("replay") == 1


def test_inputs_on_the_device_give_outputs_there(play: Callable[..., Any]) -> None:
    """Token ids are read, to be checked; nothing else crosses."""
    found = play("on_device")
    assert found.result == {
        "shape": [1, len(PROMPT), VOCABULARY],
        "same": True,
        "capsule": True,
        "by DLPack": True,
        "rows": True,
    }
    copies = [
        (r["kind"], r["size"])
        for r in between(found.log, "on the GPU", "read")
        if r["call"] == "copy"
    ]
    assert copies == 3 * [("DtoH", 8 * len(PROMPT))]


def test_several_threads_call_one_engine(play: Callable[..., Any]) -> None:
    assert play("threads").result == []


def test_what_is_timed_is_a_step_of_generate(play: Callable[..., Any]) -> None:
    found = play("timed")
    assert found.result == {"launched_ms": True, "graph_ms": True, "graph_problem": None}
    rows = between(found.log, "timed", "end")
    calls = [row["call"] for row in rows if row["call"] not in ("alloc", "fill", "capture")]
    copies = [(row["kind"], row["size"]) for row in rows if row["call"] == "copy"]
    assert set(copies) == {("HtoD", 8), ("DtoH", BYTES)}
    assert calls[-6:] == ["copy", "replay", "copy"] * 2


def test_an_engine_runs_on_the_gpu_that_is_asked_for(
    play: Callable[..., Any], reference: Any
) -> None:
    text, problem = play("second_gpu").result
    assert text == list(reference.generate(PROMPT, max_tokens=3))
    assert problem == "This machine has 2 GPUs, 0 to 1; found device 2."
    assert {r["device"] for r in play("second_gpu").log if r["call"] == "alloc"} == {1}


def test_calls_in_place_and_calls_that_are_refused(play: Callable[..., Any]) -> None:
    found = play("calls").result
    assert found["in_place"] and found["on_device"] and found["same_memory"]
    kind, sizes, broken, closed = found["errors"]
    assert kind == "tokens has dtype int32; the engine takes int64."
    assert "beyond the engine's profiles" in sizes
    assert broken == "The engine does not run: "
    assert closed == "The artifact was closed. Load it again."


def test_an_engine_that_cannot_be_captured_is_launched(
    play: Callable[..., Any], reference: Any
) -> None:
    tokens, replayed, problem = play("not_captured").result
    assert tokens == list(reference.generate(PROMPT, max_tokens=8))
    assert replayed is None and problem.startswith("The engine does not run")


def test_a_lost_state_is_found_by_what_is_computed_from_it(play: Callable[..., Any]) -> None:
    """A row with infinity in its state is stopped, and the other goes on."""
    assert play("lost_state").result == {"rows": [1], "stopped": [1], "finite": [True, False]}


def test_states_that_grow_stay_on_the_device(play: Callable[..., Any], growing: Path) -> None:
    """They take new memory now and then."""
    found = play("grow", place=growing)
    reference, x = linexport.load(growing, engine=False, threads=1), np.random.default_rng(0)
    tokens = x.standard_normal((1, 40, 8)).astype(np.float32)
    wanted = next(iter(reference.run(tokens).values()))[0, [7, *range(8, 40)]]
    assert np.allclose(found.result, wanted, rtol=1e-4, atol=1e-5)
    rows = between(found.log, "step 9", "stepped")
    copies = {(row["kind"], row["size"]) for row in rows if row["call"] == "copy"}
    assert copies == {("HtoD", 8 * 4), ("DtoH", 8 * 4)}
    assert len([row for row in rows if row["call"] == "alloc"]) < 40
    assert found.log[-1] == {"call": "end"} | dict.fromkeys(LEFT, 0)


def test_a_past_longer_than_a_call(
    play: Callable[..., Any], growing: Path, converted: Callable[..., Path]
) -> None:
    """``--dim past`` of a model whose calls take 8 tokens: 39 rows from earlier calls."""
    options = {"target": "tensorrt-rtx", "sms": (89,), "dims": ("seq=1:8:8", "past=0:16:64")}
    folder = converted("beside_softmax", **options)
    (engine,) = linexport.load(folder, engine=False).manifest.engines
    assert [p.dims["past"] for p in engine.profiles] == 2 * [(0, 16, 64)]
    found = play("grow", "tensorrt-rtx", folder).result
    assert np.allclose(found, play("grow", place=growing).result, rtol=1e-4, atol=1e-5)


def test_a_past_of_what_has_none_is_refused(
    rtx: Any, factories: SimpleNamespace, tmp_path: Path
) -> None:
    for target, source, said in (
        ("ort", "beside_softmax", "ort takes any past"),
        ("tensorrt-rtx", "language_model", "no state of this model grows"),
    ):
        with pytest.raises(UsageError, match=said):
            linexport.convert(
                factories.source(source),
                tmp_path / target,
                target=target,
                dims=("past=0:1:9",),
                bench=False,
                threads=1,
            )
        assert not (tmp_path / target).exists()


def test_states_that_grow_stay_on_the_device_in_a_pool(
    play: Callable[..., Any], growing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when other sessions share the calls: what is moved is copied there."""
    monkeypatch.setattr(
        device_scenarios, "opened", lambda f: linexport.load(f, engine=False, threads=1)
    )
    monkeypatch.setattr(device_scenarios, "mark", lambda name: None)
    wanted = device_scenarios.grow_pool(growing)
    found = play("grow_pool", place=growing)
    assert found.result.keys() == wanted.keys()
    for name, rows in wanted.items():
        assert np.allclose(found.result[name], rows, rtol=1e-4, atol=1e-5)
    log = found.log
    rows = [*between(log, "decode 6", "leave"), *between(log, "left", "done")]
    copies = {(row["kind"], row["size"]) for row in rows if row["call"] == "copy"}
    largest = 3 * 8 * 4 * 2  # tokens of three sessions, in or out
    assert all(kind == "DtoD" or size <= largest for kind, size in copies)
    assert any(kind == "DtoD" for kind, _ in copies)
    assert log[-1] == {"call": "end"} | dict.fromkeys(LEFT, 0)


def test_validate_compares_what_is_run_with_states_on_the_device(play: Callable[..., Any]) -> None:
    found = play("validated")
    checked, reason, error = found.result
    assert checked and reason is None and error < 1e-5
    assert any(row["call"] == "replay" for row in found.log)
    assert found.log[-1] == {"call": "end"} | dict.fromkeys(LEFT, 0)


def test_memory_of_a_growing_state_is_a_quarter_larger_at_most() -> None:
    """So that few calls take new memory."""
    wanted = range(1000, 10**6 + 1, 1000)
    sizes = [rounded_up(size) for size in wanted]
    assert all(n <= s <= 1.25 * n + 256 for n, s in zip(wanted, sizes, strict=True))
    assert len({*sizes}) < 45


def test_a_device_without_an_engine_is_refused(artifact: Path) -> None:
    with pytest.raises(UsageError, match="is run by ONNX Runtime"):
        linexport.load(artifact, engine=False, device=1)


@pytest.mark.parametrize(
    "name",
    ["Runtime", "ICudaEngine", "IExecutionContext", "IRuntimeConfig", "IRuntimeCache"],
)
def test_the_stand_in_has_no_method_that_tensorrt_lacks(rtx: Any, name: str) -> None:
    """What the session calls is what the installed library has."""
    tree = ast.parse((stand_in_driver.ROOT / "tests/support/stand_in_engine.py").read_text())
    made = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    methods = [f.name for f in made.body if isinstance(f, ast.FunctionDef)]
    own = {n for n in methods if not n.startswith("_")}
    assert own and own <= {*dir(getattr(rtx, name))}


def test_strategies_are_those_of_tensorrt(rtx: Any) -> None:
    assert {"STATIC", "USER_MANAGED"} <= {*rtx.ExecutionContextAllocationStrategy.__members__}
    assert {"DISABLED", "WHOLE_GRAPH_CAPTURE"} <= {*rtx.CudaGraphStrategy.__members__}
    assert isinstance(rtx.IRuntimeConfig.cuda_graph_strategy, property)
