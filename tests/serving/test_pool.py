"""A pool's sessions compute what a stream of each alone computes, whatever the schedule."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import linexport
from linexport.artifact import Artifact
from linexport.errors import NoFreeSlotError, NonFiniteError, UsageError
from linexport.serving import Pool, Session
from tests.support.schedules import Schedule, schedules

pytestmark = pytest.mark.usefixtures("one_thread")


def tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(1, length))


def values(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(1, length, 8)).astype(np.float32)


def drain(pool: Pool) -> dict[Session, list[Any]]:
    """All outcomes until nothing is queued."""
    found: dict[Session, list[Any]] = {}
    while any(s.queued for s in pool):
        for session, outcome in pool.advance().items():
            found.setdefault(session, []).append(outcome)
    return found


def joined(outcomes: list[Any]) -> np.ndarray:
    return np.concatenate([o["output"] for o in outcomes], 1)


# Equal to running alone


@settings(max_examples=40, deadline=None)
@given(schedule=schedules())
def test_any_schedule_of_token_ids(model: Artifact, schedule: Schedule) -> None:
    schedule.check(model, tokens)


@settings(max_examples=25, deadline=None)
@given(schedule=schedules())
def test_any_schedule_of_a_model_that_counts_positions(
    counting: Artifact, schedule: Schedule
) -> None:
    schedule.check(counting, values)


@pytest.fixture(scope="session")
def packed(converted: Callable[..., Path]) -> Artifact:
    """A language model of packed batches."""
    folder = converted("language_model", target="ort-cuda", packed_batches=True)
    return linexport.load(folder, threads=1)


@settings(max_examples=15, deadline=None)
@given(schedule=schedules())
def test_any_schedule_of_packed_batches(packed: Artifact, schedule: Schedule) -> None:
    schedule.check(packed, tokens)


def test_prompts_of_any_lengths_share_the_call_of_those_that_decode(
    packed: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, call = [], packed.call
    monkeypatch.setattr(packed, "call", lambda f, *s, **k: calls.append(f) or call(f, *s, **k))
    with packed.pool(slots=5, chunk=16) as pool:
        sessions = [pool.open() for _ in range(5)]
        for seed, (session, length) in enumerate(zip(sessions, (1, 12, 1, 3, 9), strict=True)):
            session.push(tokens(length, seed))
        assert {s: o["output"].shape[1] for s, o in pool.advance().items()} == dict(
            zip(sessions, (1, 12, 1, 3), strict=False)  # the fifth begins no chunk of 16
        )
        assert set(pool.advance()) == {sessions[4]}
    assert [f["tokens"].shape for f in calls] == [(1, 17), (1, 9)]
    assert sorted(np.diff(calls[0]["cu_seqlens"])) == [1, 1, 3, 12] and len(calls[1]) == 1


def test_one_call_advances_all_that_decode(
    model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, call = [], model.call
    monkeypatch.setattr(
        model, "call", lambda f, *s, **k: calls.append(f["tokens"].shape) or call(f, *s, **k)
    )
    with model.pool(slots=5) as pool:
        sessions = [pool.open() for _ in range(5)]
        for seed, session in enumerate(sessions):
            session.push(tokens(1, seed))
        assert set(pool.advance()) == set(sessions)
    assert calls == [(5, 1)]


def test_a_long_prompt_delays_nobody(model: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, call = [], model.call
    monkeypatch.setattr(
        model, "call", lambda f, *s, **k: calls.append(f["tokens"].shape) or call(f, *s, **k)
    )
    with model.pool(slots=4, chunk=16) as pool:
        long, short, one, two = (pool.open() for _ in range(4))
        long.push(tokens(100))
        short.push(tokens(10))
        finished = []
        while long.queued:
            one.push(tokens(1))
            two.push(tokens(1))
            found = pool.advance()
            assert {one, two} <= set(found)
            finished += [s for s in found if s in (long, short) and not s.queued]
        assert finished == [short, long]
    assert max(length for _, length in calls) == 16


def test_equal_chunks_share_a_call_up_to_the_length_of_one(
    model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, call = [], model.call
    monkeypatch.setattr(
        model, "call", lambda f, *s, **k: calls.append(f["tokens"].shape) or call(f, *s, **k)
    )
    with model.pool(slots=8, chunk=16) as pool:
        for _ in range(8):
            pool.open().push(tokens(5))
        assert len(drain(pool)) == 8
    assert calls == [(3, 5), (3, 5), (2, 5)]


def test_states_stay_where_they_are_while_the_same_sessions_decode(
    model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime reads what it wrote in the call before."""
    calls: list[tuple[Any, Any]] = []
    call = model.call
    with model.pool(slots=6, chunk=4) as pool:
        sessions = [pool.open() for _ in range(5)]
        for session in sessions:
            session.push(tokens(3))
        drain(pool)
        monkeypatch.setattr(model, "call", lambda f, *s, **k: calls.append(s) or call(f, *s, **k))
        for _ in range(4):
            for session in sessions[::2]:
                session.push(tokens(1))
            pool.advance()
    for (_, written), (read, into) in itertools.pairwise(calls):
        for name in model.states:
            assert read[name].ctypes.data == written[name].ctypes.data
            assert not np.shares_memory(read[name], into[name])


