"""A state that cannot be poisoned silently: what a stream refuses, and what goes on."""

from __future__ import annotations

import io
import multiprocessing
import pickle
import shutil
import threading
import zipfile
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import linexport
from linexport.artifact import Artifact, StreamState, state_quantization
from linexport.artifact.finite import non_finite_rows
from linexport.errors import NonFiniteError, UsageError

pytestmark = pytest.mark.usefixtures("one_thread")


def tokens(batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(batch, length))


def values(batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(batch, length, 8)).astype(np.float32)


# Tokens


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[-1, 3]], "values from -1 to 3; the model's table takes 0 to 255"),
        ([[3, 256]], "values from 3 to 256"),
        ([[2**62]], "the model's table takes 0 to 255"),
        (np.zeros((1, 0), np.int64), "seq 0; expected at least 1|has seq 0|0; expected at least 1"),
        (np.zeros((0, 3), np.int64), "batch 0; expected at least 1"),
    ],
)
def test_ids_out_of_the_vocabulary_and_no_tokens_are_refused_alike(
    model: Artifact, ids: Any, message: str
) -> None:
    ids = np.asarray(ids)
    with pytest.raises(UsageError, match=message):
        model.run(ids)
    stream = model.stream()
    stream.step(tokens(1, 5))
    before = stream.state()
    with pytest.raises(UsageError, match=message):
        stream.step(ids)
    assert stream.state() == before
    if ids.shape[0] == 1:
        with pytest.raises(UsageError, match=r"token ids from|has no tokens|one row"):
            model.generate(ids[0])


# NaN and infinity


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_input_that_is_not_finite_is_named_with_its_rows_and_changes_nothing(
    small: Artifact, value: float
) -> None:
    stream, x = small.stream(), values(4, 3)
    stream.step(x)
    before, spoiled = stream.state(), x.copy()
    spoiled[2, 1, 5] = spoiled[3, 0, 0] = value
    with pytest.raises(NonFiniteError, match=r"input x has NaN or infinity in rows 2, 3") as caught:
        stream.step(spoiled)
    assert (caught.value.names, caught.value.rows) == (("x",), (2, 3))
    assert stream.state() == before and not stream.stopped


def overflowing(x: np.ndarray, row: int) -> np.ndarray:
    """Finite values whose squares are not."""
    changed = x.copy()
    changed[row] = 1e30
    return changed


