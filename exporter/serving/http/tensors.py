"""Tensors of the Open Inference Protocol: in JSON, or in bytes behind it.

    Inference-Header-Content-Length: n      the first n bytes of the body are JSON
    parameters.binary_data_size: m          the next m bytes are this tensor, little endian

Source: the protocol's REST API and Triton's binary tensor data extension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from starlette.responses import Response

from linexport.serving.http.errors import ProtocolError
from linexport.serving.http.json_reader import MOST_AXES, JsonReader, Numbers
from linexport.serving.http.json_writer import encoded
from linexport.serving.http.openai_requests import Items, Record, Steps, parse, read_object
from linexport.system.json_object import JsonObject

JSON_LENGTH = "Inference-Header-Content-Length"
NAMES = {
    "BOOL": "bool",
    **{
        f"{kind}{bits}": f"{kind.lower()}{bits}"
        for kind in ("INT", "UINT")
        for bits in (8, 16, 32, 64)
    },
    **{f"FP{bits}": f"float{bits}" for bits in (16, 32, 64)},
}
"""The protocol's names of dtypes, and NumPy's."""

DATATYPES = {dtype: name for name, dtype in NAMES.items()}
MOST_DIGITS = 18
"""Digits of a size in a header."""


class Tensor(Record):
    """An input as it is described."""

    name: str
    shape: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MOST_AXES, fail_fast=True)
    ]
    datatype: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    data: Any = None
    """``Numbers``, or None."""


class RequestedOutput(Record):
    """An output that the request names."""

    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)


class InferRequest(Record):
    """``POST /v2/models/NAME/infer``."""

    id: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    inputs: Items[Tensor]
    outputs: Items[RequestedOutput] | None = None


def read(body: bytes, json_length: str | None) -> tuple[InferRequest, dict[str, np.ndarray]]:
    """Return a request and its inputs by name.

    Raises:
        ProtocolError: the body is not such a request, or a tensor is not what it claims to be.
    """
    length = len(body)
    if json_length is not None:
        found_length = whole_number(json_length)
        if found_length is None or found_length > length:
            raise ProtocolError(
                400, f"{JSON_LENGTH} is {json_length[:40]!r}; the body has {length} bytes."
            )
        length = found_length
    whole = memoryview(body)
    infer_request, rest = parse(InferRequest, whole[:length], inputs=_inputs), whole[length:]
    found: dict[str, np.ndarray] = {}
    for tensor in infer_request.inputs:
        if tensor.name in found:
            raise ProtocolError(400, f"Found the input {tensor.name!r} twice.")
        size = tensor.parameters.get("binary_data_size")
        if size is None:
            found[tensor.name] = _from_json(tensor)
            continue
        if type(size) is not int or not 0 <= size <= len(rest):
            raise ProtocolError(
                400, f"{tensor.name}: binary_data_size is {size}; {len(rest)} bytes are there."
            )
        found[tensor.name], rest = _from_bytes(tensor, rest[:size]), rest[size:]
    if len(rest):
        raise ProtocolError(400, f"{len(rest)} bytes of the body belong to no input.")
    return infer_request, found


def _inputs(reader: JsonReader, path: Steps) -> Any:
    """Read the inputs of a request, whose data may be large."""
    if reader.next() != "[":
        return reader.value()
    return [read_object(reader, (*path, i), data=_data) for i in reader.items()]


def _data(reader: JsonReader, path: Steps) -> Numbers | None:
    return reader.value() if reader.next() == "n" else reader.numbers(path)


def whole_number(text: str) -> int | None:
    """Return the number in a header, None where it is none that a size has."""
    fits = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
    return int(text) if fits else None


def outputs_of(infer_request: InferRequest, names: Sequence[str]) -> list[RequestedOutput]:
    """Return the requested outputs; all outputs of the model where none are named.

    Raises:
        ProtocolError: one is not an output of the model, or is named twice.
    """
    if not infer_request.outputs:
        return [RequestedOutput(name=name) for name in names]
    seen: set[str] = set()
    for one in infer_request.outputs:
        if one.name not in names:
            raise ProtocolError(400, f"Found the output {one.name!r}; expected {list(names)}.")
        if one.name in seen:
            raise ProtocolError(400, f"Found the output {one.name!r} twice.")
        seen.add(one.name)
    return infer_request.outputs


def is_binary(infer_request: InferRequest, one: RequestedOutput) -> bool:
    """Return whether an output is sent as bytes."""
    every = infer_request.parameters.get("binary_data_output", False)
    return bool(one.parameters.get("binary_data", every))


def answer(infer_request: InferRequest, model: str, outputs: Mapping[str, np.ndarray]) -> Response:
    """Return outputs in the requested form: binary or JSON."""
    described: list[JsonObject] = []
    binary: list[bytes] = []
    for one in outputs_of(infer_request, [*outputs]):
        values = outputs[one.name]
        tensor: JsonObject = {
            "name": one.name,
            "datatype": DATATYPES[values.dtype.name],
            "shape": list(values.shape),
        }
        if is_binary(infer_request, one):
            binary.append(np.ascontiguousarray(values).tobytes())
            tensor["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            tensor["data"] = _finite(values)
        described.append(tensor)
    head = {"model_name": model, "model_version": "1", "outputs": described}
    if infer_request.id:
        head["id"] = infer_request.id
    text = encoded(head)
    if not binary:
        return Response(text, media_type="application/json")
    headers = {JSON_LENGTH: str(len(text))}
    return Response(
        b"".join([text, *binary]), headers=headers, media_type="application/octet-stream"
    )


def _finite(values: np.ndarray) -> np.ndarray:
    """Return values for JSON, which has neither NaN nor infinity."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ProtocolError(500, "An output has NaN or infinity; ask for it as binary data.")
    return values


def _dtype(tensor: Tensor) -> np.dtype[np.generic]:
    if tensor.datatype not in NAMES:
        raise ProtocolError(
            400, f"{tensor.name} has datatype {tensor.datatype!r}; expected one of {list(NAMES)}."
        )
    return np.dtype(NAMES[tensor.datatype])


def _from_bytes(tensor: Tensor, content: memoryview) -> np.ndarray:
    dtype = _dtype(tensor)
    if tensor.data is not None or prod(tensor.shape) * dtype.itemsize != len(content):
        raise ProtocolError(
            400,
            f"{tensor.name} has {len(content)} bytes; expected those of {tensor.shape} in "
            f"{tensor.datatype}, and no other data.",
        )
    return np.frombuffer(content, dtype).reshape(tensor.shape)


def _from_json(tensor: Tensor) -> np.ndarray:
    dtype, values = _dtype(tensor), None
    if tensor.data is not None and len(tensor.data) == prod(tensor.shape):
        values = tensor.data.array(dtype)
    if values is None:
        raise ProtocolError(
            400, f"data of {tensor.name} does not fit {tensor.shape} in {tensor.datatype}."
        )
    return values.reshape(tensor.shape)


def shape_of(shape: Sequence[int | str | None]) -> list[int]:
    """Return a shape as the protocol describes it: -1 for sizes that vary."""
    return [size if isinstance(size, int) else -1 for size in shape]
