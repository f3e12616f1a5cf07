"""An ONNX file without the values of large initializers, read from wherever they lie in it.

A file of protocol buffers is a list of fields, each a key (number and kind), for most a length, and
content. ``ModelProto.graph.initializer.raw_data`` is left out by walking to it, unless it is so
short that it may be a shape:

    model: [ ..., graph: [ ..., initializer: [ ..., raw_data ] ] ]

A field that occurs twice is one message, in which lists are joined: every occurrence is walked.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

_VALUES = (
    onnx.ModelProto.GRAPH_FIELD_NUMBER,
    onnx.GraphProto.INITIALIZER_FIELD_NUMBER,
    onnx.TensorProto.RAW_DATA_FIELD_NUMBER,
)
KEPT = 2**12
"""Bytes of values that are read."""

_VARINT, _FIXED_64, _DELIMITED, _FIXED_32 = 0, 1, 2, 5
_FIXED = {_FIXED_64: 8, _FIXED_32: 4}


def skeleton(path: Path) -> onnx.ModelProto:
    """Read a model without the raw data of large initializers; the rest of them is there.

    Raises:
        DecodeError: it is not a file of protocol buffers.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return onnx.ModelProto()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return skeleton_of(data)


def skeleton_of(data: mmap.mmap | bytes) -> onnx.ModelProto:
    """Read the content of a file as ``skeleton`` does; errors are its.

    Raises:
        DecodeError: it is not one of protocol buffers.
    """
    return onnx.ModelProto.FromString(bytes(_without(data, 0, len(data), _VALUES)))


def _without(data: mmap.mmap | bytes, start: int, stop: int, field: Sequence[int]) -> bytearray:
    """Copy the message at ``data[start:stop]``, less long fields at the end of a path."""
    kept = bytearray()
    number, *inner = field
    for key, begin, content, end in _fields(data, start, stop):
        if key != number << 3 | _DELIMITED or (not inner and end - content <= KEPT):
            kept += data[begin:end]
        elif inner:
            part = _without(data, content, end, inner)
            kept += _encoded(key) + _encoded(len(part)) + part
    return kept


def _fields(data: mmap.mmap | bytes, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield key, begin, begin of the content and end of each field."""
    while start < stop:
        key, content = _decoded(data, start, stop)
        kind = key & 7
        if kind == _VARINT:
            end = _decoded(data, content, stop)[1]
        elif kind == _DELIMITED:
            size, content = _decoded(data, content, stop)
            end = content + size
        elif kind in _FIXED:
            end = content + _FIXED[kind]
        else:
            raise DecodeError(f"a field of the unknown kind {kind}")
        if end > stop:
            raise DecodeError("a field ends behind the message")
        yield key, start, content, end
        start = end


def _decoded(data: mmap.mmap | bytes, start: int, stop: int) -> tuple[int, int]:
    """Read an integer, seven bits a byte, the lowest first; return it and where it ends."""
    value = 0
    for shift, place in zip(range(0, 64, 7), range(start, stop), strict=False):
        value |= (data[place] & 127) << shift
        if data[place] < 128:
            return value, place + 1
    raise DecodeError("an integer without an end")


def _encoded(value: int) -> bytes:
    """Write an integer as ``_decoded`` reads it."""
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])
