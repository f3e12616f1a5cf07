"""Hybrids in a pool and gone back in: key-value rows of different lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import linexport
from linexport.artifact import Artifact
from tests.support.schedules import Schedule, schedules

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def hybrid(converted_family: Callable[[str], tuple[Path, Any]]) -> Artifact:
    return linexport.load(converted_family("qwen3_5_text")[0], threads=1)


def tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 64, size=(1, length))


@settings(max_examples=25, deadline=None)
@given(schedule=schedules())
def test_any_schedule_of_a_hybrid(hybrid: Artifact, schedule: Schedule) -> None:
    schedule.check(hybrid, tokens)


def test_sessions_of_different_lengths_share_a_call(
    hybrid: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, call = [], hybrid.call
    with hybrid.pool() as pool:
        sessions = [pool.open() for _ in range(3)]
        for length, session in enumerate(sessions, 3):
            session.push(tokens(length))
        while any(s.queued for s in sessions):
            pool.advance()
        monkeypatch.setattr(
            hybrid,
            "call",
            lambda f, *s, **k: calls.append(f["input_ids"].shape) or call(f, *s, **k),
        )
        for session in sessions:
            session.push(tokens(1))
        pool.advance()
        assert calls == [(3, 1)]
        rows = [s.state().arrays["past_key_1"].shape[2] for s in sessions]
    assert rows == [4, 5, 6]


@pytest.mark.parametrize(("pieces", "back"), [((9, 1, 4), 2), ((9, 1, 4), 11), ((30,), 29)])
def test_rows_are_cut_to_the_token_that_is_gone_back_to(
    hybrid: Artifact, pieces: tuple[int, ...], back: int
) -> None:
    text = tokens(sum(pieces))
    stream = hybrid.stream(history=back)
    for piece in np.split(text, np.cumsum(pieces)[:-1], 1):
        stream.step(piece)
    stream.rewind(back)
    left = text[:, : text.shape[1] - back]
    alone = hybrid.stream()
    alone.step(left)
    there, expected = stream.state().arrays, alone.state().arrays
    for name, value in there.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5)
    assert stream.state().nbytes == hybrid.state_bytes(left.shape[1])
    assert there["past_key_1"].shape[2] == there["past_mask"].shape[1] == left.shape[1]
    after = stream.step(tokens(3, 1))["logits"]
    np.testing.assert_allclose(after, alone.step(tokens(3, 1))["logits"], atol=1e-5)


def test_a_draft_does_not_change_what_a_hybrid_writes(hybrid: Artifact) -> None:
    prompt = tokens(12)[0]
    expected = list(hybrid.generate(prompt, max_tokens=40, stop=()))
    for draft in (linexport.NGramDraft(), hybrid.draft()):
        assert list(hybrid.generate(prompt, max_tokens=40, stop=(), draft=draft)) == expected
