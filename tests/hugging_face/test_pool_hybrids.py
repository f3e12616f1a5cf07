"""Hybrids in a pool: key-value rows of different lengths share a call."""

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

pytestmark = pytest.mark.usefixtures("one_thread")


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
            hybrid, "call", lambda f, *s: calls.append(f["input_ids"].shape) or call(f, *s)
        )
        for session in sessions:
            session.push(tokens(1))
        pool.advance()
        assert calls == [(3, 1)]
        rows = [s.state().arrays["past_key_1"].shape[2] for s in sessions]
    assert rows == [4, 5, 6]