# States


def test_a_session_goes_on_from_a_stream_and_a_stream_from_a_session(model: Artifact) -> None:
    sequence = tokens(30)
    whole = model.run(sequence)["output"]
    stream = model.stream()
    stream.step(sequence[:, :10])
    with model.pool() as pool:
        other, session = pool.open(), pool.open(stream.state())
        assert session.state() == stream.state()
        other.push(tokens(1, 1))
        session.push(sequence[:, 10:11])
        pool.advance()
        fork = session.fork()
        assert fork.state() == session.state() and fork.state().digest == session.state().digest
        for branch in (fork, session):
            branch.push(sequence[:, 11:20])
        results = drain(pool)
        for branch in (fork, session):
            np.testing.assert_allclose(joined(results[branch]), whole[:, 11:20], atol=1e-5)
        stream.restore(session.state())
    rest = stream.step(sequence[:, 20:])["output"]
    np.testing.assert_allclose(rest, whole[:, 20:], atol=1e-5)


def test_states_that_are_not_a_sessions_are_refused(model: Artifact, small: Artifact) -> None:
    stream = model.stream()
    stream.step(np.concatenate([tokens(3), tokens(3, 1)]))
    with small.pool() as pool, pytest.raises(UsageError, match="state of another model"):
        pool.open(stream.state())
    with model.pool() as pool:
        with pytest.raises(UsageError, match="The state has 2 rows; a session has one"):
            pool.open(stream.state())
        with pytest.raises(UsageError, match="The piece has 2 rows; a session has one"):
            pool.open().push(np.concatenate([tokens(3), tokens(3, 1)]))
        assert len(pool) == 1


# Slots


def test_slots_are_taken_and_freed(model: Artifact) -> None:
    with model.pool(slots=2) as pool:
        first, second = pool.open(), pool.open()
        with pytest.raises(NoFreeSlotError, match="All 2 slots are taken"):
            first.fork()
        first.push(tokens(9))
        first.close()
        first.close()
        assert first.closed and list(pool) == [second] and pool.advance() == {}
        third = pool.open()
        with pytest.raises(UsageError, match="session is closed"):
            first.push(tokens(1))
    assert second.closed and third.closed
    with pytest.raises(UsageError, match="pool is closed"):
        pool.open()


@pytest.mark.parametrize("option", ["slots", "chunk"])
def test_numbers_without_meaning_are_refused(model: Artifact, option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} is 0; expected 1 or more"):
        model.pool(**{option: 0})


def test_models_without_a_state_or_a_batch_are_refused(converted: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="does not stream"):
        linexport.load(converted("averaging"), threads=1).pool()
    with pytest.raises(UsageError, match="takes 3 rows in every call"):
        linexport.load(converted("fixed_batch"), threads=1).pool()


# Errors of one session alone


