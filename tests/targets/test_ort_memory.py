"""States on an execution provider's device, through ONNX Runtime's own memory and copies.

The CPU's provider stands in for others: its device's memory is the host's, and every state goes
through the calls that those of a GPU would.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import linexport
from linexport.conversion import revalidate
from linexport.targets.runtime import cuda_graphs
from linexport.targets.runtime.device_array import DeviceArray
from linexport.targets.runtime.device_memory import OrtMemory
from linexport.targets.runtime.options import LOGITS_FROM
from linexport.timing.latency import SHORT
from tests.support import device_scenarios

pytestmark = pytest.mark.usefixtures("one_thread", "host")


@pytest.fixture
def host(host_provider: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_scenarios, "mark", lambda name: None)


@pytest.mark.parametrize(
    ("name", "source", "options"),
    [
        ("stream", "language_model", {}),
        ("pool", "language_model", {}),
        ("pool", "language_model", {"target": "ort-cuda", "packed_batches": True}),
        ("grow", "beside_softmax", {}),
        ("grow_pool", "beside_softmax", {}),
    ],
)
def test_results_are_those_of_arrays_on_the_host(
    converted: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    source: str,
    options: dict[str, Any],
) -> None:
    folder, found = converted(source, **options), []
    for provider, captures in (("cpu", False), ("host", False), ("host", True)):
        monkeypatch.setattr(
            device_scenarios,
            "opened",
            lambda f, p=provider, c=captures: _opened(f, p, c),
        )
        found.append(_rows(getattr(device_scenarios, name)(folder)))
    for got in found[1:]:
        assert found[0].keys() == got.keys()
        for key, rows in found[0].items():
            assert np.allclose(got[key], rows, rtol=1e-4, atol=1e-5), key


def _opened(folder: Path, provider: str, captures: bool = True) -> Any:
    """An artifact, on a provider with calls that are bound as those are that a GPU captures."""
    model = linexport.load(folder, threads=1, provider=provider)
    if captures:
        model._session.memory = OrtMemory(model._session.inner, captures=True)
    return model


def _rows(result: Any) -> dict[str, Any]:
    return result if isinstance(result, dict) else dict(enumerate(result))


def test_states_alternate_between_two_places_and_no_memory_is_taken_after_the_first(
    converted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    real = onnxruntime.OrtValue.ortvalue_from_shape_and_type

    def counted(*arguments: Any, **keywords: Any) -> Any:
        taken.append(arguments)
        return real(*arguments, **keywords)

    monkeypatch.setattr(onnxruntime.OrtValue, "ortvalue_from_shape_and_type", counted)
    model = linexport.load(converted("language_model"), threads=1, provider="host")
    live, token = model.stream(), np.ones((1, 1), np.int64)
    live.step(token)
    first = len(taken)
    assert first == 2 * len(model.states)
    places: dict[str, list[int]] = {name: [] for name in model.states}
    for _ in range(8):
        live.step(token)
        for name, state in (live._state or {}).items():
            assert isinstance(state, DeviceArray)
            places[name].append(state.address)
    assert len(taken) == first
    assert all(len({*found}) == 2 and found[::2] == [found[0]] * 4 for found in places.values())
    list(model.generate(b"ab", max_tokens=5))
    gc.collect()
    assert len(taken) <= 2 * first


def test_an_array_of_the_device_is_cut_joined_and_copied_there(
    converted: Callable[..., Path],
) -> None:
    model = linexport.load(converted("language_model"), threads=1, provider="host")
    values = np.random.default_rng(0).standard_normal((2, 3, 5, 4)).astype(np.float32)
    held = model.hold({"x": values})["x"]
    assert isinstance(held, DeviceArray) and not hasattr(held, "__cuda_array_interface__")
    assert held.__dlpack_device__() == (1, 0)
    assert np.array_equal(np.from_dlpack(held), values)
    assert np.array_equal(held.narrowed(2, 3), values[:, :, 3:])
    other = model.hold({"x": np.ones((2, 3, 5, 4), np.float32)})["x"]
    other[1:].write_end(2, held[:1].narrowed(2, 3))
    wanted = np.ones((2, 3, 5, 4), np.float32)
    wanted[1, :, 3:] = values[0, :, 3:]
    assert np.array_equal(other, wanted)
    other.clear()
    assert not np.asarray(other).any()
    assert np.array_equal(held[1].copy(), values[1])


def test_calls_that_are_alike_are_bound_once(converted: Callable[..., Path]) -> None:
    """Two calls of a stream, whatever its tokens are; a longer piece in between is launched."""
    folder, random = converted("language_model"), np.random.default_rng(0)
    plain, bound = linexport.load(folder, threads=1), _opened(folder, "host")
    want, got = plain.stream(), bound.stream()
    for length in (1, 1, 1, 1, 700, 1, 1, 1, 1, 1, 1):
        tokens = random.integers(0, 90, (2, length))
        ours, theirs = got.step(tokens), want.step(tokens)
        for name, values in theirs.items():
            assert np.allclose(ours[name], values, rtol=1e-4, atol=1e-5), (name, length)
    assert len(bound._session.memory._graphs._calls) == 2


def test_logits_that_are_kept_are_part_of_a_call(converted: Callable[..., Path]) -> None:
    """A graph is made with where logits begin: calls for other logits are other calls."""
    folder, random = converted("language_model"), np.random.default_rng(1)
    plain, bound = linexport.load(folder, threads=1), _opened(folder, "host")
    assert bound._session.keeps_logits
    want, got = plain.stream(), bound.stream()
    for turn in range(60):
        tokens, kept = random.integers(0, 90, (2, 5)), (1, 3, 0)[turn % 3]
        ours = got.step(tokens, logits_to_keep=kept)["output"]
        theirs = want.step(tokens, logits_to_keep=kept)["output"]
        assert ours.shape == (2, kept or 5, 256)
        assert np.allclose(ours, theirs, rtol=1e-4, atol=1e-5), turn
    calls = bound._session.memory._graphs._calls
    starts = {value for call in calls for name, *_, value in call.host if name == LOGITS_FROM}
    assert len(starts) == 3


def test_prompts_of_many_lengths_leave_room_for_steps(
    converted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "KEPT", 8)
    monkeypatch.setattr(cuda_graphs, "MET", 30)
    bound = _opened(converted("language_model"), "host")
    graphs = bound._session.memory._graphs
    for _ in range(cuda_graphs.PROMPT_MEETINGS + 1):
        for length in range(2, 9):
            bound.stream().step(np.ones((1, length), np.int64))
    assert len(graphs._calls) == 4 and not any(call.is_step for call in graphs._calls)
    for length in range(2, 200):  # each once: forgotten before it is met again
        bound.stream().step(np.ones((1, length), np.int64))
    assert len(graphs._met) == 30
    live = bound.stream()
    for _ in range(6):
        live.step(np.ones((1, 1), np.int64))
    assert sum(call.is_step for call in graphs._calls) >= 2


def test_results_of_a_bound_call_are_the_callers_own(converted: Callable[..., Path]) -> None:
    model = _opened(converted("language_model"), "host")
    live, token = model.stream(), np.ones((1, 1), np.int64)
    results = [live.step(token) for _ in range(8)]
    copies = [{n: x.copy() for n, x in found.items()} for found in results]
    live.step(token), live.step(token)
    for found, copy in zip(results, copies, strict=True):
        assert all(np.array_equal(found[n], copy[n]) for n in copy)


def test_calls_with_states_that_grow_are_not_bound(converted: Callable[..., Path]) -> None:
    model = _opened(converted("beside_softmax"), "host")
    live = model.stream()
    for _ in range(4):
        live.step(np.ones((1, 1, 8), np.float32))
    assert not model._session.memory._graphs._calls


def test_steps_of_a_pool_are_bound(converted: Callable[..., Path]) -> None:
    """Rows of its two sides are where a call's states are: a number of sessions has two calls."""
    folder, results, models = converted("language_model"), [], []
    for provider in ("cpu", "host"):
        models.append(_opened(folder, provider, captures=provider == "host"))
        pool = models[-1].pool()
        sessions = [pool.open() for _ in range(3)]
        for turn in range(8):
            for number, session in enumerate(sessions):
                session.push(np.array([[7 * turn + number]]))
            found = pool.advance()
            results.append([found[session] for session in sessions])
    for want, got in zip(results[:8], results[8:], strict=True):
        for one, two in zip(want, got, strict=True):
            assert all(np.allclose(two[n], x, rtol=1e-4, atol=1e-5) for n, x in one.items())
    assert len(models[1]._session.memory._graphs._calls) == 2


def test_bench_times_a_step_with_its_states_on_the_device(
    converted: Callable[..., Path], factories: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a stream has them: of states of the host, a time is mostly that of their copies."""
    folder = shutil.copytree(converted("language_model"), tmp_path / "artifact")
    held, run = [], OrtMemory.run

    def recorded(self: OrtMemory, inputs: Any, arrays: Any) -> Any:
        pasts = [x for name, x in inputs.items() if name.startswith("past_")]
        held.append(bool(pasts) and all(isinstance(x, DeviceArray) for x in pasts))
        return run(self, inputs, arrays)

    monkeypatch.setattr(OrtMemory, "run", recorded)
    monkeypatch.setattr(revalidate, "THOROUGH", SHORT)
    source = factories.source("language_model")
    found = linexport.bench(folder, source=source, provider="host", lengths=(16,), threads=1)
    assert found.decode is not None and any(held)
