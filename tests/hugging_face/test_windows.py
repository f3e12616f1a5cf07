"""Sliding windows: a state of one size, however long the sequence, and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import linexport
from linexport.artifact import Artifact
from linexport.patches import softmax_attention
from tests.support.families import TINY
from tests.support.schedules import Schedule, schedules

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = TINY["recurrent_gemma"]["attention_window_size"]


@pytest.fixture(scope="module")
def windowed(converted_family: Callable[[str], tuple[Path, Any]]) -> Artifact:
    return linexport.load(converted_family("recurrent_gemma")[0], threads=1)


def tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 64, size=(1, length))


@pytest.mark.parametrize("past", [0, 1, 3, 4, 9])
def test_the_mask_is_that_of_the_window_as_pairs_say(past: int) -> None:
    """Against the definition: token s is seen from t if t - W < s <= t, and s is not padding."""
    window, length = 4, 6
    kept = np.random.default_rng(past).integers(0, 2, size=(2, past + length))
    added = softmax_attention.create_sliding_window_causal_mask(
        SimpleNamespace(sliding_window=window),
        torch.zeros(2, length, 8),
        torch.from_numpy(kept),
        None,
    )
    assert added.shape == (2, 1, length, window - 1 + length)
    for row in range(2):
        for query in range(length):
            for column in range(window - 1 + length):
                key = column - (window - 1)  # counted from the first token of the call
                seen = query - window < key <= query and past + key >= 0
                seen = seen and bool(kept[row, past + key])
                assert (added[row, 0, query, column].item() == 0.0) == seen


@pytest.mark.services
def test_the_state_has_one_size(windowed: Artifact) -> None:
    assert all(s.grows is None for s in windowed.manifest.states)
    shapes = {s.past: s.shape for s in windowed.manifest.states}
    assert shapes["past_key_2"] == ("batch", 1, WINDOW - 1, 8)
    assert shapes["past_mask"] == ("batch", WINDOW - 1)
    stream = windowed.stream()
    for length in (1, WINDOW - 1, 300):
        stream.step(tokens(length))
        assert stream.state().nbytes == windowed.state_bytes(0) == windowed.state_bytes(10**6)


@pytest.mark.services
@pytest.mark.parametrize("pieces", [(1,) * 90, (WINDOW - 2, 1, 1, 1, 63), (WINDOW, 66), (89, 1)])
def test_pieces_give_what_the_whole_gives(windowed: Artifact, pieces: tuple[int, ...]) -> None:
    text = tokens(sum(pieces))
    whole = windowed.run(text)["logits"]
    stream = windowed.stream()
    parts = [stream.step(p)["logits"] for p in np.split(text, np.cumsum(pieces)[:-1], 1)]
    assert np.abs(np.concatenate(parts, 1) - whole).max() < 1e-5 * np.abs(whole).max()


@pytest.mark.services
def test_a_window_forgets_what_is_before_it(windowed: Artifact) -> None:
    """The rows of keys after a long text are those of its last tokens, in the order of these."""
    stream, longer = windowed.stream(), windowed.stream()
    stream.step(tokens(60))
    longer.step(tokens(60))
    longer.step(tokens(5, 1))
    before, after = (s.state().arrays["past_value_2"] for s in (stream, longer))
    np.testing.assert_array_equal(after[:, :, :-5], before[:, :, 5:])


@pytest.mark.services
@settings(max_examples=25, deadline=None)
@given(schedule=schedules())
def test_any_schedule_of_a_pool(windowed: Artifact, schedule: Schedule) -> None:
    schedule.check(windowed, tokens)


@pytest.mark.services
@pytest.mark.parametrize(("pieces", "back"), [((50, 1, 4), 3), ((50, 1, 4), 40), ((9, 1, 4), 12)])
def test_going_back(windowed: Artifact, pieces: tuple[int, ...], back: int) -> None:
    text = tokens(sum(pieces))
    stream, alone = windowed.stream(history=back), windowed.stream()
    for piece in np.split(text, np.cumsum(pieces)[:-1], 1):
        stream.step(piece)
    stream.rewind(back)
    alone.step(text[:, : text.shape[1] - back])
    found, expected = stream.state().arrays, alone.state().arrays
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5)
    again = stream.step(text[:, -back:])["logits"]
    np.testing.assert_allclose(again, alone.step(text[:, -back:])["logits"], atol=1e-5)


@pytest.mark.services
def test_a_draft_does_not_change_the_text(windowed: Artifact) -> None:
    prompt = tokens(30)[0]
    expected = list(windowed.generate(prompt, max_tokens=60, stop=()))
    for draft in (linexport.NGramDraft(), windowed.draft()):
        assert list(windowed.generate(prompt, max_tokens=60, stop=(), draft=draft)) == expected


@pytest.mark.services
def test_one_row_begins_anew(windowed: Artifact) -> None:
    ids = np.random.default_rng(0).integers(3, 64, size=(3, 70))
    stream = windowed.stream()
    stream.step(ids[:, :40])
    stream.reset(rows=[1])
    got = stream.step(ids[:, 40:])["logits"]
    whole, fresh = windowed.run(ids)["logits"], windowed.run(ids[1:2, 40:])["logits"]
    limit = 1e-5 * np.abs(whole).max()
    assert np.abs(got[[0, 2]] - whole[[0, 2], 40:]).max() < limit
    assert np.abs(got[1] - fresh[0]).max() < limit


@pytest.mark.services
def test_a_known_prefix_longer_than_the_window(windowed: Artifact) -> None:
    text = tokens(100)
    with windowed.pool(cache=windowed.prefix_cache(budget_mb=10, every=32)) as pool:
        found = []
        for _ in range(2):
            with pool.open() as session:
                session.push(text)
                while session.queued:
                    outputs = pool.advance()[session]
                found.append((session.cached, outputs["logits"][0, -1]))
    (none, computed), (cached, known) = found
    assert (none, cached) == (0, 99)
    assert np.abs(known - computed).max() < 1e-5 * np.abs(computed).max()
