"""How many tokens of a prompt a call of a pool takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import linexport
from linexport.artifact import Artifact
from linexport.serving import chunk
from linexport.serving.chunk import FEW, SLOWER, longest_as_fast, measured_chunk

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("filled", "most", "expected"),
    [
        *((0, 2048, 64), (64, 2048, 64), (500, 2048, 512), (1024, 2048, 1024)),
        *((9999, 2048, 2048), (9999, 1500, 1024), (9999, 100, 64)),
    ],
)
def test_as_many_as_fill_the_device(filled: int, most: int, expected: int) -> None:
    """A device that computes so many tokens in the time of one, and others one after another."""
    assert longest_as_fast(lambda tokens: max(1.0, tokens / max(1, filled)), most) == expected


def test_a_little_slower_is_as_fast() -> None:
    assert longest_as_fast(lambda tokens: 1.0 if tokens == FEW else SLOWER, 256) == 256
    assert longest_as_fast(lambda tokens: 1.0 if tokens == FEW else SLOWER + 1e-9, 256) == FEW


def test_nothing_is_measured_on_a_cpu(model: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "_seconds", lambda *_: pytest.fail("measured"))
    assert measured_chunk(model) == FEW


@pytest.mark.usefixtures("host_provider")
@pytest.mark.parametrize("name", ["language_model", "beside_softmax"])
def test_is_measured_where_states_are_on_a_device(
    converted: Callable[..., Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = linexport.load(converted(name), threads=1, provider="host"), []
    call = model.call
    monkeypatch.setattr(
        model, "call", lambda feeds, *a, **k: calls.append(lengths(feeds)) or call(feeds, *a, **k)
    )
    found = measured_chunk(model)
    assert found & (found - 1) == 0 and FEW <= found <= chunk.MOST
    assert {*calls} >= {FEW, 2 * FEW, min(2 * found, chunk.MOST)}
    with model.pool(slots=2) as pool, model.pool(slots=2, chunk=3) as other:
        sessions = pool.open(), other.open()
        text = np.zeros((1, 70), np.int64)
        if name == "beside_softmax":
            text = np.zeros((1, 70, model.manifest.inputs[0].shape[-1]), np.float32)
        for session in sessions:
            session.push(text)
        calls.clear()
        pool.advance(), other.advance()
    assert calls[0] in (64, 70) and calls[1] == 3


def lengths(feeds: dict[str, np.ndarray]) -> int:
    return next(iter(feeds.values())).shape[1]
