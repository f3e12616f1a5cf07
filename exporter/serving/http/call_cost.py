"""Bytes of a call of the model and of its answer, from the shapes of its inputs alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from linexport.manifest import Manifest
from linexport.manifest.records import TensorRecord
from linexport.serving.http.json_writer import largest
from linexport.serving.http.tensors import InferRequest, is_binary, outputs_of

HEAD = 2**10
"""Bytes of a response without its numbers, and of each output's description."""


@dataclass(frozen=True)
class CallCost:
    """Bytes, at most.

    Attributes:
        call: of inputs, of states before and after the call, and of all outputs or, where that is
            more, of what the graph holds at once.
        answer: of the requested outputs, as they are sent.
    """

    call: int
    answer: int


def call_cost(
    manifest: Manifest, infer_request: InferRequest, feeds: Mapping[str, np.ndarray], inside: int
) -> CallCost:
    """Return what a call costs; sizes that its inputs do not tell count as 1.

    Args:
        manifest: of the artifact.
        infer_request: names the outputs.
        feeds: inputs.
        inside: bytes that the graph holds at once.

    Raises:
        ProtocolError: a requested output is not one of the model's, or is named twice.
    """
    sizes = _sizes(manifest, feeds)
    held = {name for state in manifest.states for name in (state.past, state.present)}
    outputs = {o.name: o for o in manifest.outputs if o.name not in held}
    states = [o for o in manifest.outputs if o.name in held]
    past = sum(_count(s, sizes) * _dtype(s).itemsize for s in states)
    made = past + sum(_count(o, sizes) * _dtype(o).itemsize for o in outputs.values())
    call = sum(values.nbytes for values in feeds.values()) + past + max(made, inside)
    answer = HEAD
    for one in outputs_of(infer_request, [*outputs]):
        count, dtype = _count(outputs[one.name], sizes), _dtype(outputs[one.name])
        binary = is_binary(infer_request, one)
        answer += HEAD + (count * dtype.itemsize if binary else largest(count, dtype))
    return CallCost(call, answer)


def _sizes(manifest: Manifest, feeds: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return the sizes of dimensions that the inputs have."""
    found: dict[str, int] = {}
    for described in manifest.inputs:
        values = feeds.get(described.name)
        if values is not None and values.ndim == len(described.shape):
            for dim, size in zip(described.shape, values.shape, strict=True):
                if isinstance(dim, str):
                    found[dim] = max(size, found.get(dim, 0))
    return found


def _count(tensor: TensorRecord, sizes: Mapping[str, int]) -> int:
    return prod(d if isinstance(d, int) else sizes.get(str(d), 1) for d in tensor.shape)


def _dtype(tensor: TensorRecord) -> np.dtype[np.generic]:
    try:
        return np.dtype(tensor.dtype)
    except TypeError:  # bfloat16, where its library was not imported
        return np.dtype(np.float32)
