"""A text goes on elsewhere from any of its tokens: what a reader gets is that of the whole."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linexport.artifact import Artifact
from linexport.artifact.text.sampling import Sampling
from linexport.errors import UsageError
from linexport.serving.channel import Channel, Outbox
from linexport.serving.computing import LocalComputing
from linexport.serving.engine import QueueFullError
from linexport.serving.language import Language
from linexport.serving.limits import Limits
from linexport.serving.metrics import Metrics
from linexport.serving.ray import Arguments
from linexport.serving.text import Beginning, End, Order, Step, TextEvent, TextSettings, Withheld
from tests.support.serving import alone

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT, TOKENS = b"import numpy", 16


def order(count: int, stops: tuple[str, ...] = ()) -> Order:
    how = TextSettings(Sampling(temperature=0.9, seed=3), TOKENS, stops, logprobs=1)
    return Order(how, dict.fromkeys(range(count), Beginning(tuple(PROMPT), len(PROMPT))))


async def read(local: LocalComputing, asked: Order, most: int | None = None) -> list[TextEvent]:
    """Return the events of an order, or the first of them."""
    texts, found, left = local.write(asked, lambda: None), [], len(asked.texts)
    while left and (most is None or len(found) < most):
        found.append(await texts.next())
        left -= isinstance(found[-1], End)
    texts.cancel()
    return found


def of(model: Artifact, work: Callable[[LocalComputing], Any]) -> Any:
    """Return what is done with an engine."""

    async def run() -> Any:
        local = LocalComputing(model, Limits(slots=4, cache_mb=0))
        local.start(Metrics(), Language.read(model))
        try:
            return await work(local)
        finally:
            await local.stop(park=False)

    return asyncio.run(run())


def plain(events: list[TextEvent], index: int) -> list[Any]:
    """What a reader of one text can tell apart."""
    found: list[Any] = []
    for event in events:
        if event.index == index and isinstance(event, Step):
            place = event.scored and (event.scored.token, event.scored.offset)
            found.append((event.token, event.text, event.shown, place))
        elif event.index == index:
            found.append((event.reason, event.usage.completion))
    return found


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.integers(0, 40), st.sampled_from([(), ("e",), ("zz", "\x00")]))
def test_events_after_a_cut_are_those_that_would_have_come(
    model: Artifact, count: int, cut: int, stops: tuple[str, ...]
) -> None:
    async def both(local: LocalComputing) -> Any:
        whole = await read(local, order(count, stops))
        first = await read(local, order(count, stops), cut)
        ended = {event.index for event in first if isinstance(event, End)}
        written = {
            i: tuple(
                e.token
                for e in first
                if isinstance(e, Step) and e.index == i and e.token is not None
            )
            for i in range(count)
            if i not in ended
        }
        # A reader gets the events of a step together: the end of a text comes with its last one.
        last = [e for e in first if isinstance(e, Step) and e.index in written]
        if any(e.token is None or len(written[e.index]) == TOKENS for e in last):
            return whole, whole
        rest = await read(local, order(count, stops).after(written)) if written else []
        return whole, first + rest

    whole, pieces = of(model, both)
    for index in range(count):
        assert plain(pieces, index) == plain(whole, index)


def test_texts_of_one_prompt_are_those_of_their_seeds(model: Artifact) -> None:
    events = of(model, lambda local: read(local, order(3)))
    for index in range(3):
        text = "".join(e.text for e in events if isinstance(e, Step) and e.index == index)
        assert text == alone(model, PROMPT, max_tokens=TOKENS, temperature=0.9, seed=3 + index)


def test_probabilities_wait_for_the_text_of_their_tokens(model: Artifact) -> None:
    """With a stop string that is always half there, tokens are given out with their text."""
    withheld, texts, tokens = Withheld(), "", 0
    for event in of(model, lambda local: read(local, order(1))):
        if isinstance(event, Step):
            delta = withheld.delta(event)
            if delta is not None:
                assert all(scored.offset < event.shown for scored in delta.tokens)
                texts, tokens = texts + delta.text, tokens + len(delta.tokens)
    assert len(texts) <= TOKENS and tokens <= TOKENS and not withheld.tokens


def test_a_batch_is_what_has_come_and_an_error_comes_after_it() -> None:
    async def run() -> None:
        channel: Channel[int] = Channel(Outbox(asyncio.get_running_loop()), 9, lambda: None)
        channel.deliver(1)
        channel.deliver(2)
        outbox_error = UsageError("late")
        channel.fail(outbox_error)
        channel._outbox.flush()
        await asyncio.sleep(0)
        assert await channel.batch() == [1, 2]
        with pytest.raises(UsageError, match="late"):
            await channel.batch()

    asyncio.run(run())


def test_a_full_queue_is_told_to_another_process() -> None:
    found = pickle.loads(pickle.dumps(QueueFullError("full", 7)))
    assert (str(found), found.retry_after) == ("full", 7)


def test_arguments_of_a_cluster_are_those_of_a_server() -> None:
    found = Arguments.read({"artifact": "folder", "slots": "3", "max_tokens": 9})
    assert found.limits == replace(Limits(), slots=3, max_tokens=9)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "artifact: Field required"),
        ({"artifact": "a", "slots": 0}, "slots is 0; expected 1 or more"),
        ({"artifact": "a", "slots": "many"}, "limits.slots: .* found 'many'"),
        ({"artifact": "a", "replicas": 2}, "replicas: Extra inputs"),
        ({"artifact": "a", "min_replicas": 9}, "expected min_replicas, 9, or more"),
    ],
)
def test_wrong_arguments_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Arguments.read(given)
