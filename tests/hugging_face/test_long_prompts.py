"""Long prompts of hybrids: in pieces that memory allows, with the text of the whole prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linexport
from linexport.artifact import Artifact, NGramDraft
from linexport.artifact.text import prompt_pieces
from linexport.artifact.text.prompt_pieces import LEAST, WHOLE, PromptPieces
from linexport.manifest import MODEL
from linexport.sources.onnx_file.skeleton import skeleton

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

LENGTH = 640


@pytest.fixture(scope="module")
def hybrid(converted_family: Callable[[str], tuple[Path, Any]]) -> Artifact:
    return linexport.load(converted_family("qwen3_5_text")[0], threads=1)


@pytest.fixture
def pieces(hybrid: Artifact) -> PromptPieces:
    states, tokens = [*hybrid.states.values()], hybrid.token_axis.dim
    return PromptPieces(hybrid.manifest, states, tokens, skeleton(hybrid.path / MODEL), "logits")


def prompt(length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(0).integers(3, 64, size=length)


def fed(hybrid: Artifact, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each call from now on."""
    found, call = [], hybrid.call
    monkeypatch.setattr(
        hybrid, "call", lambda f, *s, **k: found.append(f["input_ids"].shape[1]) or call(f, *s, **k)
    )
    return found


def test_the_text_is_that_of_the_whole_prompt(
    hybrid: Artifact,
    pieces: PromptPieces,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = list(hybrid.generate(prompt(), max_tokens=8))
    monkeypatch.setattr(prompt_pieces, "LARGEST", pieces.bytes(128, 1, 768 - 128))
    calls = fed(hybrid, monkeypatch)
    with caplog.at_level(logging.INFO, "linexport"):
        assert list(hybrid.generate(prompt(), max_tokens=8)) == whole
    assert calls == [*[128] * 5, *[1] * 7]
    assert "The prompt of 640 tokens is computed 128 at a time" in caplog.text
    drafted = hybrid.generate(prompt(), max_tokens=8, draft=NGramDraft())
    assert list(drafted) == whole
    own = hybrid.generate(prompt(), max_tokens=8, draft=hybrid.draft())
    assert list(own) == whole
    assert max(calls) == 128
    both = list(hybrid.generate_batch([prompt(), prompt()], max_tokens=8))
    assert [a for a, _ in both] == [b for _, b in both] == whole


def test_short_prompts_are_one_call(hybrid: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_pieces, "LARGEST", 1)
    calls = fed(hybrid, monkeypatch)
    list(hybrid.generate(prompt(WHOLE), max_tokens=1))
    list(hybrid.generate(prompt(WHOLE + 1), max_tokens=1))
    assert calls == [WHOLE, *[LEAST] * (WHOLE // LEAST), 1]


def test_pieces_are_the_longest_that_fit(
    pieces: PromptPieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    for piece in (64, 256, 1024):
        limit = pieces.bytes(piece, 2, 2048 - piece)
        monkeypatch.setattr(prompt_pieces, "LARGEST", limit)
        assert pieces.longest(2000, 2, 0) == piece
        monkeypatch.setattr(prompt_pieces, "LARGEST", limit - 1)
        assert pieces.longest(2000, 2, 0) == max(LEAST, piece // 2)
    monkeypatch.setattr(prompt_pieces, "LARGEST", pieces.bytes(2048, 2, 0))
    assert pieces.longest(2000, 2, 0) == 2000


def test_scores_are_of_all_that_is_held(pieces: PromptPieces) -> None:
    """Twice the keys are twice the scores of a call, and of all tokens at once four times."""
    sizes = [pieces.bytes(256, 1, held) for held in (2**14, 2**15, 2**16)]
    assert all(1.8 < b / a < 2.1 for a, b in pairwise(sizes))
    whole = [pieces.bytes(length, 1, 0) for length in (2**13, 2**14, 2**15)]
    assert all(3.6 < b / a < 4.2 for a, b in pairwise(whole))


def test_logits_of_all_tokens_count_where_they_are_computed(hybrid: Artifact) -> None:
    states, tokens = [*hybrid.states.values()], hybrid.token_axis.dim
    every = PromptPieces(
        hybrid.manifest, states, tokens, skeleton(hybrid.path / MODEL), logits=None
    )
    shape = hybrid.manifest.outputs[0].shape
    assert isinstance(shape[-1], int)
    assert every.bytes(4096, 1, 0) >= 4096 * shape[-1] * 4
