"""Caches that calls append to: in the same memory, and never in what somebody holds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from linexport.errors import UsageError
from linexport.plugins.cpu.library import FUSED_DOMAIN
from linexport.targets.base import OrtSession
from linexport.targets.cpu_fusion import with_programs
from linexport.targets.cpu_fusion.cache_capacity import (
    AXIS,
    CACHED_TOKENS,
    find_caches,
    with_capacity,
)
from linexport.targets.cpu_fusion.chains import OP as CHAIN
from linexport.targets.cpu_fusion.chains import with_chains
from linexport.targets.runtime.appended_caches import LEAST, beginning, own_memory
from tests.support.cached_attention import LOW, OUTPUTS, Sizes, draw, model, oracle
from tests.support.native import on_library
from tests.support.runtimes import Arrays

SIZES = Sizes(seen=True)
CACHES = {"past_key": "keys", "past_value": "values"}
TOKENS = ("query", "key", "value")


def opened(sizes: Sizes = SIZES, threads: int = 1) -> OrtSession:
    made = OrtSession(model(sizes).SerializeToString(), threads, native=True)
    assert made.native
    return made


def piece(x: Arrays, start: int, end: int, past: int, caches: Arrays) -> Arrays:
    """Inputs of the tokens start ... end - 1, whose caches are those of the tokens before."""
    part = {name: x[name][:, start:end] for name in TOKENS}
    return part | caches | {"key_mask": x["key_mask"][:, : past + end]}


def step(session: OrtSession, x: Arrays, start: int, end: int, past: int, caches: Arrays) -> Arrays:
    """Check a call against the definition, and return its caches."""
    given = piece(x, start, end, past, caches)
    found = session.run(given)
    want = oracle(SIZES, given)
    np.testing.assert_allclose(found["output"], want[0], rtol=0, atol=2e-5)
    for name, expected in zip(OUTPUTS[1:], want[1:], strict=True):
        np.testing.assert_array_equal(found[name], expected)
    return {past: found[present] for past, present in CACHES.items()}


def whole(batch: int, length: int, past: int) -> tuple[Arrays, Arrays]:
    """All tokens, and the caches before them."""
    x = draw(SIZES, batch, length, past, LOW)
    return x, {name: x[name] for name in CACHES}


def is_shared(one: Arrays, other: Arrays) -> bool:
    return all(np.shares_memory(one[name], other[name]) for name in CACHES)


@pytest.mark.smoke
@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(
    batch=st.integers(1, 3),
    past=st.sampled_from([0, 1, 63, 64, 100]),
    lengths=st.lists(st.sampled_from([0, 1, 1, 2, 17, 40, 70]), min_size=1, max_size=6),
    threads=st.integers(1, 2),
)
def test_pieces_are_the_definition(batch: int, past: int, lengths: list[int], threads: int) -> None:
    session, (x, caches), end = opened(threads=threads), whole(batch, sum(lengths), past), 0
    for length in lengths:
        caches = step(session, x, end, end + length, past, caches)
        end += length


def test_appends_until_the_memory_is_full() -> None:
    session, (x, caches) = opened(), whole(2, LEAST + 1, 0)
    first = caches = step(session, x, 0, 1, 0, caches)
    for end in range(2, LEAST + 1):
        caches = step(session, x, end - 1, end, 0, caches)
        assert is_shared(first, caches)
    caches = step(session, x, LEAST, LEAST + 1, 0, caches)
    assert not is_shared(first, caches)


def test_two_sequences_go_on_from_one() -> None:
    session, (x, caches) = opened(), whole(1, 9, 20)
    other = x | {name: -x[name] for name in TOKENS}
    common = step(session, x, 0, 3, 20, caches)
    before = {name: values.copy() for name, values in common.items()}
    one = step(session, x, 3, 9, 20, common)
    two = step(session, other, 3, 9, 20, common)
    assert is_shared(common, one)
    assert not is_shared(common, two)
    for name in CACHES:
        np.testing.assert_array_equal(common[name], before[name])


def test_a_view_keeps_what_it_shows() -> None:
    session, (x, caches) = opened(), whole(1, 9, 20)
    common = step(session, x, 0, 3, 20, caches)
    later = step(session, x, 3, 4, 20, common)
    view = {name: values[:, 1:, 5:] for name, values in later.items()}
    shown = {name: values.copy() for name, values in view.items()}
    del later
    step(session, x, 3, 9, 20, common)
    for name in CACHES:
        np.testing.assert_array_equal(view[name], shown[name])


def test_goes_back_and_on_in_the_same_memory() -> None:
    session, (x, caches) = opened(), whole(2, 12, 5)
    caches = step(session, x, 0, 9, 5, caches)
    shorter = {name: beginning(values, AXIS, 5 + 4) for name, values in caches.items()}
    for name in CACHES:
        np.testing.assert_array_equal(shorter[name], caches[name][:, :, :9])
    del caches
    after = step(session, x, 4, 12, 5, shorter)
    assert is_shared(shorter, after)


def test_beginning_of_any_array() -> None:
    values = np.arange(24.0).reshape(1, 2, 4, 3)
    found = beginning(values, 2, 3)
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, values[:, :, :3])


def test_own_memory_is_as_long_as_what_it_holds() -> None:
    session, (x, caches) = opened(), whole(1, 3, 0)
    caches = step(session, x, 0, 3, 0, caches)
    for values in caches.values():
        assert not values.flags.writeable
        own = own_memory(values)
        assert not np.shares_memory(own, values)
        np.testing.assert_array_equal(own, values)
    assert own_memory(own) is own


def test_threads_that_go_on_from_one_cache() -> None:
    session, (x, caches) = opened(), whole(1, 30, 10)
    common = step(session, x, 0, 2, 10, caches)
    found: list[Arrays] = []

    def go_on(own: Arrays) -> None:
        end, past = 2, common
        for _ in range(20):
            past = step(session, own, end, end + 1, 10, past)
            end += 1
        found.append(past)

    drawn = [x | {name: scale * x[name] for name in TOKENS} for scale in (1, -1, 2, -2)]
    threads = [threading.Thread(target=go_on, args=(own,)) for own in drawn]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(threads)


def test_writes_to_arrays_that_are_there() -> None:
    session, (x, caches) = opened(), whole(1, 4, 3)
    given = piece(x, 0, 4, 3, caches)
    want = oracle(SIZES, given)
    keys = np.zeros_like(want[1])
    found = session.run_into(given, {"keys": keys})
    assert {*found} == {"output", "values"}
    np.testing.assert_array_equal(keys, want[1])


def test_caches_of_different_lengths() -> None:
    x, caches = whole(1, 4, 3)
    caches["past_value"] = caches["past_value"][:, :, :2]
    with pytest.raises(UsageError, match=r"past_value.*\(1, 2, 2, 6\).*expected one length"):
        opened().run(piece(x, 0, 4, 3, caches))


def grown(made: onnx.ModelProto) -> onnx.ModelProto:
    caches = find_caches(made)
    assert caches is not None
    return with_capacity(made, caches)


@pytest.mark.parametrize("sizes", [SIZES, Sizes(6, 3, 8, 5, 2, False, None)])
@pytest.mark.parametrize("length", [1, 20])
def test_what_a_node_computes(sizes: Sizes, length: int) -> None:
    """By the library, by its function and within a chain, of caches of any capacity."""
    x, past, capacity = draw(sizes, 2, length, 9, LOW), 9, 9 + length + 7
    want, rng = oracle(sizes, x), np.random.default_rng(0)
    for name in CACHES:
        held, sizes_of = x[name], list(x[name].shape)
        sizes_of[AXIS] = capacity
        x[name] = rng.standard_normal(sizes_of).astype(np.float32)
        x[name][:, :, :past] = held
    x[CACHED_TOKENS] = np.array([past])
    made = grown(with_programs(model(sizes)))
    onnx.checker.check_model(made)
    chained = with_chains(made)
    assert CHAIN in [node.op_type for node in chained.graph.node] or sizes == SIZES
    for run in (on_library(made), on_library(chained), by_functions(made), by_functions(chained)):
        output, *caches = run(x)
        np.testing.assert_allclose(output, want[0], rtol=0, atol=2e-5)
        for cache, expected in zip(caches, want[1:], strict=True):
            np.testing.assert_allclose(cache[:, :, : past + length], expected, rtol=0, atol=4e-6)
    for cache, name in zip(by_functions(made)(x)[1:], CACHES, strict=True):
        np.testing.assert_array_equal(cache[:, :, past + length :], x[name][:, :, past + length :])


def by_functions(made: onnx.ModelProto) -> Callable[[Arrays], list[np.ndarray]]:
    session = OrtSession(made.SerializeToString(), 1)
    return lambda x: [session.run(x)[name] for name in OUTPUTS]


@pytest.mark.parametrize("tokens", [-1, 17, 2**40])
def test_tokens_that_do_not_fit(tokens: int) -> None:
    x, _ = whole(1, 4, 20)
    x[CACHED_TOKENS] = np.array([tokens])
    x["key_mask"] = np.ones((1, 24), np.int64)
    with pytest.raises(Exception, match="do not fit into the caches"):
        on_library(grown(with_programs(model(SIZES))))(x)


def test_sizes_of_a_cache_are_those_of_what_it_holds() -> None:
    made = with_programs(model(SIZES))
    for i, bounds in enumerate(
        ({}, {"start": 2, "end": 3}, {"start": -2}, {"end": 2}, {"start": 3})
    ):
        made.graph.node.append(helper.make_node("Shape", ["past_key"], [f"sizes{i}"], **bounds))
        made.graph.output.append(
            helper.make_tensor_value_info(f"sizes{i}", TensorProto.INT64, None)
        )
    x, _ = whole(2, 3, 4)
    found = OrtSession(made.SerializeToString(), 1, native=True)
    for _ in range(2):
        got = found.run(x)
        shape = (2, 2, x["past_key"].shape[AXIS], 8)
        wanted = (shape, shape[2:3], shape[2:], shape[:2], shape[3:])
        for i, want in enumerate(wanted):
            assert tuple(got[f"sizes{i}"]) == want
        x |= {past: got[present] for past, present in CACHES.items()}
        x["key_mask"] = np.ones((2, 10), np.int64)


def test_caches_that_something_else_reads() -> None:
    for name in ("past_key", "keys"):
        made = with_programs(model(SIZES))
        made.graph.node.append(helper.make_node("Neg", [name], ["more"]))
        made.graph.output.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, None))
        assert find_caches(made) is None
    plain = with_programs(model(replace(SIZES, seen=False)))
    assert [o.domain for o in plain.opset_import].count(FUSED_DOMAIN) == 1
    assert find_caches(onnx.ModelProto()) is None
