"""An artifact at run time: whole sequences, streams, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import linexport
from linexport.artifact import Artifact
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.manifest import dumps, read, to_json
from linexport.sources import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 5e-5


def tokens(batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(batch, length))


def close(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max()


def feed(stream: Any, sequence: np.ndarray, pieces: list[int]) -> np.ndarray:
    """The pieces' outputs, joined."""
    ends = np.cumsum(pieces)
    assert ends[-1] == sequence.shape[1]
    parts = np.split(sequence, ends[:-1], axis=1)
    return np.concatenate([stream.step(p)["output"] for p in parts], axis=1)


# Whole sequences


def test_inputs_by_position_by_name_and_as_a_mapping(small: Artifact) -> None:
    x = np.random.default_rng(0).normal(size=(3, 9, 8)).astype(np.float32)
    expected = small.run(x)
    assert list(expected) == ["output"]
    for again in (small.run(x=x), small.run({"x": x})):
        np.testing.assert_array_equal(again["output"], expected["output"])


def test_a_float64_input_is_taken_as_float32(small: Artifact) -> None:
    x = np.random.default_rng(0).normal(size=(3, 9, 8))
    assert small.run(x)["output"].dtype == np.float32


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("args", "named", "message"),
    [
        ((), {}, r"Found the inputs \[\]; expected \['x'\]"),
        ((np.zeros((1, 2, 8), np.float32),) * 2, {}, "Found 2 inputs; expected 1"),
        ((), {"y": np.zeros((1, 2, 8))}, r"inputs \['y'\]"),
        ((np.zeros((1, 2, 9), np.float32),), {}, r"shape \(1, 2, 9\); expected \('batch'"),
        ((np.zeros((2, 8), np.float32),), {}, r"shape \(2, 8\)"),
        ((np.zeros((1, 2, 8), np.complex64),), {}, "dtype complex64; expected float32"),
        ((np.array("text"),), {}, "dtype"),
    ],
)
def test_wrong_inputs_are_refused(small: Artifact, args: Any, named: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        small.run(*args, **named)


def test_inputs_that_disagree_are_refused(converted: Callable[..., Path]) -> None:
    artifact = linexport.load(converted("masked"), threads=1)
    with pytest.raises(UsageError, match="seq 5; another input has 4"):
        artifact.run(np.zeros((1, 4, 8), np.float32), np.ones((1, 5), bool))


# Streams


@pytest.mark.smoke
def test_pieces_give_what_the_whole_gives(small: Artifact) -> None:
    x = np.random.default_rng(0).normal(size=(2, 40, 8)).astype(np.float32)
    stream = small.stream()
    got = [stream.step(part)["output"] for part in np.split(x, [1, 2, 17], axis=1)]
    close(np.concatenate(got, 1), small.run(x)["output"])


@given(
    pieces=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    batch=st.integers(1, 3),
    seed=st.integers(0, 9),
)
@settings(max_examples=20, deadline=None)
def test_any_split_gives_what_the_whole_gives(
    model: Artifact, pieces: list[int], batch: int, seed: int
) -> None:
    sequence = tokens(batch, sum(pieces), seed)
    close(feed(model.stream(), sequence, pieces), model.run(sequence)["output"])


def test_token_by_token_gives_what_the_whole_gives(model: Artifact) -> None:
    sequence = tokens(2, 70)
    close(feed(model.stream(), sequence, [1] * 70), model.run(sequence)["output"])


def test_it_writes_what_pytorch_writes(model: Artifact, factories: Any) -> None:
    original: Any = load_model(factories.source("language_model")).module
    prompt = tokens(2, 11)
    expected = original.generate(torch.from_numpy(prompt), 64).numpy()
    stream, step, written = model.stream(), prompt, []
    for _ in range(64):
        step = stream.step(step)["output"][:, -1:].argmax(-1)
        written.append(step)
    np.testing.assert_array_equal(np.concatenate(written, 1), expected)
    assert len(np.unique(expected)) > 1


def test_reset_begins_again_with_any_batch(model: Artifact) -> None:
    stream, first = model.stream(), tokens(2, 5)
    expected = stream.step(first)["output"]
    assert not np.allclose(stream.step(first)["output"], expected)
    stream.reset()
    np.testing.assert_array_equal(stream.step(first)["output"], expected)
    stream.reset()
    assert stream.step(first[:1])["output"].shape[0] == 1


def test_a_fork_and_its_origin_do_not_disturb_each_other(model: Artifact) -> None:
    stream, sequence = model.stream(), tokens(1, 30)
    stream.step(sequence[:, :10])
    fork, other = stream.fork(), tokens(1, 7, seed=5)
    branch = np.concatenate([sequence[:, :10], other], axis=1)
    close(fork.step(other)["output"], model.run(branch)["output"][:, 10:])
    close(stream.step(sequence[:, 10:])["output"], model.run(sequence)["output"][:, 10:])
    fresh = model.stream().fork()
    close(fresh.step(sequence)["output"], model.run(sequence)["output"])


def test_a_saved_stream_goes_on_elsewhere(model: Artifact, tmp_path: Path) -> None:
    stream, sequence = model.stream(), tokens(2, 30)
    stream.step(sequence[:, :13])
    stream.save(tmp_path / "state.npz")
    expected = stream.step(sequence[:, 13:])["output"]
    other = linexport.load(model.path, threads=1).stream()
    other.restore(tmp_path / "state.npz")
    np.testing.assert_array_equal(other.step(sequence[:, 13:])["output"], expected)


def test_a_stream_saved_before_its_first_step_begins_anew(model: Artifact, tmp_path: Path) -> None:
    model.stream().save(tmp_path / "state.npz")
    stream = model.stream()
    expected = stream.step(tokens(1, 4))["output"]
    stream.restore(tmp_path / "state.npz")
    np.testing.assert_array_equal(stream.step(tokens(1, 4))["output"], expected)


def test_the_state_of_another_model_is_refused(
    model: Artifact, small: Artifact, converted: Callable[..., Path], tmp_path: Path
) -> None:
    twin = linexport.load(converted("another_language_model"), threads=1)
    assert twin.manifest.states == model.manifest.states
    first = model.stream()
    first.step(tokens(1, 4))
    first.save(tmp_path / "state.npz")
    for other in (small.stream(), twin.stream()):
        with pytest.raises(UsageError, match="state of another model"):
            other.restore(tmp_path / "state.npz")


def test_a_refused_state_leaves_the_stream_as_it_was(
    model: Artifact, small: Artifact, tmp_path: Path
) -> None:
    stream, sequence = model.stream(), tokens(1, 9)
    stream.step(sequence[:, :4])
    small.stream().save(tmp_path / "state.npz")
    with pytest.raises(UsageError):
        stream.restore(tmp_path / "state.npz")
    close(stream.step(sequence[:, 4:])["output"], model.run(sequence)["output"][:, 4:])


@pytest.mark.parametrize("kind", ["empty", "junk", "truncated", "array", "folder", "missing"])
def test_what_is_no_saved_stream_is_refused(model: Artifact, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "state.npz"
    if kind == "folder":
        path.mkdir()
    elif kind == "array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    elif kind == "truncated":
        stream = model.stream()
        stream.step(tokens(1, 4))
        stream.save(path)
        path.write_bytes(path.read_bytes()[:200])
    elif kind != "missing":
        path.write_bytes({"empty": b"", "junk": b"junk"}[kind])
    with pytest.raises(UsageError, match="not a saved stream"):
        model.stream().restore(path)


def test_a_state_of_the_wrong_shape_is_refused(model: Artifact, tmp_path: Path) -> None:
    stream = model.stream()
    stream.step(tokens(1, 4))
    stream.save(tmp_path / "state.npz")
    with np.load(tmp_path / "state.npz") as file:
        arrays = dict(file)
    arrays["past_state_1"] = arrays["past_state_1"][..., :-1]
    np.savez(tmp_path / "state.npz", **arrays)
    with pytest.raises(UsageError, match="past_state_1 does not fit"):
        model.stream().restore(tmp_path / "state.npz")


def test_another_batch_in_mid_stream_is_refused(model: Artifact) -> None:
    stream = model.stream()
    stream.step(tokens(2, 4))
    with pytest.raises(UsageError, match=r"batch 2; the step has 1.*reset"):
        stream.step(tokens(1, 4))


def test_a_model_whose_batch_is_fixed_streams(converted: Callable[..., Path]) -> None:
    artifact = linexport.load(converted("fixed_batch"), threads=1)
    x = np.random.default_rng(0).normal(size=(3, 20, 8)).astype(np.float32)
    close(feed(artifact.stream(), x, [1, 7, 12]), artifact.run(x)["output"])
    with pytest.raises(UsageError, match=r"expected \(3, 'seq', 8\)"):
        artifact.run(x[:2])


def test_a_batch_by_any_other_name_streams(converted: Callable[..., Path]) -> None:
    artifact = linexport.load(converted("named"), threads=1)
    x = np.random.default_rng(0).normal(size=(4, 20, 8)).astype(np.float32)
    close(feed(artifact.stream(), x, [1, 7, 12]), artifact.run(x)["output"])


def test_a_stream_counts_its_tokens(converted: Callable[..., Path], tmp_path: Path) -> None:
    artifact = linexport.load(converted("streaming"), threads=1)
    x = np.random.default_rng(0).normal(size=(3, 40, 8)).astype(np.float32)
    whole = artifact.run(x)["output"]
    stream = artifact.stream()
    stream.step(x[:, :25])
    branch = stream.fork()
    stream.save(tmp_path / "state.npz")
    restored = artifact.stream()
    restored.restore(tmp_path / "state.npz")
    for one in (stream, branch, restored):
        close(one.step(x[:, 25:])["output"], whole[:, 25:])


def test_a_table_of_positions_ends_with_an_error(converted: Callable[..., Path]) -> None:
    """Not with a row that is broadcast over what is left."""
    artifact = linexport.load(converted("streaming"), threads=1)
    stream = artifact.stream()
    stream.step(np.zeros((1, 4999, 8), np.float32))
    with pytest.raises(Exception, match=r"out of (data )?bounds"):
        stream.step(np.zeros((1, 2, 8), np.float32))


def test_a_model_that_mixes_tokens_has_no_stream_and_says_why(
    converted: Callable[..., Path],
) -> None:
    artifact = linexport.load(converted("averaging"), threads=1)
    with pytest.raises(
        UsageError,
        match=r"does not stream: exported without state: ReduceMean .*all tokens of a call",
    ):
        artifact.stream()
    assert artifact.initial_state() == {}


# Opening


def test_a_failed_artifact_opens_only_on_demand(artifact: Path) -> None:
    manifest = replace(read(artifact), status="parity_failed")
    (artifact / "manifest.json").write_text(dumps(to_json(manifest)))
    with pytest.raises(linexport.errors.ParityError, match="allow_failed=True"):
        linexport.load(artifact)
    x = np.zeros((1, 2, 8), np.float32)
    assert linexport.load(artifact, allow_failed=True, threads=1).run(x)["output"].shape == x.shape


@pytest.mark.smoke
def test_a_damaged_model_file_is_refused(artifact: Path) -> None:
    model = artifact / "model.onnx"
    model.write_bytes(model.read_bytes()[:-7])
    with pytest.raises(UsageError, match=r"model\.onnx is damaged: found \d+ bytes, expected"):
        linexport.load(artifact)
    with pytest.raises(EnvironmentProblemError, match="Cannot open"):
        linexport.load(artifact, verify=False)
    model.unlink()
    with pytest.raises(UsageError, match=r"model\.onnx is missing"):
        linexport.load(artifact)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"has no manifest\.json"),
        ("", "cannot be read"),
        ('{"format": 1', "cannot be read"),
        ("[]", "is not a linexport manifest"),
        ('{"format": 1}', "is not a linexport manifest"),
        (
            '{"format": 99, "linexport": "9.9"}',
            "has format 99; this version of linexport reads 2 and 3",
        ),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_what_is_no_artifact_is_refused(artifact: Path, text: Any, message: str) -> None:
    path = artifact / "manifest.json"
    path.unlink()
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=message):
        linexport.load(artifact)


@pytest.mark.parametrize("place", ["missing", "a_file", "n" * 300, "nul\0byte"])
def test_what_is_no_folder_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "a_file").write_text("")
    with pytest.raises(UsageError):
        linexport.load(tmp_path / place)


def test_a_manifest_is_standard_json() -> None:
    text = dumps({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "c": {"d": None}}


def test_an_artifact_may_be_moved(artifact: Path, tmp_path: Path) -> None:
    shutil.move(artifact, tmp_path / "elsewhere")
    x = np.zeros((1, 2, 8), np.float32)
    assert linexport.load(tmp_path / "elsewhere", threads=1).run(x)["output"].shape == x.shape
