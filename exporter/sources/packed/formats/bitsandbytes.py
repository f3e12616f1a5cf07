"""bitsandbytes: four bits that number a table of 16 values, and eight bits with a scale a row.

    4 bits   weight (values / 2, 1), the first of two values in the high bits
             weight.absmax (blocks), weight.quant_map (16), weight.quant_state.bitsandbytes__nf4
             w[k] = quant_map[q[k]] absmax[k // block size]
    scales   in eight bits themselves, where they are quantised a second time:
             absmax[b] = nested_quant_map[q[b]] nested_absmax[b // nested size] + nested offset
    8 bits   weight (outputs, inputs) and SCB (outputs):  w[o, i] = q[o, i] SCB[o] / 127

The state is JSON in a tensor of bytes: sizes, the block sizes and the offset.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from math import prod

import torch
from torch import Tensor

from linexport.sources.packed.record import PackedTensor, StoredTensor, blocks, unpack
from linexport.sources.packed.stored import StoredTensors
from linexport.system.json_object import JsonObject

TITLE = "bitsandbytes"
METHODS = ("bitsandbytes",)
IGNORED = ("weight_format",)

_STATE = ".quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_MOST = 127


def weights(
    stored: StoredTensors, settings: JsonObject, config: JsonObject
) -> Iterator[StoredTensor]:
    """Return the weights of four bits, and those of eight."""
    for kind in _KINDS:
        for name in stored.stems(f"{_STATE}{kind}"):
            yield _of_four_bits(stored, name, f"{name}{_STATE}{kind}")
    for stem in stored.stems(".SCB"):
        yield _of_eight_bits(stored, stem)


def _of_four_bits(stored: StoredTensors, name: str, state: str) -> StoredTensor:
    values = _state(stored, state)
    shape, size = tuple(values["shape"]), values["blocksize"]
    count = prod(shape)
    if prod(stored.need(name, state).shape) != -(-count // 2):
        raise stored.wrong(f"{name} has shape {stored[name].shape} for {count} values of four bits")
    number = -(-count // size)
    parts = [f"{name}.absmax", f"{name}.quant_map"]
    if "nested_blocksize" in values:
        parts += [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
    sizes = [number, 16, -(-number // values.get("nested_blocksize", number)), 256]
    for part, expected in zip(parts, sizes, strict=False):
        stored.need(part, name)
        stored.expect(part, (expected,))
    return StoredTensor(
        name, shape, partial(_read, stored, name, values), frozenset({name, state, *parts})
    )


def _state(stored: StoredTensors, name: str) -> JsonObject:
    """Return the sizes that the state of a weight gives.

    Raises:
        UnsupportedModelError: it does not give them.
    """
    try:
        found = json.loads(bytes(stored.read(name).reshape(-1).tolist()))
        sizes = [*found["shape"], found["blocksize"]]
        sizes += [found["nested_blocksize"]] if "nested_blocksize" in found else []
        float(found.get("nested_offset", 0))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise stored.wrong(f"{name} is not JSON with shape and blocksize") from None
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise stored.wrong(f"{name} gives sizes {sizes}, expected positive numbers")
    return dict(found)


def _read(stored: StoredTensors, name: str, values: JsonObject) -> PackedTensor:
    octets = stored.read(name).reshape(1, -1)
    halves = unpack(octets.view(torch.uint8), 4).reshape(-1, 2).flip(1).reshape(-1).long()
    size = values["blocksize"]
    numbers = stored.read(f"{name}.quant_map").float()[halves[: prod(values["shape"])]]
    padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % size)).reshape(-1, size)
    scales = _scales(stored, name, values)[:, None]
    columns = torch.zeros(size, dtype=torch.int64)
    return PackedTensor(padded, scales, torch.arange(len(padded)), columns)


def _scales(stored: StoredTensors, name: str, values: JsonObject) -> Tensor:
    found = stored.read(f"{name}.absmax")
    if "nested_blocksize" not in values:
        return found.float()
    numbers = stored.read(f"{name}.nested_quant_map").float()[found.long()]
    groups = blocks(len(found), values["nested_blocksize"])
    nested = stored.read(f"{name}.nested_absmax").float()
    return numbers * nested[groups] + float(values["nested_offset"])


def _of_eight_bits(stored: StoredTensors, stem: str) -> StoredTensor:
    weight, scales = f"{stem}.weight", f"{stem}.SCB"
    shape = stored.need(weight, scales).shape
    stored.expect(scales, (shape[0],))
    return StoredTensor(
        weight, shape, partial(_read_rows, stored, weight, scales), frozenset({weight, scales})
    )


def _read_rows(stored: StoredTensors, weight: str, scales: str) -> PackedTensor:
    codes = stored.read(weight)
    by_row = stored.read(scales).float()[:, None] / _MOST
    columns = torch.zeros(codes.shape[1], dtype=torch.int64)
    return PackedTensor(codes, by_row, torch.arange(len(codes)), columns)
