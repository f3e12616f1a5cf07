"""Vectors of texts: files of them, and how near the first is to the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from linexport.artifact.text.embedding import Vectors
from linexport.errors import UsageError
from linexport.system.replace_file import replacing


def similarities(vectors: Vectors) -> list[float]:
    """Return how near the first text is to each other one.

    Cosines; of late interaction the mean over the first text's tokens of the largest one among the
    other's (MaxSim, Khattab and Zaharia 2020, divided by the number of tokens).
    """
    first, *others = (_unit(np.atleast_2d(v).astype(np.float64)) for v in vectors)
    return [float((first @ other.T).max(1).mean()) for other in others]


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def check_vectors_path(path: Path, by_token: bool) -> None:
    """Check the name of a file for vectors, before they are computed.

    Args:
        path: of the file.
        by_token: each token has a vector.

    Raises:
        UsageError: it has another ending than the vectors need, or no folder.
    """
    expected = ".npz" if by_token else ".npy"
    if path.suffix != expected:
        raise UsageError(f"Found --output {path}; this model's vectors are written to {expected}.")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"The folder {path.absolute().parent} does not exist. Make it first.")


def write_vectors(path: Path, vectors: Vectors) -> None:
    """Write vectors to a file: .npy, or .npz with an array for each text, in their order.

    The file is written whole or not at all.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        with replacing(path) as partial, partial.open("wb") as file:
            if isinstance(vectors, np.ndarray):
                np.save(file, vectors)
            else:
                np.savez(file, *vectors)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
