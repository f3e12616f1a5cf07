"""External initializers: large weights of a graph, kept in a mapping.

A ModelProto holds its weights by value: every stage that made another one would copy them all. A
graph travels without them instead. Such an initializer has its name, dtype and shape, and a
mapping holds its values, where possible in the memory of the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import SEEK_END, BytesIO
from math import prod
from pathlib import Path
from typing import IO

import numpy as np
import onnx
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from linexport.system import memory

Weights = Mapping[str, np.ndarray]
"""Values by the initializer's name; of any strides."""

LARGE = 2**20
"""Bytes from which an initializer is external."""

LOCATION = "external"
"""The file that an external initializer names until its values are written."""

AT_ONCE = 2**26
"""Bytes of a weight that are written at once: each is in memory three times meanwhile."""

SUB_BYTE: dict[int, int] = {
    **dict.fromkeys((TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT4E2M1), 2),
    **dict.fromkeys((TensorProto.INT2, TensorProto.UINT2), 4),
}
"""Types of less than a byte, with the values that one holds in a file."""

_LENGTH_DELIMITED = 2
_GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
"""Field and wire type with which the graph of a model begins in a file of protocol buffers."""

ALIGNED = 4096
"""Multiples at which weights begin in a file of their own, so that it can be mapped to memory."""


def external_initializer(name: str, values: np.ndarray) -> TensorProto:
    """Return an initializer that has name, type and shape, but not its values."""
    dtype = helper.np_dtype_to_tensor_dtype(values.dtype)
    tensor = TensorProto(name=name, data_type=dtype, dims=values.shape)
    _point(tensor, location=LOCATION)
    return tensor


def externalize(model: onnx.ModelProto, size: int = LARGE) -> dict[str, np.ndarray]:
    """Make initializers of at least ``size`` bytes external, in place; returns their values."""
    found: dict[str, np.ndarray] = {}
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) >= size:
            found[tensor.name] = numpy_helper.to_array(tensor)
            tensor.CopyFrom(external_initializer(tensor.name, found[tensor.name]))
    return found


def with_weights(model: onnx.ModelProto, weights: Weights) -> onnx.ModelProto:
    """Return the model with its weights; a copy, where any are external."""
    if not weights:
        return model
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    for tensor in whole.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    return whole


