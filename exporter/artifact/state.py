"""The state of a stream as a value: everything that a model keeps of the tokens before.

    StreamState(model, arrays)     one array (batch, ...) for each input that holds a state

It can be compared, hashed by content, kept, written and read. A file is an uncompressed ``.npz``:

    model_sha256      text     digest of the model whose state this is
    state_format      int64    2; without arrays the state is that before the first token.
                               3 in fewer bits, see ``state_quantization``
    <input name>      each array, as ``.npy``

Files without ``state_format`` were written by linexport before it, and have arrays. Nothing in a
file is unpickled, and no array is allocated before the bytes it needs are known to be there.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from tokenize import TokenError
from types import MappingProxyType
from typing import IO
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np

from linexport.artifact import state_quantization
from linexport.errors import UsageError
from linexport.system.npz import save_npz

OWNER, FORMAT = "model_sha256", "state_format"
CURRENT, SMALLER = 2, 3
"""Versions of the files written."""

_LARGEST_HEADER = 10_000


@dataclass(frozen=True, eq=False)
class StreamState:
    """An immutable state.

    Attributes:
        model_sha256: digest of the model it belongs to.
        arrays: by the names of the inputs, read-only; none before the first token.
    """

    model_sha256: str
    arrays: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        """Make the arrays read-only."""
        kept = {}
        for name, values in sorted(self.arrays.items()):
            kept[name] = values.view()
            kept[name].flags.writeable = False
        object.__setattr__(self, "arrays", MappingProxyType(kept))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(values.nbytes for values in self.arrays.values())

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the model's digest and the name, dtype, shape and bytes of every array."""
        found = hashlib.sha256(self.model_sha256.encode())
        for name, values in self.arrays.items():
            found.update(f"\n{name}\n{values.dtype.str}\n{values.shape}\n".encode())
            found.update(np.ascontiguousarray(values).data)
        return found.hexdigest()

    def __eq__(self, other: object) -> bool:
        """Compare by content, bit for bit."""
        return isinstance(other, StreamState) and self.digest == other.digest

    def __hash__(self) -> int:
        """Hash by content."""
        return hash(self.digest)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as the two fields."""
        return StreamState, (self.model_sha256, dict(self.arrays))

    def error_at_rest(self, precision: str) -> dict[str, float]:
        """Return how far each array is after it was kept: ||x' - x|| / ||x||.

        Raises:
            UsageError: see ``to_bytes``.
        """
        state_quantization.check_precision(precision)
        return state_quantization.relative_error(self.arrays, precision)

    def to_bytes(self, precision: str = "float32") -> bytes:
        """Return the content of a file of this state.

        Args:
            precision: ``float32`` keeps every bit; ``float16`` takes half of the bytes, ``int8``
                about a quarter, and the state is rounded: see ``error_at_rest``.

        Raises:
            UsageError: an unknown precision.
        """
        state_quantization.check_precision(precision)
        buffer = io.BytesIO()
        exact = precision == state_quantization.PRECISIONS[0] or not self.arrays
        arrays = self.arrays if exact else state_quantization.shrink(self.arrays, precision)
        version = CURRENT if exact else SMALLER
        entries: dict[str, object] = {**arrays, OWNER: self.model_sha256, FORMAT: version}
        save_npz(buffer, {n: np.asarray(v) for n, v in entries.items()})
        return buffer.getvalue()

    def save(self, path: str | Path, precision: str = "float32") -> None:
        """Write a file; see ``to_bytes``."""
        Path(path).write_bytes(self.to_bytes(precision))

    @classmethod
    def load(cls, path: str | Path) -> StreamState:
        """Read a file.

        Raises:
            UsageError: it is not a saved state, is damaged, or holds no state.
        """
        place = Path(path)
        try:
            if place.exists() and not place.is_file():  # a pipe would be waited for
                raise ValueError("it is not a file")
            with place.open("rb") as file:
                return cls._read(file)
        except (OSError, ValueError, EOFError, NotImplementedError, BadZipFile) as error:
            raise UsageError(f"{path} is not a saved stream: {error}.") from None

    @classmethod
    def from_bytes(cls, content: bytes) -> StreamState:
        """Return the state that ``to_bytes`` wrote.

        Raises:
            UsageError: see ``load``.
        """
        try:
            return cls._read(io.BytesIO(content))
        except (ValueError, EOFError, NotImplementedError, BadZipFile) as error:
            raise UsageError(f"The bytes are not a saved stream: {error}.") from None

    @classmethod
    def _read(cls, file: IO[bytes]) -> StreamState:
        arrays = _arrays(file)
        owner, version = arrays.pop(OWNER, None), arrays.pop(FORMAT, None)
        if owner is None or owner.dtype.kind != "U" or owner.ndim:
            raise ValueError("it does not say whose state it is")
        if version is not None and (
            version.dtype != np.int64 or version.ndim or version not in (CURRENT, SMALLER)
        ):
            raise ValueError(f"it has format {version}; this version of linexport reads {SMALLER}")
        if version is None and not arrays:
            raise ValueError("it holds a digest and no state")
        return cls(str(owner), state_quantization.expand(arrays) if version == SMALLER else arrays)


def _arrays(file: IO[bytes]) -> dict[str, np.ndarray]:
    """Read an ``.npz`` whose members are stored as they are and no larger than the file.

    Raises:
        ValueError, BadZipFile, EOFError: it is not one, or is damaged.
    """
    size = file.seek(0, io.SEEK_END)
    with ZipFile(file) as zipped:
        entries = zipped.infolist()
        if sum(entry.file_size for entry in entries) > size:
            raise ValueError("its arrays claim more bytes than the file has")
        if len({entry.filename for entry in entries}) != len(entries):
            raise ValueError("it has two arrays of the same name")
        found = {}
        for entry in entries:
            if entry.compress_type != ZIP_STORED or entry.flag_bits & 1:
                raise ValueError(f"its array {entry.filename} is compressed or encrypted")
            with zipped.open(entry) as member:
                values = _array(member, entry.file_size)
            found[entry.filename.removesuffix(".npy")] = values
        return found


def _array(file: IO[bytes], size: int) -> np.ndarray:
    """Read one ``.npy`` of so many bytes."""
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"an array has the unknown format {version}")
    try:
        shape, fortran, dtype = readers[version](file, max_header_size=_LARGEST_HEADER)
    except (TokenError, SyntaxError) as error:  # NumPy takes it for one that Python 2 wrote
        raise ValueError(f"an array has a header that is not one: {error.args[0]}") from error
    if dtype.hasobject or dtype.itemsize == 0:
        raise ValueError(f"an array has dtype {dtype}")
    promised, there = prod(shape) * dtype.itemsize, size - file.tell()
    if min(shape, default=0) < 0 or promised != there:
        raise ValueError(f"an array promises {promised} bytes and has {there}")
    values = np.frombuffer(file.read(promised + 1), dtype)
    return values.reshape(shape, order="F" if fortran else "C")
