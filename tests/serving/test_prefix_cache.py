"""A known prefix is gone on from exactly, and is known for its own model alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import linexport
from linexport.artifact import Artifact, StreamState
from linexport.errors import UsageError
from linexport.manifest.records import InputRecord
from linexport.serving import Pool, PrefixCache, Session, prefix_cache
from linexport.serving.prompts import Prompts

pytestmark = pytest.mark.usefixtures("one_thread")


def tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(1, length))


def last(pool: Pool, session: Session) -> np.ndarray:
    """Logits after all that is queued."""
    row = None
    while session.queued:
        row = pool.advance()[session]["output"][0, -1]
    assert row is not None
    return row


def answer(pool: Pool, prompt: np.ndarray, count: int = 5) -> tuple[int, list[Any]]:
    """Tokens reused, and the argmax of each of some steps after the prompt."""
    with pool.open() as session:
        session.push(prompt)
        cached, written = session.cached, []
        for _ in range(count):
            written.append(int(last(pool, session).argmax()))
            session.push(np.array([[written[-1]]]))
        last(pool, session)
        session.remember()
    return cached, written


IMAGES = (
    InputRecord("ids", "int64", ("batch", "seq")),
    InputRecord("mask", "int64", ("batch", "seq"), 1),
    InputRecord("embeds", "float32", ("batch", "seq", 3), 0),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 2**31), st.data())
def test_tokens_of_images_are_known_by_all_their_inputs(
    taken: list[bool], seed: int, drawn: st.DataObject
) -> None:
    """A changed number of an image changes what stands for its token and for images after it."""
    prompts = Prompts.__new__(Prompts)
    prompts._tokens, prompts._inputs = "ids", {i.name: i for i in IMAGES}
    random, count = np.random.default_rng(seed), len(taken)
    feeds = {
        "ids": random.integers(64, size=(1, count)),
        "mask": np.ones((1, count), np.int64),
        "embeds": (random.standard_normal((1, count, 3)) * np.array(taken)[:, None]).astype("f4"),
    }
    found = prompts.ids(feeds)
    assert found is not None
    np.testing.assert_array_equal(found < 0, taken)
    np.testing.assert_array_equal(found[found >= 0], feeds["ids"][0][found >= 0])
    np.testing.assert_array_equal(found, prompts.ids({n: v.copy() for n, v in feeds.items()}))
    place, embeds = drawn.draw(st.integers(0, count - 1)), feeds["embeds"].copy()
    embeds[0, place, drawn.draw(st.integers(0, 2))] += 1
    changed = prompts.ids({**feeds, "embeds": embeds})
    here = np.arange(count) == place
    assert changed is not None
    np.testing.assert_array_equal(
        changed != found, here | (np.array(taken) & (np.arange(count) > place))
    )
    prompts._inputs["scale"] = InputRecord("scale", "float32", ("batch",), 1)
    assert prompts.ids({**feeds, "scale": np.zeros(1, np.float32)}) is None


def test_the_same_prompt_again_is_computed_from_before_its_last_token(model: Artifact) -> None:
    prompt = tokens(50)
    with model.pool(chunk=16, cache=model.prefix_cache(budget_mb=10, every=20)) as pool:
        first, second = (pool.open() for _ in range(2))
        first.push(prompt)
        miss = last(pool, first)
        second.push(prompt)
        assert (first.cached, second.cached, second.queued) == (0, 49, 1)
        np.testing.assert_array_equal(last(pool, second), miss)
        assert first.state() == second.state()


@settings(max_examples=30, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 2), st.integers(1, 40)), min_size=2, max_size=6
    )
)
def test_a_hit_equals_a_miss(model: Artifact, prompts: list[tuple[int, int, int]]) -> None:
    """Prompts that share beginnings of any length: the logits are those without a cache."""
    cache = model.prefix_cache(budget_mb=0.1, every=16)
    with model.pool(chunk=8, cache=cache) as pool:
        for shared, seed, own in prompts:
            prompt = np.concatenate([tokens(100)[:, :shared], tokens(own, 5 + seed)], 1)
            with pool.open() as session:
                session.push(prompt)
                found = last(pool, session)
            expected = model.run(prompt)["output"][0, -1]
            assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_turns_of_a_conversation_go_on_from_the_last_answer(model: Artifact) -> None:
    cache = model.prefix_cache(budget_mb=10)
    with model.pool(cache=cache) as pool:
        cached, written = answer(pool, tokens(30))
        longer = np.concatenate([tokens(30), np.array([written]), tokens(7, 1)], 1)
        assert (cached, answer(pool, longer)) == (0, (35, answer(model.pool(), longer)[1]))
    found = cache.statistics()
    assert (found.hits, found.misses, found.tokens) == (1, 1, 35)


def alike(model: Artifact, another: Artifact) -> bool:
    """Whether both answer the same when they share a cache."""
    cache = PrefixCache(budget_mb=10)
    prompt = tokens(40)
    alone = answer(another.pool(), prompt)[1]
    answer(model.pool(cache=cache), prompt)
    try:
        return answer(another.pool(cache=cache), prompt) == (0, alone)
    except UsageError:
        return False


def test_models_that_share_a_cache_do_not_share_states(
    model: Artifact, another: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert alike(model, another)
    keys = prefix_cache._keys
    monkeypatch.setattr(prefix_cache, "_keys", lambda sha, *rest: keys("", *rest))
    assert not alike(model, another)


def test_states_that_were_not_used_for_longest_leave_first(model: Artifact) -> None:
    stream = model.stream()
    stream.step(tokens(3))
    state = stream.state()
    cache = PrefixCache(budget_mb=2.5e-6 * state.nbytes)
    a, b, c = (tokens(4, seed)[0] for seed in range(3))
    cache.put(a, state)
    cache.put(b, state)
    assert cache.longest(model.model_sha256, np.append(a, 9)) == (4, state)
    cache.put(c, state)
    assert [cache.longest(model.model_sha256, x)[0] for x in (a, b, c)] == [4, 0, 4]
    found = cache.statistics()
    assert (found.states, found.bytes, found.evicted) == (2, 2 * state.nbytes, 1)
    small = PrefixCache(budget_mb=0.5e-6 * state.nbytes)
    small.put(a, state)
    assert small.statistics().states == 0


def test_tokens_that_are_not_known_are_not_remembered(model: Artifact) -> None:
    """The tokens before a state are not known to the pool that is given it."""
    cache = model.prefix_cache(budget_mb=10)
    stream = model.stream()
    stream.step(tokens(3))
    with model.pool(cache=cache) as pool:
        session = pool.open(stream.state())
        session.push(tokens(20))
        last(pool, session)
        session.remember()
    assert cache.statistics().states == 0


def test_only_language_models_have_prefixes(converted: Callable[..., Path]) -> None:
    small = linexport.load(converted("small"), threads=1)
    with pytest.raises(UsageError, match="not a language model"):
        small.pool(cache=PrefixCache(budget_mb=1))


@pytest.mark.parametrize("option", [{"budget_mb": 0}, {"budget_mb": 1, "every": 0}])
def test_numbers_without_meaning_are_refused(option: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="expected more than 0"):
        PrefixCache(**option)  # type: ignore[arg-type]


def test_a_state_in_the_cache_is_read_only(model: Artifact) -> None:
    cache = model.prefix_cache(budget_mb=10)
    with model.pool(cache=cache) as pool:
        answer(pool, tokens(9))
    _, state = cache.longest(model.model_sha256, tokens(9)[0], 8)
    assert isinstance(state, StreamState)
    with pytest.raises(ValueError, match="read-only"):
        next(iter(state.arrays.values()))[...] = 0
