"""Floats of eight bits with a scale for blocks of rows and columns, as DeepSeek and Qwen publish.

    weight (outputs, inputs) in F8_E4M3
    weight_scale_inv (ceil(outputs / block rows), ceil(inputs / block columns)), or one number
    w[o, i] = weight[o, i] weight_scale_inv[o // block rows, i // block columns]

Weights of experts may be one tensor, (experts, outputs, inputs). Scales of activations are left
out: the numbers are those of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from linexport.sources.packed.record import PackedTensor, StoredTensor, blocks
from linexport.sources.packed.stored import StoredTensors
from linexport.system.json_object import JsonObject

TITLE = "fp8"
METHODS = ("fp8",)
IGNORED = ("activation_scale", "input_scale", "k_scale", "v_scale")

_TYPE, _SCALES = "F8_E4M3", ("_scale_inv", "_scale")
_BLOCK = [128, 128]


def weights(
    stored: StoredTensors, settings: JsonObject, config: JsonObject
) -> Iterator[StoredTensor]:
    """Return the weights of eight bits."""
    found = settings.get("weight_block_size")
    block = found if isinstance(found, list) and len(found) == 2 else _BLOCK
    for name, header in stored.items():
        if header.dtype == _TYPE:
            yield _weight(stored, name, block)


def _weight(stored: StoredTensors, name: str, block: list[int]) -> StoredTensor:
    shape = stored[name].shape
    given = [f"{name}{end}" for end in _SCALES if f"{name}{end}" in stored]
    scale = given[0] if given else f"{name}{_SCALES[0]}"
    found = stored.need(scale, name).shape
    if len(shape) < 2:
        raise stored.wrong(f"{name} has shape {shape}, expected two sizes or more")
    experts = shape[:-2]
    if len(found) < len(shape):
        found = (*experts, 1, 1) if found in ((), (1,), experts) else (*found, 1)
    if len(found) != len(shape) or found[:-2] != experts:
        raise stored.wrong(f"{scale} has shape {stored[scale].shape} for weights of {shape}")
    whole = found[-1] == 1 and found[-2] in (1, shape[-2])  # a scale for all, or for each row
    sizes = (shape[-2] // found[-2], shape[-1]) if whole else block
    high, wide = (
        stored.group_size(scale, shape[axis], found[axis], sizes[axis]) for axis in (-2, -1)
    )
    count = int(torch.Size(experts).numel())
    rows = blocks(shape[-2], high) + found[-2] * torch.arange(count)[:, None]
    columns = blocks(shape[-1], wide)
    return StoredTensor(
        name,
        shape,
        partial(_read, stored, name, scale, rows.reshape(-1), columns),
        frozenset({name, scale}),
    )


def _read(
    stored: StoredTensors, name: str, scale: str, rows: Tensor, columns: Tensor
) -> PackedTensor:
    codes = stored.read(name).reshape(-1, len(columns))
    scales = stored.read(scale).reshape(int(rows[-1]) + 1, int(columns[-1]) + 1)
    return PackedTensor(codes, scales, rows, columns)
