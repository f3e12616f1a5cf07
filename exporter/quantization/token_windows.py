"""Windows of token ids that a language model is calibrated and compared on.

Text comes from the user's files, or else from the source of Python's standard library. It is read
by the artifact's tokenizer, or as bytes where the vocabulary is 256. Windows to calibrate on and
windows to compare on come from different parts of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from linexport.artifact.text.tokenizer import Files, context, find_tokenizer
from linexport.errors import UsageError
from linexport.manifest.quantisation import TextRecord
from linexport.models.data import library_text

LENGTH = 512
CALIBRATION_WINDOWS = 32
COMPARED_WINDOWS = 12
LONG_LENGTH, LONG_WINDOWS = 4096, 2
"""Errors of a recurrence can grow with the position: some windows are long."""

MAX_CHARACTERS = 2_000_000
"""Text that is read of each part; windows are spread over it evenly."""

HELD_OUT = 4
"""One part in so many of the user's text is compared on."""

LARGEST = 2 * HELD_OUT * MAX_CHARACTERS
"""Characters read of the user's text, so that both parts have ``MAX_CHARACTERS``."""

Window = NDArray[np.int64]


@dataclass(frozen=True)
class TextWindows:
    """Token ids, (T,) each.

    Attributes:
        calibration: to choose quantised values by.
        compared: to compare models on.
        description: where they come from, in words.
        text: the user's text, None for other token ids.
    """

    calibration: tuple[Window, ...]
    compared: tuple[Window, ...]
    description: str
    text: TextRecord | None = None


def text_windows(
    folder: Path,
    files: Files,
    vocabulary: int,
    data: Path | None,
    seed: int,
    longest: int | None = None,
) -> TextWindows:
    """Read text and cut windows of token ids from it.

    Args:
        folder: the artifact, which may have a tokenizer.
        files: of the artifact, as they were verified; empty to take files as they are.
        vocabulary: number of token ids.
        data: a text file or a folder of ``.txt`` files, of which the first ``LARGEST`` characters
            are read; None for Python's own source.
        seed: of random ids, which are used where an artifact has no tokenizer and no data is given.
        longest: tokens that a call of the artifact takes; None: any number.

    Raises:
        UsageError: data cannot be read, or is shorter than two windows.
    """
    limit = min(context(folder, files) or LONG_LENGTH, longest or LONG_LENGTH)
    try:
        tokenizer = find_tokenizer(folder, vocabulary, files)
    except UsageError:
        if data is not None:
            raise
        return _random(vocabulary, limit, seed)
    source = None
    if data is None:
        train, held_out = (_decoded(part.numpy()) for part in library_text())
        description = "source of Python's standard library"
    else:
        text, source = read_text(data)
        cut = len(text) - len(text) // HELD_OUT
        train, held_out, description = text[:cut], text[cut:], str(data)
    ids = [
        np.asarray(tokenizer.encode(part[:MAX_CHARACTERS]), np.int64) for part in (train, held_out)
    ]
    if min(map(len, ids)) < 2:
        raise UsageError(
            f"{description} gives {len(ids[0])} tokens to calibrate on and {len(ids[1])} to "
            "compare on; expected some hundreds at least. Pass more text."
        )
    return TextWindows(
        _spread(ids[0], min(LENGTH, limit), CALIBRATION_WINDOWS),
        _compared(ids[1], limit),
        description,
        source,
    )


def _compared(ids: Window, limit: int) -> tuple[Window, ...]:
    short = _spread(ids, min(LENGTH, limit), COMPARED_WINDOWS)
    length = min(LONG_LENGTH, limit, len(ids))
    return (*short, *(_spread(ids, length, LONG_WINDOWS) if length > LENGTH else ()))


def _random(vocabulary: int, limit: int, seed: int) -> TextWindows:
    random = np.random.default_rng(seed)
    ids = random.integers(vocabulary, size=(2, LONG_LENGTH * LONG_WINDOWS))
    return TextWindows(
        _spread(ids[0], min(LENGTH, limit), CALIBRATION_WINDOWS // 2),
        _compared(ids[1], limit),
        "random token ids (the artifact has no tokenizer to read text with)",
    )


def _spread(ids: Window, length: int, count: int) -> tuple[Window, ...]:
    """Cut up to ``count`` windows, evenly spread, that do not overlap."""
    length = min(length, len(ids))
    count = max(1, min(count, len(ids) // length))
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return tuple(ids[start : start + length] for start in starts)


def _decoded(text: NDArray[np.uint8]) -> str:
    return text.tobytes().decode("utf-8", "replace")


def read_text(path: Path) -> tuple[str, TextRecord]:
    """Read up to ``LARGEST`` characters of a text file, or of the ``.txt`` files of a folder.

    Raises:
        UsageError: no text was found, or it cannot be read.
    """
    files: Sequence[Path] = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    parts: list[str] = []
    left = LARGEST
    for file in files:
        if file.exists() and not file.is_file():  # it may never end, or never begin
            raise UsageError(f"--data {file} is not a file. Expected UTF-8 text.")
        try:
            with file.open(encoding="utf-8") as opened:
                parts.append(opened.read(left))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--data {file} cannot be read: {error}. Expected UTF-8 text."
            ) from None
        left -= len(parts[-1])
    text = "\n".join(parts)
    if not text:
        raise UsageError(f"--data {path} has no text: expected .txt files in it, or one text file.")
    return text, TextRecord(str(path), hashlib.sha256(text.encode()).hexdigest())