def externals_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy that is valid if the model is: external initializers are its inputs."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    external = [t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    kept = [t for t in model.graph.initializer if t.data_location != TensorProto.EXTERNAL]
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(kept)
    for tensor in external:
        bare.graph.input.append(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
    return bare


@dataclass(frozen=True)
class ModelFile:
    """A model file that was read.

    Attributes:
        content: of the file.
        folder: of it, where files with weights are.
    """

    content: bytes
    folder: Path


ModelSource = Path | bytes | ModelFile
"""A model: its file, a serialised model, or a file that was read."""


def read_graph(file: Path | ModelFile) -> onnx.ModelProto:
    """Read a file that ``save`` wrote, without the weights that follow the graph there."""
    return onnx.load_from_string(b"".join(_parts(file, following=False)))


def read_whole(file: Path | ModelFile) -> onnx.ModelProto:
    """Read a file with all its weights."""
    if isinstance(file, Path):
        return onnx.load_model(str(file))
    model = onnx.load_from_string(file.content)
    external_data_helper.load_external_data_for_model(model, str(file.folder))
    return model


def with_graph(file: Path | ModelFile, model: onnx.ModelProto) -> bytes:
    """Return the file that ``read_graph`` read with another graph, its large weights unchanged."""
    return b"".join([model.SerializeToString(), *_parts(file, following=True)])


def save_with_graph(path: Path, model: onnx.ModelProto, copy: Path) -> None:
    """Write the file that ``with_graph`` returns, holding one weight at a time."""
    with copy.open("wb") as file:
        file.write(model.SerializeToString())
        for part in _parts(path, following=True):
            file.write(part)


def read_mapped(path: Path) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Read a file that ``save`` wrote, one large weight at a time.

    Returns:
        The model, and the values of its large weights, which are external and memory-mapped: from
        the data file next to it, or copied to an unnamed one.
    """
    model = read_graph(path)
    found: dict[str, np.ndarray] = {}
    files = {name: memory.mapped_file(path.parent / name) for name in files_beside(model)}
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
            start, count = int(entries.get("offset", 0)), prod(tensor.dims)
            size = -(-count // SUB_BYTE.get(tensor.data_type, 1)) * dtype.itemsize
            stored = files[entries["location"]][start : start + size]
            if tensor.data_type in SUB_BYTE:
                bare = TensorProto(data_type=tensor.data_type, dims=tensor.dims)
                bare.raw_data = stored.tobytes()
                found[tensor.name] = numpy_helper.to_array(bare)
            else:
                found[tensor.name] = stored.view(dtype).reshape(tuple(tensor.dims))
    sizes = [_unpacked_bytes(_weight(part)) for part in _parts(path, following=True)]
    for block, part in zip(memory.blocks(sizes), _parts(path, following=True), strict=True):
        tensor = _weight(part)
        values = numpy_helper.to_array(tensor)
        place = block[: values.nbytes].view(values.dtype).reshape(values.shape)
        np.copyto(place, values)
        memory.release(block.ctypes.data, block.nbytes)
        found[tensor.name] = place
        model.graph.initializer.append(external_initializer(tensor.name, place))
    return model, found


def _weight(part: bytes) -> TensorProto:
    """Return the weight that a graph after the first consists of."""
    (tensor,) = onnx.load_from_string(part).graph.initializer
    return tensor


def _unpacked_bytes(tensor: TensorProto) -> int:
    """Return the bytes of a weight in NumPy, where elements of four bits take one each."""
    return prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def _parts(model: Path | ModelFile, following: bool) -> Iterator[bytes]:
    """Yield the fields of a model file: its graphs after the first, or all others."""
    graphs = 0
    with model.open("rb") if isinstance(model, Path) else BytesIO(model.content) as file:
        size = file.seek(0, SEEK_END)
        file.seek(0)
        while file.tell() < size:
            start = file.tell()
            tag = _varint(file)
            value = _varint(file)
            end = file.tell() + (value if tag & 7 == _LENGTH_DELIMITED else 0)
            graphs += tag == _GRAPH
            if (tag == _GRAPH and graphs > 1) == following:
                file.seek(start)
                yield file.read(end - start)
            file.seek(end)


def files_beside(model: onnx.ModelProto) -> set[str]:
    """Return the names of the files that hold weights of a model."""
    return {
        entry.value
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }


def _varint(file: IO[bytes]) -> int:
    """Read the next integer: seven bits a byte, the lowest first."""
    value = shift = 0
    while True:
        byte = file.read(1)[0]
        value |= (byte & 127) << shift
        if byte < 128:
            return value
        shift += 7


def save(model: onnx.ModelProto, weights: Weights, path: Path, data: Path | None = None) -> None:
    """Write a model with external initializers, holding one of them at a time.

    Args:
        model: is not changed.
        weights: values by the initializer's name.
        path: of the model file.
        data: a second file, next to ``path``, for the weights; None: they are in the first.
    """
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    external = [tensor for tensor in model.graph.initializer if tensor.name in weights]
    kept = [tensor for tensor in bare.graph.initializer if tensor.name not in weights]
    if data is not None:
        with data.open("wb") as file:
            kept += [_written(tensor, weights[tensor.name], file, data.name) for tensor in external]
        external = []
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(kept)
    with path.open("wb") as file:
        file.write(bare.SerializeToString())
        for tensor in external:
            # Protocol buffers one after another are one message, in which lists are joined.
            whole = numpy_helper.from_array(weights[tensor.name], tensor.name)
            part = onnx.ModelProto(graph=onnx.GraphProto(initializer=[whole]))
            file.write(part.SerializeToString())


def _written(tensor: TensorProto, values: np.ndarray, file: IO[bytes], name: str) -> TensorProto:
    """Write values to a file; returns the initializer that names their place there."""
    file.write(b"\0" * (-file.tell() % ALIGNED))
    offset = file.tell()
    for part in _parts_of(values):
        file.write(numpy_helper.from_array(part).raw_data)
    moved = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    _point(moved, location=name, offset=offset, length=file.tell() - offset)
    return moved


def _parts_of(values: np.ndarray) -> list[np.ndarray]:
    """Cut an array along its first axis; elements of less than a byte are packed all together."""
    kind = helper.np_dtype_to_tensor_dtype(values.dtype)
    if not values.ndim or kind in SUB_BYTE:
        return [values]
    count = min(len(values), -(-values.nbytes // AT_ONCE))
    return np.array_split(values, max(count, 1))


def _point(tensor: TensorProto, **entries: object) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
