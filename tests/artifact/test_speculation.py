"""Going back in a stream, and tokens that are checked several in a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linexport.artifact import Artifact, NGramDraft
from linexport.errors import ParityError, UsageError

pytestmark = pytest.mark.usefixtures("one_thread")

HISTORY = 12


def tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(1, length))


def values(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(1, length, 8)).astype(np.float32)


def same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max(initial=0) <= 1e-5 * np.abs(expected).max(initial=1e-3)


# Going back


def check(
    artifact: Artifact, draw: Callable[..., np.ndarray], moves: Sequence[tuple[int, bool]]
) -> None:
    """Feed pieces and go back; outputs and state are those of the tokens that are left."""
    stream, text = artifact.stream(history=HISTORY), draw(1)
    stream.step(text)
    able = 0
    for seed, (count, forward) in enumerate(moves):
        if forward:
            able = min(HISTORY, able + count)
            piece = draw(count, seed)
            text = np.concatenate([text, piece], 1)
            same(stream.step(piece)["output"], artifact.run(text)["output"][:, -count:])
        elif count <= able:
            able -= count
            stream.rewind(count)
            text = text[:, : text.shape[1] - count]
        if seed % 3 == 2:
            alone = artifact.stream()
            alone.step(text)
            for name, value in stream.fork().state().arrays.items():
                same(value, alone.state().arrays[name])


MOVES = st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=12)


@settings(max_examples=40, deadline=None)
@given(moves=MOVES)
def test_what_is_gone_back_was_never_there(model: Artifact, moves: list[tuple[int, bool]]) -> None:
    check(model, tokens, moves)


@settings(max_examples=25, deadline=None)
@given(moves=MOVES)
def test_positions_and_convolutions_go_back_too(
    counting: Artifact, moves: list[tuple[int, bool]]
) -> None:
    check(counting, values, moves)


def test_a_stream_goes_back_as_far_as_its_history(model: Artifact) -> None:
    stream = model.stream()
    with pytest.raises(UsageError, match="has no token yet"):
        stream.rewind(1)
    stream.step(tokens(3))
    with pytest.raises(UsageError, match=r"go back 0 to 0 tokens; found 1.*history"):
        stream.rewind(1)
    stream = model.stream(history=2)
    for seed in range(4):
        stream.step(tokens(1, seed))
    for wrong in (3, -1):
        with pytest.raises(UsageError, match=f"go back 0 to 2 tokens; found {wrong}"):
            stream.rewind(wrong)
    stream.rewind(2)
    stream.reset()
    with pytest.raises(UsageError, match="has no token yet"):
        stream.rewind(1)


def test_a_call_is_made_when_a_state_inside_of_a_step_is_needed(
    model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    call = model.call
    monkeypatch.setattr(
        model, "call", lambda f, s, **k: calls.append(f["tokens"].shape[1]) or call(f, s, **k)
    )
    stream = model.stream(history=30)
    stream.step(tokens(10))
    stream.rewind(3)
    stream.step(tokens(2))
    stream.step(tokens(1))
    stream.rewind(1)
    stream.state()
    stream.rewind(1)
    stream.state()
    assert calls == [10, 9, 1, 8]


# Checking several tokens in a call


@settings(max_examples=30, deadline=None)
@given(right=st.integers(0, 6), wrong=st.integers(0, 6), rounds=st.integers(1, 4))
def test_the_right_proposals_are_kept(model: Artifact, right: int, wrong: int, rounds: int) -> None:
    text = tokens(9)[0].tolist()
    expected = list(model.generate(text, max_tokens=40))
    stream, known = model.stream(), text
    done = 0
    for _ in range(rounds):
        proposed = expected[done : done + right] + [(expected[done + right] + 1) % 256] * wrong
        fed = np.array([*known, *proposed], np.int64)
        verified = stream.verify(fed, known=len(known))
        assert list(verified.tokens) == expected[done : done + right + 1]
        assert verified.logits.shape == (right + 1, 256)
        done += right + 1
        known = [verified.tokens[-1]]
    alone = model.stream()
    alone.step(np.array([[*text, *expected[: done - 1]]]))
    for name, value in stream.state().arrays.items():
        same(value, alone.state().arrays[name])


def test_what_cannot_be_verified_is_refused(model: Artifact, counting: Artifact) -> None:
    with pytest.raises(UsageError, match="not a language model"):
        counting.stream().verify(np.array([1]))
    for known in (0, 3):
        with pytest.raises(UsageError, match=f"known is {known}; expected 1 to 2"):
            model.stream().verify(np.array([1, 2]), known=known)
    stream = model.stream()
    stream.step(np.concatenate([tokens(3), tokens(3, 1)]))
    with pytest.raises(UsageError, match="has batch 2"):
        stream.verify(np.array([1, 2]))


def test_where_nothing_can_be_chosen_nothing_was_fed(model: Artifact) -> None:
    def refuse(logits: np.ndarray) -> int:
        raise ParityError("not finite")

    stream = model.stream()
    stream.step(tokens(5))
    before = stream.state()
    with pytest.raises(ParityError):
        stream.verify(np.array([1, 2, 3]), choose=refuse)
    assert stream.state() == before


class Oracle(NGramDraft):
    """Proposes what comes, with a wrong token every now and then."""

    def __init__(self, text: list[int], every: int) -> None:
        super().__init__()
        self.text, self.every = text, every

    def propose(self, text: Sequence[int]) -> list[int]:
        begin = len(text)
        coming = enumerate(self.text[begin : begin + 6], begin)
        return [(t + (place % self.every == 0)) % 256 for place, t in coming]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_k": 30, "seed": 3}])
@pytest.mark.parametrize("every", [1, 2, 5, 1000])
def test_the_text_is_that_without_a_draft(
    model: Artifact, settings: dict[str, Any], every: int
) -> None:
    prompt = tokens(20)[0].tolist()
    expected = list(model.generate(prompt, max_tokens=60, **settings))
    draft = Oracle(prompt + expected, every)
    assert list(model.generate(prompt, max_tokens=60, draft=draft, **settings)) == expected
    assert draft.accepted <= draft.proposed
    if every == 1:
        assert draft.accepted == 0 and draft.calls == 59
    if every == 1000:
        assert draft.accepted == draft.proposed and draft.calls == 9
    stop = expected[30]
    draft = Oracle(prompt + expected, every)
    ended = list(model.generate(prompt, stop=[stop], draft=draft, **settings))
    assert ended == expected[: expected.index(stop)]


def test_drafts_of_both_kinds_are_used_again(model: Artifact, another: Artifact) -> None:
    for draft in (NGramDraft(), another.draft(), model.draft(3)):
        for seed in range(3):
            prompt = np.tile(tokens(8, seed)[0], 3)
            expected = list(model.generate(prompt, max_tokens=30))
            assert list(model.generate(prompt, max_tokens=30, draft=draft)) == expected
    assert draft.accepted == draft.proposed > 50


def test_what_followed_before_is_proposed() -> None:
    draft = NGramDraft(tokens=3)
    text = [1, 2, 3, 4, 5, 6, 7, 2, 3]
    assert draft.propose(text) == [4, 5, 6]
    assert draft.propose([*text, 9, 4]) == [5, 6, 7]
    assert draft.propose([*text, 9, 4, 8]) == []
    draft.begin()
    assert draft.propose([4]) == []
    for text, proposed in (([5, 5], [5, 5, 5]), ([1, 2, 1, 2], [1, 2, 1])):
        draft.begin()
        assert draft.propose(text) == proposed


def test_the_command_says_what_was_accepted(
    cli: Callable[..., Any], model: Artifact, another: Artifact
) -> None:
    given = ("generate", model.path, "--prompt", "ababababab", "--max-tokens", 20)
    plain = cli(*given)
    for draft in ("ngram", another.path):
        done = cli(*given, "--draft", draft)
        assert (done.code, done.out) == (0, plain.out)
        assert "proposed tokens were accepted, in" in done.err
        counts = cli(*given, "--draft", draft, "--json").json()["draft"]
        assert counts["accepted"] <= counts["proposed"] and counts["calls"] < 20
    done = cli(*given, "--draft", "nowhere")
    assert done.code == 2 and "nowhere" in done.err and "Traceback" not in done.err
