"""Arrays of any names in one ``.npz``: NumPy's own function has parameters, which are names too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING
from zipfile import ZipFile

if TYPE_CHECKING:
    import numpy as np


def save_npz(place: Path | IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as ``numpy.savez`` does; equal arrays make equal files.

    Raises:
        ValueError: an array holds objects.
    """
    import numpy as np

    with ZipFile(place, "w") as archive:
        for name, values in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(values), allow_pickle=False)
