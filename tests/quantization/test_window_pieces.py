"""Pieces of windows: which positions are compared, and how often, and what is computed for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linexport.artifact.checked import checked_artifact
from linexport.artifact.temporary import Arrays, runs
from linexport.artifact.text.language_interface import LanguageInterface
from linexport.manifest import MODEL
from linexport.quantization import window_pieces
from linexport.quantization.opened import FloatModel, open_deployed, unopened
from linexport.quantization.window_pieces import (
    LOGITS,
    PIECE,
    outputs_at,
    outputs_of,
    pieces,
    whole_outputs,
)
from linexport.targets import find_target
from linexport.targets.runtime.options import LOGITS_TO_KEEP

LANGUAGE = LanguageInterface("tokens", "output", 256)


@given(length=st.integers(1, 700), vocabulary=st.sampled_from([2, 256, LOGITS // PIECE, 248_320]))
def test_pieces_follow_one_another(length: int, vocabulary: int) -> None:
    window = np.arange(length) * 7 % vocabulary
    cut = pieces(window, vocabulary)
    assert [0, *(p.end for p in cut)] == [*(p.start for p in cut), length]
    assert all(0 < p.end - p.start <= PIECE for p in cut)
    assert all(0 < p.kept <= p.end - p.start and p.kept * vocabulary <= LOGITS for p in cut)
    if vocabulary <= LOGITS // PIECE:
        assert sum(p.kept for p in cut) == length
        assert [p.start for p in cut] == list(range(0, length, PIECE))


def test_positions_are_compared_equally_often() -> None:
    """Means over 2,000 windows, but for the ends of windows; 6 standard errors: 2e-9 each."""
    random, length, count = np.random.default_rng(0), 512, 2000
    counts = np.zeros(length)
    for _ in range(count):
        for piece in pieces(random.integers(248_320, size=length), 248_320):
            counts[piece.positions] += 1
    share = (LOGITS // 248_320) / PIECE
    error = np.sqrt(share * (1 - share) / count)
    assert np.abs(counts[: -(LOGITS // 248_320)] / count - share).max() < 6 * error


@pytest.mark.parametrize("keeps", [True, False])
def test_logits_are_those_of_the_whole_window(
    converted: Callable[..., Path], keeps: bool, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    monkeypatch.setattr(window_pieces, "LOGITS", 5 * 256)
    folder = converted("language_model")
    artifact = unopened(checked_artifact(folder), 1)
    if keeps:
        run = runs(open_deployed(folder / MODEL, artifact.manifest, 1))
    else:
        run = runs(find_target("ort").open(folder / MODEL, threads=1))
    computed = []

    def counted(feeds: Arrays) -> dict[str, np.ndarray]:
        assert LOGITS_TO_KEEP in feeds
        found = run(feeds)
        computed.append(found["output"].shape[1])
        return found

    window = np.random.default_rng(1).integers(256, size=300)
    whole = artifact.run_graph(artifact.feeds(window[None]))["output"]
    cut = pieces(window, 256)
    for found in (
        list(outputs_of(artifact, LANGUAGE, counted)(window)),
        list(whole_outputs(artifact, LANGUAGE, artifact.run_graph)(window)),
    ):
        assert len(found) == len(cut) > 2
        for piece, outputs in zip(cut, found, strict=True):
            want = whole[:, piece.positions]
            np.testing.assert_allclose(outputs["output"], want, rtol=0, atol=2e-5)
    assert computed == [p.kept if keeps else p.end - p.start for p in cut]


def test_logits_at_positions_are_those_of_the_pieces(
    converted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """Several pieces are a call, and states after the last one are those of the window."""
    monkeypatch.setattr(window_pieces, "LOGITS", 5 * 256)
    monkeypatch.setattr(window_pieces, "CALL", 3 * PIECE)
    folder = converted("language_model")
    artifact = unopened(checked_artifact(folder), 1)
    run = FloatModel.of(artifact, folder / MODEL, 1).open_at_positions("output")
    assert run is not None
    calls = []

    def counted(feeds: Arrays) -> dict[str, np.ndarray]:
        found = run(feeds)
        calls.append((feeds["tokens"].shape[1], found["output"].shape[1]))
        return found

    window = np.random.default_rng(1).integers(256, size=700)
    cut = pieces(window, 256)
    expected = list(outputs_of(artifact, LANGUAGE, artifact.run_graph)(window))
    found = list(outputs_at(artifact, LANGUAGE, counted)(window))
    for piece, want, got in zip(cut, expected, found, strict=True):
        assert got["output"].shape == (1, piece.kept, 256)
        np.testing.assert_allclose(got["output"], want["output"], rtol=0, atol=2e-5)
    for state in artifact.manifest.states:
        np.testing.assert_allclose(
            found[-1][state.present], expected[-1][state.present], rtol=1e-4, atol=2e-5
        )
    assert sum(tokens for tokens, _ in calls) == 700 and len(calls) == 3
    assert all(tokens <= 3 * PIECE for tokens, _ in calls)
    assert sum(computed for _, computed in calls) == sum(piece.kept for piece in cut)