def test_a_state_that_overflows_is_an_error_of_its_session_alone(small: Artifact) -> None:
    x = [values(1, seed) for seed in range(3)]
    with small.pool() as pool:
        sessions = [pool.open() for _ in x]
        for piece, session in zip(x, sessions, strict=True):
            session.push(np.full_like(piece, 1e30) if session is sessions[1] else piece)
        sessions[1].push(x[1])
        found = pool.advance()
        error = found[sessions[1]]
        assert isinstance(error, NonFiniteError) and set(error.names) <= set(small.states)
        assert sessions[1].queued == 0 and pool.advance() == {}
        for refused in (sessions[1].state, lambda: sessions[1].push(x[1])):
            with pytest.raises(UsageError, match=r"has ended: The state .* became NaN"):
                refused()
        for index in (0, 2):
            expected = small.run(x[index])["output"]
            np.testing.assert_allclose(found[sessions[index]]["output"], expected, rtol=1e-5)
        sessions[1].reset()
        sessions[1].push(x[1])
        np.testing.assert_allclose(
            pool.advance()[sessions[1]]["output"], small.run(x[1])["output"], rtol=1e-5
        )


def test_what_cannot_be_computed_is_refused_when_it_is_pushed(
    model: Artifact, small: Artifact
) -> None:
    with small.pool() as pool, pytest.raises(NonFiniteError, match="input x has NaN"):
        pool.open().push(np.full((1, 2, 8), np.nan, np.float32))
    with model.pool() as pool:
        session = pool.open()
        for wrong in (np.array([[256]]), np.zeros((1, 0), np.int64), np.zeros((1, 1), np.float32)):
            with pytest.raises(UsageError):
                session.push(wrong)
        assert session.queued == 0


def test_a_call_that_fails_is_an_error_of_the_session_it_fails_for(
    model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = model.call

    def failing(feeds: Any, *states: Any, **options: Any) -> Any:
        if (feeds["tokens"] == 66).any():
            raise RuntimeError("out of the table\nat node 7")
        return call(feeds, *states, **options)

    monkeypatch.setattr(model, "call", failing)
    with model.pool() as pool:
        sessions = [pool.open() for _ in range(3)]
        for token, session in zip((65, 66, 67), sessions, strict=True):
            session.push(np.array([[token]]))
        found = pool.advance()
        assert "out of the table" in str(found[sessions[1]])
        assert [set(found[s]) for s in (sessions[0], sessions[2])] == [{"output"}] * 2


# Threads


def test_threads_open_feed_and_close_while_one_advances(model: Artifact) -> None:
    """Each thread's sequences, some closed in the middle, end as they do alone."""
    results: dict[int, np.ndarray] = {}
    wanted = {seed: tokens(12, seed) for seed in range(12)}
    arrived: dict[Session, list[Any]] = {}
    got = threading.Condition()
    pool = model.pool(slots=4, chunk=4)

    def work(seeds: range) -> None:
        for seed in seeds:
            with pool.open() as session, got:
                arrived[session] = []
                session.push(wanted[seed])
                if seed % 3 == 0:
                    continue
                got.wait_for(lambda s=session: sum(len(o) for o in arrived[s]) == 12, 60)
                results[seed] = np.concatenate(arrived[session])

    def advance() -> None:
        while pool.wait():
            for session, outcome in pool.advance().items():
                with got:
                    arrived[session].append(outcome["output"][0])
                    got.notify_all()

    engine = threading.Thread(target=advance)
    workers = [threading.Thread(target=work, args=(range(w, 12, 4),)) for w in range(4)]
    for thread in (engine, *workers):
        thread.start()
    for worker in workers:
        worker.join()
    pool.close()
    engine.join()
    assert sorted(results) == [s for s in wanted if s % 3]
    for seed, result in results.items():
        expected = model.run(wanted[seed])["output"][0]
        np.testing.assert_allclose(result, expected, atol=1e-5)


def test_a_session_closed_during_a_call_leaves_nothing_behind(
    model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = model.call
    with model.pool(slots=2) as pool:
        first, second = pool.open(), pool.open()

        def closing(feeds: Any, *states: Any, **options: Any) -> Any:
            first.close()
            second.reset()
            return call(feeds, *states, **options)

        monkeypatch.setattr(model, "call", closing)
        for session in (first, second):
            session.push(tokens(1))
        assert pool.advance() == {}
        assert second.state() == model.stream().state()
        assert pool.open().state() == model.stream().state()
