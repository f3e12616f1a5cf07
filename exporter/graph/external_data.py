"""Large weights of a graph, kept apart from it.

A ModelProto holds its weights by value: every stage that made another one would copy them all. A
graph travels without them instead. Such an initializer has its name, dtype and shape, and the
values are beside it in a mapping, where possible in the memory of the model itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Weights = Mapping[str, np.ndarray]
"""Values by the initializer's name; of any strides."""

LARGE = 2**20
"""Bytes from which a weight is kept apart."""

PLACE = "apart"
"""What an initializer without values names as the file that has them."""

_LENGTH_DELIMITED = 2
_GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
"""How the graph of a model begins in a file of protocol buffers: field and kind."""

ALIGNED = 4096
"""Multiples at which weights begin in a file of their own, so that it can be mapped to memory."""


def placeholder(name: str, values: np.ndarray) -> TensorProto:
    """An initializer without its values."""
    dtype = helper.np_dtype_to_tensor_dtype(values.dtype)
    tensor = TensorProto(name=name, data_type=dtype, dims=values.shape)
    _point(tensor, location=PLACE)
    return tensor


def detach(model: onnx.ModelProto, size: int = LARGE) -> dict[str, np.ndarray]:
    """Take the weights of at least ``size`` bytes out of a model, in place."""
    found = {}
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) >= size:
            found[tensor.name] = numpy_helper.to_array(tensor)
            tensor.CopyFrom(placeholder(tensor.name, found[tensor.name]))
    return found


def attached(model: onnx.ModelProto, weights: Weights) -> onnx.ModelProto:
    """The model with its weights; a copy, where any are apart."""
    if not weights:
        return model
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    for tensor in whole.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    return whole


def outline(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that is valid if the model is: weights that are apart are inputs."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    apart = [t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    kept = [t for t in model.graph.initializer if t.data_location != TensorProto.EXTERNAL]
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(kept)
    for tensor in apart:
        bare.graph.input.append(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
    return bare


def structure(path: Path) -> onnx.ModelProto:
    """The model in a file that ``save`` wrote, without the weights that follow it there."""
    size = path.stat().st_size
    kept = bytearray()
    graphs = 0
    with path.open("rb") as file:
        while file.tell() < size:
            start = file.tell()
            tag = _varint(file)
            value = _varint(file)
            end = file.tell() + (value if tag & 7 == _LENGTH_DELIMITED else 0)
            graphs += tag == _GRAPH
            if tag != _GRAPH or graphs == 1:
                file.seek(start)
                kept += file.read(end - start)
            file.seek(end)
    return onnx.load_from_string(bytes(kept))


def files_beside(model: onnx.ModelProto) -> set[str]:
    """Names of the files that hold weights of a model."""
    return {
        entry.value
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }


def _varint(file: IO[bytes]) -> int:
    """The integer that stands next: seven bits a byte, the lowest first."""
    value = shift = 0
    while True:
        byte = file.read(1)[0]
        value |= (byte & 127) << shift
        if byte < 128:
            return value
        shift += 7


def save(model: onnx.ModelProto, weights: Weights, path: Path, data: Path | None = None) -> None:
    """Write a model whose weights are apart, holding one of them at a time.

    Args:
        data: a second file, beside ``path``, that the weights go to; None: they are in the first.
    """
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    apart = [tensor for tensor in model.graph.initializer if tensor.name in weights]
    kept = [tensor for tensor in bare.graph.initializer if tensor.name not in weights]
    if data is not None:
        with data.open("wb") as file:
            kept += [_written(tensor, weights[tensor.name], file, data.name) for tensor in apart]
        apart = []
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(kept)
    with path.open("wb") as file:
        file.write(bare.SerializeToString())
        for tensor in apart:
            # Protocol buffers one after another are one message, in which lists are joined.
            whole = numpy_helper.from_array(weights[tensor.name], tensor.name)
            part = onnx.ModelProto(graph=onnx.GraphProto(initializer=[whole]))
            file.write(part.SerializeToString())


def _written(tensor: TensorProto, values: np.ndarray, file: IO[bytes], name: str) -> TensorProto:
    """The initializer with the place its values were written to."""
    file.write(b"\0" * (-file.tell() % ALIGNED))
    offset = file.tell()
    file.write(numpy_helper.from_array(values).raw_data)
    moved = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    _point(moved, location=name, offset=offset, length=file.tell() - offset)
    return moved


def _point(tensor: TensorProto, **entries: object) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
