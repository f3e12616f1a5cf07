"""Tensors of the Open Inference Protocol: in JSON, or in bytes behind it.

    Inference-Header-Content-Length: n      the first n bytes of the body are JSON
    parameters.binary_data_size: m          the next m bytes are this tensor, little endian

Source: the protocol's REST API and Triton's binary tensor data extension.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from starlette.responses import Response

from linexport.serving.http.errors import ProtocolError
from linexport.serving.http.openai_requests import Record, parse

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
MOST_AXES = 16


class Tensor(Record):
    """An input as it is described."""

    name: str
    shape: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MOST_AXES)]
    datatype: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    data: list[Any] | None = None


class Wanted(Record):
    """An output that is asked for."""

    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)


class InferRequest(Record):
    """``POST /v2/models/NAME/infer``."""

    id: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    inputs: list[Tensor]
    outputs: list[Wanted] | None = None


def read(body: bytes, json_length: str | None) -> tuple[InferRequest, dict[str, np.ndarray]]:
    """Return a request and its inputs by name.

    Raises:
        ProtocolError: the body is not such a request, or a tensor is not what it claims to be.
    """
    length = len(body)
    if json_length is not None:
        if not json_length.isdecimal() or int(json_length) > length:
            raise ProtocolError(
                400, f"{JSON_LENGTH} is {json_length!r}; the body has {length} bytes."
            )
        length = int(json_length)
    infer_request, rest = parse(InferRequest, body[:length]), memoryview(body)[length:]
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


def answer(infer_request: InferRequest, model: str, outputs: Mapping[str, np.ndarray]) -> Response:
    """Return outputs as they were asked for."""
    every = bool(infer_request.parameters.get("binary_data_output", False))
    wanted = infer_request.outputs or [Wanted(name=name) for name in outputs]
    described: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for one in wanted:
        if one.name not in outputs:
            raise ProtocolError(400, f"Found the output {one.name!r}; expected {list(outputs)}.")
        values = outputs[one.name]
        tensor: dict[str, Any] = {
            "name": one.name,
            "datatype": DATATYPES[values.dtype.name],
            "shape": list(values.shape),
        }
        if one.parameters.get("binary_data", every):
            binary.append(np.ascontiguousarray(values).tobytes())
            tensor["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            tensor["data"] = _finite(values)
        described.append(tensor)
    head = {"model_name": model, "model_version": "1", "outputs": described}
    if infer_request.id:
        head["id"] = infer_request.id
    text = json.dumps(head).encode()
    if not binary:
        return Response(text, media_type="application/json")
    headers = {JSON_LENGTH: str(len(text))}
    return Response(
        b"".join([text, *binary]), headers=headers, media_type="application/octet-stream"
    )


def _finite(values: np.ndarray) -> list[Any]:
    """Return values for JSON, which has neither NaN nor infinity."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ProtocolError(500, "An output has NaN or infinity; ask for it as binary data.")
    return list(values.ravel().tolist())


def _dtype(tensor: Tensor) -> np.dtype[Any]:
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
            f"{tensor.datatype}, and no data beside them.",
        )
    return np.frombuffer(content, dtype).reshape(tensor.shape)


def _from_json(tensor: Tensor) -> np.ndarray:
    dtype = _dtype(tensor)
    try:
        values = np.array(tensor.data)
        fits = values.size == prod(tensor.shape) and _same_kind(values, dtype)
    except ValueError:  # lists of several lengths
        fits = False
    if not fits:
        raise ProtocolError(
            400, f"data of {tensor.name} does not fit {tensor.shape} in {tensor.datatype}."
        )
    return values.astype(dtype).reshape(tensor.shape)


def _same_kind(values: np.ndarray, dtype: np.dtype[Any]) -> bool:
    """Return whether JSON's numbers are of a dtype; integers must be within its range."""
    if not values.size:
        return True
    if dtype.kind in "iu" and values.dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return bool(limits.min <= values.min() and values.max() <= limits.max)
    return values.dtype.kind in {"b": "b", "f": "iuf"}.get(dtype.kind, "")


def shape_of(shape: Sequence[int | str | None]) -> list[int]:
    """Return a shape as the protocol describes it: -1 for sizes that vary."""
    return [size if isinstance(size, int) else -1 for size in shape]
