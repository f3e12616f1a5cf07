"""Real data that is already on the machine: Python's own source text, and scikit-learn's digits."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from linexport.errors import EnvironmentProblemError
from linexport.system.install import pip_install_here

# One in sixteen of the library's files; about one in five of the images.
_HELD_OUT_FILES = 16
_TRAIN_IMAGES = 1437
_SIDE = 8
_STORED_IMAGES = 1024


class Text(NamedTuple):
    """Bytes for training and bytes the model never sees, uint8, one-dimensional."""

    train: Tensor
    held_out: Tensor


def library_text() -> Text:
    """Top-level modules of the interpreter's standard library, in the order of their names.

    A file's name, hashed, decides its side, so that a new release of Python moves no file.

    Raises:
        EnvironmentProblemError: this interpreter comes without its source.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(folder.glob("*.py")):
        digest = hashlib.sha256(path.name.encode()).digest()
        parts[digest[0] % _HELD_OUT_FILES == 0].append(path.read_bytes())
    if not all(parts):
        raise EnvironmentProblemError(
            f"Too few Python sources in {folder} to train on. "
            "Use an interpreter that is installed with the source of its standard library."
        )
    return Text(*(torch.frombuffer(bytearray(b"".join(p)), dtype=torch.uint8) for p in parts))


class Digits(NamedTuple):
    """Images (N, 8, 8) in [0, 1] and the digits they show, (N,)."""

    images: Tensor
    labels: Tensor


def digits() -> tuple[Digits, Digits]:
    """Training and held-out images of scikit-learn's bundled set, split once and for all.

    Raises:
        EnvironmentProblemError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise EnvironmentProblemError(
            "The digits come with scikit-learn, which is not installed. "
            f"Run: {pip_install_here('train')}"
        ) from error
    bundled = load_digits()
    images = torch.tensor(bundled.images, dtype=torch.float32) / 16
    labels = torch.tensor(bundled.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:_TRAIN_IMAGES], order[_TRAIN_IMAGES:]
    return Digits(images[train], labels[train]), Digits(images[held_out], labels[held_out])


def remembered() -> tuple[Digits, Digits]:
    """Return 4,096 images to store and 3,717 to query: the training images, moved by a pixel.

    1,024 are stored as they are and moved right, down and both; the others are queried as they
    are and moved in all eight directions.

    Raises:
        EnvironmentProblemError: scikit-learn is not installed.
    """
    train, _ = digits()
    stored, queried = (
        Digits(train.images[part], train.labels[part])
        for part in (slice(_STORED_IMAGES), slice(_STORED_IMAGES, None))
    )
    return _moved(stored, range(2)), _moved(queried, range(-1, 2))


def _moved(given: Digits, pixels: range) -> Digits:
    """Every image moved by each number of pixels both ways; the paper around is empty."""
    wide = pad(given.images, (1, 1, 1, 1))
    moves = [(1 - down, 1 - right) for down in pixels for right in pixels]
    images = [wide[:, top : top + _SIDE, left : left + _SIDE] for top, left in moves]
    return Digits(torch.cat(images), given.labels.repeat(len(moves)))


def patches(images: Tensor, tokens: int) -> Tensor:
    """(N, 8, 8) as (N, tokens, 64 / tokens): square patches from left to right, row by row."""
    size = int((_SIDE**2 // tokens) ** 0.5)
    tiles = images.unfold(1, size, size).unfold(2, size, size)
    return tiles.reshape(len(images), tokens, size * size)


def means(images: Tensor, parts: int) -> Tensor:
    """(N, 8, 8) as (N, parts): the mean brightness of square parts, row by row."""
    return patches(images, parts).mean(-1)
