"""Check external data of an ONNX file: in its folder, present, and of the right length."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from linexport.errors import UnsupportedModelError
from linexport.graph.external_data import SUB_BYTE
from linexport.graph.walk import all_tensors
from linexport.sources.files import sha256

FLOATING = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)

KEYS = frozenset({"location", "offset", "length", "checksum"})
"""Keys of external data in ONNX. ONNX Runtime has more, of weights as its kernels pack them."""

IN_MEMORY = "_ORT_MEM_ADDR_"
"""Part of ONNX Runtime's location of a weight that is at an address in memory, its offset."""

MOST_DIGITS = 18
"""Digits of an offset or a length: no file of so many bytes is larger than integers are."""


def check_external(path: Path, model: onnx.ModelProto) -> None:
    """Check every reference to external data.

    Raises:
        UnsupportedModelError: a file outside the model's folder, missing, or too short.
    """
    folder = path.resolve().parent
    for tensor, entry in _entries(model):
        _check_entry(folder, tensor, entry)


def data_files(path: Path, model: onnx.ModelProto) -> list[Path]:
    """The files that hold external data, each once, in order of their names."""
    return sorted({path.parent / entry["location"] for _, entry in _entries(model)})


def external_sizes(model: onnx.ModelProto) -> dict[str, int]:
    """Return how many bytes of each file with external data are read, by its location.

    Raises:
        UnsupportedModelError: see ``stored_bytes``.
    """
    found: dict[str, int] = {}
    for tensor, entry in _entries(model):
        end = int(entry.get("offset") or 0) + stored_bytes(tensor)
        location = entry.get("location", "")
        found[location] = max(found.get(location, 0), end)
    return found


def digest(path: Path, files: Sequence[Path]) -> str:
    """Return the SHA-256 of the file; with external data, of the digests of all files in turn."""
    own = sha256(path)
    if not files:
        return own
    return hashlib.sha256("".join([own, *map(sha256, files)]).encode()).hexdigest()


def load_external_data(path: Path, model: onnx.ModelProto) -> None:
    """Read external data into the model, in place; it may then be too large to serialise."""
    for tensor, _ in _entries(model):
        external_data_helper.load_external_data_for_tensor(tensor, str(path.parent))
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]


def weights_with_nan(path: Path, model: onnx.ModelProto) -> Iterator[str]:
    """Yield the weights that have NaN, with their number; a single number may be one in code."""
    for tensor in all_tensors(model):
        if tensor.data_type not in FLOATING or prod(tensor.dims) < 2:
            continue
        values = numpy_helper.to_array(tensor, str(path.parent))
        nan = int(np.isnan(values).sum())
        if nan:
            yield f"{tensor.name or 'a constant'} has {nan} NaN of {values.size} values"


def _entries(model: onnx.ModelProto) -> Iterator[tuple[TensorProto, dict[str, str]]]:
    for tensor in all_tensors(model):
        if tensor.data_location == TensorProto.EXTERNAL:
            yield tensor, {e.key: e.value for e in tensor.external_data}


def _check_entry(folder: Path, tensor: TensorProto, entry: dict[str, str]) -> None:
    given = [e.key for e in tensor.external_data]
    if len(entry) < len(given) or not KEYS.issuperset(given):
        raise UnsupportedModelError(
            f"the weight {tensor.name} is described by {', '.join(given)}; expected each of "
            f"{', '.join(sorted(KEYS))} once at most"
        )
    location = entry.get("location", "")
    place = None if IN_MEMORY in location else _inside(folder, location)
    if place is None:
        raise UnsupportedModelError(
            f"the weight {tensor.name} refers to {location!r}, which is not a file inside the "
            "model's folder"
        )
    if not place.is_file():
        raise UnsupportedModelError(
            f"the weight {tensor.name} is kept in {location}, which is missing; it belongs in "
            f"{folder}"
        )
    texts = entry.get("offset", "0"), entry.get("length", "")
    if not all(not text or _is_number(text) for text in texts):
        raise UnsupportedModelError(f"the weight {tensor.name} has the offset and length {texts}")
    offset, size = int(texts[0] or 0), place.stat().st_size
    length = int(texts[1]) if texts[1] else size - offset
    expected = stored_bytes(tensor)
    if length != expected or offset + length > size:
        raise UnsupportedModelError(
            f"the weight {tensor.name} needs {expected} bytes; {location} has {size} and the model "
            f"points at {length} from {offset}"
        )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS


def _inside(folder: Path, location: str) -> Path | None:
    """Return the file that a location names, links followed; None where it is not in the folder."""
    try:
        place = (folder / location).resolve()
        place.exists()
    except (OSError, RuntimeError, ValueError):  # too long, a circle of links, a null character
        return None
    relative = bool(location) and not Path(location).is_absolute()
    return place if relative and folder in place.parents else None


def stored_bytes(tensor: TensorProto) -> int:
    """Return the bytes that the values of a tensor take in a file.

    Raises:
        UnsupportedModelError: it has no element type.
    """
    count = -(-prod(tensor.dims) // SUB_BYTE.get(tensor.data_type, 1))
    try:
        return int(count * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    except (KeyError, TypeError):
        raise UnsupportedModelError(f"the weight {tensor.name} has no element type") from None
