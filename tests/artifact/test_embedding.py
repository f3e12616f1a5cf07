"""Batches of texts, and how near vectors are to each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linexport.artifact.text.embedding import ROWS, batches
from linexport.artifact.text.vectors import check_vectors_path, similarities, write_vectors
from linexport.errors import UsageError


@given(st.lists(st.integers(1, 3000), max_size=200))
def test_each_text_is_in_one_batch_and_less_than_half_is_padding(lengths: list[int]) -> None:
    found = list(batches(lengths))
    assert sorted(i for batch in found for i in batch) == list(range(len(lengths)))
    for batch in found:
        own = [lengths[i] for i in batch]
        assert 1 <= len(own) <= ROWS and 2 * sum(own) > max(own) * len(own)


def test_similarities_are_cosines_and_maxsim() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 7))
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert similarities(np.stack([a, b])) == [pytest.approx(cosine)]
    first, second = rng.standard_normal((3, 7)), rng.standard_normal((5, 7))
    best = [max(x @ y / np.linalg.norm(x) / np.linalg.norm(y) for y in second) for x in first]
    assert similarities([first, second]) == [pytest.approx(np.mean(best))]


def test_vectors_are_written_by_their_kind(tmp_path: Path) -> None:
    texts, tokens = np.ones((2, 3), np.float32), [np.ones((4, 3)), np.ones((1, 3))]
    write_vectors(tmp_path / "a.npy", texts)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), texts)
    write_vectors(tmp_path / "b.npz", tokens)
    with np.load(tmp_path / "b.npz") as found:
        assert [found[name].shape for name in found.files] == [(4, 3), (1, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npy", "b.npz"]


@pytest.mark.parametrize(
    ("path", "by_token", "said"),
    [
        ("a.npz", False, "a.npz; this model's vectors are written to .npy"),
        ("b.npy", True, "b.npy; this model's vectors are written to .npz"),
        ("none/a.npy", False, "none does not exist"),
    ],
)
def test_the_name_of_a_file_is_checked_first(
    tmp_path: Path, path: str, by_token: bool, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        check_vectors_path(tmp_path / path, by_token)


def test_a_file_of_vectors_that_cannot_be_written_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(b"before")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(UsageError, match="cannot be written: No space left"):
        write_vectors(path, np.ones((2, 3), np.float32))
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]
