"""Text that a quantised model is calibrated and compared on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from linexport.errors import UsageError
from linexport.quantization import token_windows
from linexport.quantization.token_windows import text_windows


def pipe_in_folder(path: Path) -> None:
    path.mkdir()
    os.mkfifo(path / "a.txt")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (os.mkfifo, "data is not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "data is not a file"),
        (pipe_in_folder, r"a\.txt is not a file"),
        (lambda path: path.mkdir(), "data has no text"),
        (lambda path: path.write_text(""), "data has no text"),
        (lambda path: path.write_bytes(b"\x80\x02"), "data cannot be read: 'utf-8' codec"),
        (lambda path: path.symlink_to(path), "data cannot be read: .*symbolic links"),
        (lambda path: path.write_text("\0\0"), "2 tokens|1 tokens"),
    ],
    ids=["pipe", "device", "folder of a pipe", "folder", "empty", "pickle", "loop", "short"],
)
def test_what_is_no_text_is_refused(
    tmp_path: Path, write: Callable[[Path], object], words: str
) -> None:
    write(tmp_path / "data")
    with pytest.raises(UsageError, match=words):
        text_windows(tmp_path, {}, 256, tmp_path / "data", 0)


def test_of_a_long_text_the_beginning_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_windows, "LARGEST", 400)
    (tmp_path / "data").write_text("ab" * 200 + "c" * 10_000)
    found = text_windows(tmp_path, {}, 256, tmp_path / "data", 0)
    windows = (*found.calibration, *found.compared)
    assert {int(i) for ids in windows for i in ids} == set(b"ab")
    assert sum(len(ids) for ids in windows) == 400
