"""Weights and constants: raw bytes of the archive, and the shapes laid over them.

A shape larger than its bytes would make torch allocate what the file does not have; pickled
weights (tensor subclasses) are not read.
"""

from __future__ import annotations

import math
import re
from typing import Any

from linexport.errors import UnsupportedModelError
from linexport.sources.archive import TorchArchive
from linexport.sources.pt2.document import check_strings, parse
from linexport.sources.pt2.members import CONSTANTS_TABLE, WEIGHTS_TABLE
from linexport.sources.pt2.source_strings import shorten

_TABLES = (
    (WEIGHTS_TABLE, "data/weights/", "weight"),
    (CONSTANTS_TABLE, "data/constants/", "tensor"),
)
_MAX_TABLE_BYTES = 64 * 2**20
# Views with stride 0 repeat stored values; what they may grow to when copied.
_MAX_EXPANDED_BYTES = 2**30


def check_payloads(archive: TorchArchive) -> None:
    """Check both tables against the members they refer to.

    Raises:
        UnsupportedModelError: an entry is pickled, on another device, or larger than its bytes.
    """
    from linexport.system.torch_internals import files

    schema = files.schema()
    for table, folder, prefix in _TABLES:
        data = archive.read(table, _MAX_TABLE_BYTES)
        entries = parse(schema.PayloadConfig, data, "table of weights")
        check_strings(entries)
        for name, entry in entries.config.items():
            if entry.use_pickle is not False or entry.tensor_meta is None:
                raise UnsupportedModelError(
                    f"its weight {shorten(name)} is stored as a pickle; convert tensor subclasses "
                    "to plain tensors before exporting"
                )
            path = entry.path_name
            if not isinstance(path, str) or not re.fullmatch(rf"{prefix}_\d+", path):
                raise UnsupportedModelError(f"its weight {shorten(name)} points elsewhere")
            _check_size(name, entry.tensor_meta, _member_size(archive, folder + path))


def _member_size(archive: TorchArchive, member: str) -> int:
    if member not in archive.names:
        raise UnsupportedModelError(f"its member {member} is missing")
    return archive.size(member)


def _check_size(name: str, meta: Any, stored: int) -> None:
    """Compare the bytes a tensor covers, and the bytes it has when copied, with those stored."""
    from linexport.system.torch_internals import files

    serialize = files.serialize()
    try:
        sizes = serialize.deserialize_size(meta.sizes)
        strides = serialize.deserialize_stride(meta.strides)
        offset = serialize.deserialize_storage_offset(meta.storage_offset)
        item = serialize.deserialize_scalar_type(meta.dtype).itemsize
        if len(sizes) != len(strides) or min(offset, *sizes, *strides, 0) < 0:
            raise ValueError("negative or missing sizes")
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"the shape of its weight {shorten(name)} is damaged"
        ) from error
    count = math.prod(sizes)
    covered = offset + 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    if count and covered * item > stored:
        raise UnsupportedModelError(
            f"its weight {shorten(name)} needs {covered * item} bytes and has {stored}; a program "
            "exported under FakeTensorMode has no weights"
        )
    if count * item > max(stored, _MAX_EXPANDED_BYTES):
        raise UnsupportedModelError(f"its weight {shorten(name)} expands to {count * item} bytes")