def test_a_row_whose_state_overflows_is_stopped_and_the_others_go_on(small: Artifact) -> None:
    stream, x = small.stream(), [values(3, 4, seed) for seed in range(4)]
    expected = small.run(np.concatenate(x, 1))["output"]
    stream.step(x[0])
    with pytest.raises(NonFiniteError, match=r"became NaN or infinite in row 1") as caught:
        stream.step(overflowing(x[1], 1))
    error = caught.value
    assert error.rows == (1,) and set(error.names) <= set(small.states)
    others = [0, 2]
    assert error.outputs is not None
    outputs = [error.outputs["output"], stream.step(x[2])["output"]]
    for part, output in enumerate(outputs, 1):
        np.testing.assert_allclose(
            output[others], expected[others, 4 * part : 4 * part + 4], rtol=1e-4, atol=1e-5
        )
        assert np.isnan(output[1]).all()
    assert stream.stopped == {1}
    with pytest.raises(UsageError, match=r"Row 1 of this stream lost the state"):
        stream.save("/nowhere")
    stream.reset(rows=[1])
    output = stream.step(x[3])["output"]
    np.testing.assert_allclose(output[others], expected[others, 12:], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(output[1], small.run(x[3])["output"][1], rtol=1e-4, atol=1e-5)


def test_a_stopped_row_may_be_fed_anything_until_it_is_reset(small: Artifact) -> None:
    stream, x = small.stream(), values(2, 3)
    with pytest.raises(NonFiniteError):
        stream.step(overflowing(x, 0))
    for spoiled in (overflowing(x, 0), np.where([[[True]], [[False]]], np.nan, x)):
        output = stream.step(spoiled.astype(np.float32))["output"]
        assert np.isnan(output[0]).all() and np.isfinite(output[1]).all()
    assert stream.fork().stopped == {0}
    stream.reset()
    assert not stream.stopped


def test_rows_that_there_are_not_cannot_be_reset(small: Artifact) -> None:
    stream = small.stream()
    with pytest.raises(UsageError, match="row 0; this stream has 0 rows"):
        stream.reset(rows=[0])
    stream.step(values(2, 3))
    for rows in ([2], [-1, 0]):
        with pytest.raises(UsageError, match="this stream has 2 rows"):
            stream.reset(rows=rows)


def test_where_rows_share_a_state_one_cannot_begin_anew(converted: Callable[..., Path]) -> None:
    artifact = linexport.load(converted("streaming"), threads=1)
    stream = artifact.stream()
    stream.step(values(2, 3))
    with pytest.raises(UsageError, match=r"past_length is one of all rows.*reset\(\) for all"):
        stream.reset(rows=[1])


def test_the_check_can_be_left_out(small: Artifact) -> None:
    stream, x = small.stream(finite=False), values(2, 3)
    stream.step(overflowing(x, 0))
    assert not np.isfinite(stream.step(x)["output"][0]).all()


def test_sums_that_overflow_are_no_infinite_values() -> None:
    huge = np.full((3, 1000), 3e38, np.float32)
    assert non_finite_rows(huge).tolist() == []
    huge[1, 7] = np.inf
    assert non_finite_rows(huge).tolist() == [1]
    cancelling = np.array([[np.inf], [-np.inf], [0.0]], np.float32)
    assert non_finite_rows(cancelling).tolist() == [0, 1]
    assert non_finite_rows(np.full((2, 9000), 60000, np.float16)).tolist() == []


# States as values


def test_a_state_is_a_value(model: Artifact) -> None:
    stream, sequence = model.stream(), tokens(2, 20)
    assert stream.state() == model.stream().state() and stream.state().nbytes == 0
    stream.step(sequence[:, :8])
    state = stream.state()
    copy = pickle.loads(pickle.dumps(state))
    assert copy == state and hash(copy) == hash(state) and copy.digest == state.digest
    assert state.nbytes == sum(v.nbytes for v in state.arrays.values()) > 0
    expected = stream.step(sequence[:, 8:])["output"]
    assert stream.state() != state == copy
    stream.restore(state)
    np.testing.assert_array_equal(stream.step(sequence[:, 8:])["output"], expected)
    with pytest.raises(ValueError, match="read-only"):
        next(iter(state.arrays.values()))[...] = 0


def test_a_state_and_its_file_are_equal(model: Artifact, tmp_path: Path) -> None:
    stream = model.stream()
    for length in (0, 3):
        if length:
            stream.step(tokens(2, length))
        state = stream.state()
        state.save(tmp_path / "state.npz")
        assert StreamState.load(tmp_path / "state.npz") == state
        assert (tmp_path / "state.npz").read_bytes() == state.to_bytes()


def rewrite(path: Path, **changes: Any) -> None:
    with np.load(path) as file:
        arrays = dict(file)
    kept = {name: value for name, value in {**arrays, **changes}.items() if value is not None}
    np.savez(path, **kept)


@pytest.fixture
def saved(model: Artifact, tmp_path: Path) -> Path:
    stream = model.stream()
    stream.step(tokens(2, 5))
    stream.save(tmp_path / "state.npz")
    return tmp_path / "state.npz"


def test_a_file_that_was_written_without_a_format_is_read(model: Artifact, saved: Path) -> None:
    state = StreamState.load(saved)
    rewrite(saved, state_format=None)
    stream = model.stream()
    stream.restore(saved)
    assert stream.state() == state


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_saved_state_that_is_not_finite_is_refused(
    model: Artifact, saved: Path, value: float
) -> None:
    with np.load(saved) as file:
        spoiled = file["past_state_1"]
    spoiled[1].flat[3] = value
    rewrite(saved, past_state_1=spoiled)
    with pytest.raises(UsageError, match="has NaN or infinity in past_state_1, row 1"):
        model.stream().restore(saved)


def test_a_saved_state_that_holds_only_a_digest_is_refused(model: Artifact, saved: Path) -> None:
    np.savez(saved, model_sha256=np.array(model.model_sha256))
    with pytest.raises(UsageError, match="not a saved stream: it holds a digest and no state"):
        model.stream().restore(saved)


def npy(shape: str, dtype: str = "<f4") -> bytes:
    """The beginning of an array that promises much."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy("(1099511627776,)"), "promises 4398046511104 bytes and has 16"),
        (npy("(2, -2)"), "promises"),
        (npy("(2, 1)"), "promises 8 bytes and has 16"),
        (npy("(4,)", "|O"), "dtype object"),
        (npy("(4,)", "<U0"), "dtype <U0"),
        (b"\x93NUMPY\x09\x00", "format"),
        (b"", "EOF|magic"),
    ],
)
def test_a_header_is_compared_with_the_bytes_before_memory_is_asked_for(
    model: Artifact, saved: Path, content: bytes, message: str
) -> None:
    with zipfile.ZipFile(saved, "a") as file:
        file.writestr("past_more.npy", content + bytes(16) if content else b"")
    with pytest.raises(UsageError, match=f"not a saved stream: .*({message})"):
        model.stream().restore(saved)


def test_a_compressed_state_is_refused(model: Artifact, saved: Path) -> None:
    with np.load(saved) as file:
        np.savez_compressed(saved, **dict(file))
    with pytest.raises(UsageError, match="is compressed"):
        model.stream().restore(saved)


def test_a_flipped_bit_in_a_saved_state_is_found(model: Artifact, saved: Path) -> None:
    content = saved.read_bytes()
    for place in np.random.default_rng(0).integers(len(content), size=60):
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(place) % 8
        saved.write_bytes(damaged)
        try:
            found = StreamState.load(saved)
        except UsageError:
            continue
        assert found.to_bytes() == content  # a date in the zip, for example


# Kept in fewer bits


@pytest.mark.parametrize(
    ("precision", "share", "limit"), [("float16", 0.55, 5e-4), ("int8", 0.45, 2e-2)]
)
def test_a_state_in_fewer_bits_is_as_far_as_it_says(
    model: Artifact, tmp_path: Path, precision: str, share: float, limit: float
) -> None:
    stream = model.stream()
    stream.step(tokens(2, 40))
    state = stream.state()
    content = state.to_bytes(precision)
    found = StreamState.from_bytes(content)
    state.save(tmp_path / "state.npz", precision)
    assert StreamState.load(tmp_path / "state.npz") == found != state
    assert len(content) < len(state.to_bytes())
    kept = state_quantization.shrink(state.arrays, precision)
    assert sum(v.nbytes for v in kept.values()) < share * state.nbytes
    errors = state.error_at_rest(precision)
    assert errors.keys() == state.arrays.keys()
    for name, values in state.arrays.items():
        back, exact = found.arrays[name], values.astype(np.float64)
        assert (back.dtype, back.shape) == (values.dtype, values.shape)
        distance = np.linalg.norm(back - exact) / np.linalg.norm(exact)
        assert 0 < distance <= limit
        assert errors[name] == pytest.approx(distance, rel=1e-6)
    stream.restore(found)
    stream.step(tokens(2, 1))


@settings(max_examples=60, deadline=None)
@given(scale=st.floats(-30, 30), zero=st.booleans(), precision=st.sampled_from(["float16", "int8"]))
def test_no_size_of_values_overflows(scale: float, zero: bool, precision: str) -> None:
    values = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    values = values * np.float32(10.0**scale)
    if zero:
        values[0, 1] = 0
    state = StreamState("0" * 64, {"past": values, "mask": np.ones((2, 3), np.int64)})
    back = StreamState.from_bytes(state.to_bytes(precision)).arrays
    np.testing.assert_array_equal(back["mask"], 1)
    assert np.isfinite(back["past"]).all()
    if scale > -3:
        step = np.abs(values).max(-1, keepdims=True) / 254 if precision == "int8" else 0
        limit = 1.01 * step + 1e-3 * np.abs(values) * (precision != "int8") + 1e-7
        assert (np.abs(back["past"] - values) <= limit).all()


def test_fewer_bits_are_of_a_kind_that_there_is(model: Artifact) -> None:
    state = model.stream().state()
    assert StreamState.from_bytes(state.to_bytes("int8")) == state
    for call in (state.to_bytes, state.error_at_rest):
        with pytest.raises(UsageError, match="precision is 'int4'; expected one of float32"):
            call("int4")
    with pytest.raises(UsageError, match="The bytes are not a saved stream"):
        StreamState.from_bytes(b"PK")


@pytest.mark.parametrize(
    "scale", [np.ones((2, 1), np.float32), np.ones((), np.int64), np.ones((4, 2, 1), np.float32)]
)
def test_a_scale_that_is_not_that_of_its_array_is_refused(scale: np.ndarray) -> None:
    buffer = io.BytesIO()
    entries = {"past": np.ones((2, 4, 3), np.int8), "past/scale": scale}
    np.savez(buffer, model_sha256=np.array("0" * 64), state_format=np.int64(3), **entries)
    with pytest.raises(UsageError, match="past and its scale do not belong together"):
        StreamState.from_bytes(buffer.getvalue())


def test_the_size_of_a_state_is_known_beforehand(model: Artifact, small: Artifact) -> None:
    stream = model.stream()
    stream.step(tokens(3, 7))
    assert model.state_bytes(7, batch=3) == stream.state().nbytes == 3 * model.state_bytes()
    other = small.stream()
    other.step(values(1, 2))
    assert small.state_bytes(2) == other.state().nbytes


# Threads and processes


def test_threads_that_share_a_stream_lose_no_step(small: Artifact) -> None:
    """Sums of outer products do not depend on the order of the steps."""
    stream, x = small.stream(), values(1, 1)
    steps = 40

    def work() -> None:
        for _ in range(steps):
            stream.step(x)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    alone = small.stream()
    for _ in range(4 * steps):
        alone.step(x)
    assert stream.state() == alone.state()


def test_an_artifact_and_a_stream_are_pickled_by_path_and_digest(
    model: Artifact, converted: Callable[..., Path], tmp_path: Path
) -> None:
    place = Path(shutil.copytree(model.path, tmp_path / "artifact"))
    first = linexport.load(place, threads=1)
    stream, sequence = first.stream(), tokens(2, 20)
    stream.step(sequence[:, :8])
    content = pickle.dumps((first, stream))
    assert len(content) < place.joinpath("model.onnx").stat().st_size
    again, resumed = pickle.loads(content)
    np.testing.assert_array_equal(again.run(sequence)["output"], first.run(sequence)["output"])
    rest = sequence[:, 8:]
    np.testing.assert_array_equal(resumed.step(rest)["output"], stream.step(rest)["output"])
    shutil.rmtree(place)
    shutil.copytree(converted("another_language_model"), place)
    with pytest.raises(UsageError, match="is not the artifact that was pickled"):
        pickle.loads(content)


def test_an_artifact_runs_in_a_process_that_was_spawned(model: Artifact) -> None:
    sequence = tokens(1, 6)
    stream = model.stream()
    stream.step(sequence)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        there = pool.apply(methodcaller("run", sequence), (model,))
        np.testing.assert_array_equal(there["output"], model.run(sequence)["output"])
        after = pool.apply(methodcaller("step", sequence), (stream,))
    np.testing.assert_array_equal(after["output"], stream.step(sequence)["output"])


def test_a_saved_stream_is_an_ordinary_npz(model: Artifact) -> None:
    stream = model.stream()
    stream.step(tokens(1, 3))
    with np.load(io.BytesIO(stream.state().to_bytes()), allow_pickle=False) as file:
        assert {"model_sha256", "state_format", *model.states} == {*file.files}
