"""compressed-tensors, as llm-compressor writes it: integers, and floats of four and eight bits.

    pack-quantized          weight_packed (outputs, words), weight_shape, weight_scale, which are
                            (outputs, groups), and weight_zero_point (words, groups), weight_g_idx
    int-, float-, naive-    weight in eight bits, weight_scale, weight_zero_point: one number, one
    quantized               for each output or group, or one for each block of rows and columns
    nvfp4-pack-quantized    weight_packed (outputs, inputs / 2), weight_scale, floats of eight bits
                            for 16 inputs each, and weight_global_scale, one number
    mxfp4-pack-quantized    weight_packed, and weight_scale s of 32 inputs, which is 2^(s - 127)
    mxfp8-quantized         weight in eight bits, and such a weight_scale
    w = (q - zero) scale, and (q - zero) (scale / global scale) of nvfp4

Packed integers are stored higher by 2^(bits - 1), as are their zeros. Scales of activations are
left out: the numbers are those of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from linexport.sources.files import refuse
from linexport.sources.packed.record import PackedTensor, StoredTensor, blocks, unpack
from linexport.sources.packed.stored import StoredTensors
from linexport.system.json_object import JsonObject

TITLE = "compressed-tensors"
METHODS = ("compressed-tensors", "compressed_tensors")
IGNORED = (
    *("input_scale", "input_zero_point", "input_global_scale"),
    *("output_scale", "k_scale", "v_scale", "q_scale"),
)

_LAYOUTS = (
    *("dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
_MIXED = "mixed-precision"
_EIGHT_BITS = ("I8", "F8_E4M3")
_WORD = 32
_NIBBLES, _EXPONENTS, _BIAS = "U8", "U8", 127
"""Types of two floats of four bits, and of scales that are powers of two, with their bias."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Floats of four bits without their sign, which is the highest bit."""


def weights(
    stored: StoredTensors, settings: JsonObject, config: JsonObject
) -> Iterator[StoredTensor]:
    """Return the weights that have a ``weight_packed`` or a ``weight_scale``."""
    schemes = _schemes(stored, settings)
    for stem in stored.stems(".weight_packed"):
        is_float = stored[f"{stem}.weight_packed"].dtype == _NIBBLES
        yield (_of_four_bits if is_float else _packed)(stored, stem, schemes)
    for stem in stored.stems(".weight"):
        if stored[f"{stem}.weight"].dtype in _EIGHT_BITS:
            yield _of_eight_bits(stored, stem, schemes)


def _schemes(stored: StoredTensors, settings: JsonObject) -> list[JsonObject]:
    """Return how weights are quantised, in each group of the configuration."""
    groups = [g for g in (settings.get("config_groups") or {}).values() if isinstance(g, dict)]
    default = settings.get("format", "dense")
    layouts = {g.get("format") or default for g in groups} or {default}
    sparse = settings.get("sparsity_config") or {}
    sparsity = sparse.get("format", "dense") if isinstance(sparse, dict) else sparse
    other = sorted(map(str, ({*layouts, sparsity} - {*_LAYOUTS, _MIXED})))
    if other:
        raise refuse(
            stored.folder,
            f"compressed-tensors in the format {other[0]}; read are {', '.join(_LAYOUTS)}",
            "take the checkpoint it was quantised from",
        )
    return [g["weights"] for g in groups if isinstance(g.get("weights"), dict)]


def _packed(stored: StoredTensors, stem: str, schemes: list[JsonObject]) -> StoredTensor:
    packed, scale = f"{stem}.weight_packed", f"{stem}.weight_scale"
    outputs, words = stored[packed].shape
    stored.need(f"{stem}.weight_shape", packed)
    shape = tuple(stored.read(f"{stem}.weight_shape").tolist())
    fitting = [scheme for scheme in schemes if _fits(scheme, shape, outputs, words)]
    if len({scheme["num_bits"] for scheme in fitting}) != 1:
        raise stored.wrong(
            f"{packed} of {words} words and {stem}.weight_shape {shape}, which the bits in "
            "config_groups do not give"
        )
    bits = fitting[0]["num_bits"]
    layout = _Layout(stored, scale, packed, (outputs, shape[1]), fitting)
    zero, index = f"{stem}.weight_zero_point", f"{stem}.weight_g_idx"
    if not any(scheme.get("symmetric", True) for scheme in fitting):
        stored.need(zero, packed)
    found = [name for name in (zero, index) if name in stored]
    if zero in found:
        stored.expect(zero, (-(-outputs * bits // _WORD), layout.groups), (outputs, layout.groups))
    if index in found:
        stored.expect(index, (shape[1],))
    return StoredTensor(
        f"{stem}.weight",
        shape,
        partial(_read_packed, stored, stem, bits, layout),
        frozenset({packed, scale, f"{stem}.weight_shape", *found}),
    )


def _fits(scheme: JsonObject, shape: tuple[int, ...], outputs: int, words: int) -> bool:
    """Return whether words hold a weight in the bits of a scheme."""
    bits = scheme.get("num_bits")
    if not isinstance(bits, int) or not 1 <= bits <= 8 or len(shape) != 2:
        return False
    return shape[0] == outputs and -(-shape[1] * bits // _WORD) == words


class _Layout:
    """The groups of rows and columns that share a scale."""

    def __init__(
        self,
        stored: StoredTensors,
        scale: str,
        whose: str,
        shape: tuple[int, int],
        schemes: list[JsonObject],
    ) -> None:
        found = stored.need(scale, whose).shape
        self.shape = found if len(found) == 2 else (*(found or (1,)), 1)
        if len(self.shape) != 2 or len(found) > 2:
            raise stored.wrong(f"{scale} has shape {found}, expected at most two sizes")
        self.groups = self.shape[1]
        squares = [s["block_structure"] for s in schemes if _is_pair(s.get("block_structure"))]
        self.rows = blocks(
            shape[0],
            stored.group_size(
                scale, shape[0], self.shape[0], 1, shape[0], *(b[0] for b in squares)
            ),
        )
        stated = [*(b[1] for b in squares), *(s.get("group_size") for s in schemes)]
        size = stored.group_size(scale, shape[1], self.groups, shape[1], *stated)
        self.columns = blocks(shape[1], size)


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2


def _read_packed(stored: StoredTensors, stem: str, bits: int, layout: _Layout) -> PackedTensor:
    outputs, inputs = len(layout.rows), len(layout.columns)
    half = 1 << (bits - 1)
    scales = stored.read(f"{stem}.weight_scale").reshape(layout.shape)
    zeros, columns = torch.full(layout.shape, half), layout.columns
    if (name := f"{stem}.weight_zero_point") in stored:
        found = stored.read(name)
        packed = found.dtype == torch.int32  # as versions from 0.10 on write them
        zeros = unpack(found.T, bits)[:, :outputs].T if packed else found.int() + half
    if (name := f"{stem}.weight_g_idx") in stored:
        index = stored.read(name).long()
        if bool((index >= layout.groups).any()):
            raise stored.wrong(f"{name} names groups that {stem}.weight_scale has not")
        columns = columns if bool((index < 0).any()) else index  # -1: in order
    codes = unpack(stored.read(f"{stem}.weight_packed"), bits)[:, :inputs]
    return PackedTensor(codes, scales, layout.rows, columns, zeros)


def _of_four_bits(stored: StoredTensors, stem: str, schemes: list[JsonObject]) -> StoredTensor:
    packed, scale, whole = (f"{stem}.weight_{e}" for e in ("packed", "scale", "global_scale"))
    outputs, octets = stored[packed].shape
    layout = _Layout(stored, scale, packed, (outputs, 2 * octets), schemes)
    parts = {packed, scale}
    if stored[scale].dtype != _EXPONENTS:
        stored.need(whole, packed)
        stored.expect(whole, (1,), ())
        parts.add(whole)
    return StoredTensor(
        f"{stem}.weight",
        (outputs, 2 * octets),
        partial(_read_four_bits, stored, stem, layout),
        frozenset(parts),
    )


def _read_four_bits(stored: StoredTensors, stem: str, layout: _Layout) -> PackedTensor:
    codes = unpack(stored.read(f"{stem}.weight_packed"), 4).long()
    values = torch.tensor((*_MAGNITUDES, *(-x for x in _MAGNITUDES)))[codes]
    scales = _scales(stored, f"{stem}.weight_scale", layout)
    if (name := f"{stem}.weight_global_scale") in stored:
        scales = scales.float() / stored.read(name).float().reshape(())
    return PackedTensor(values, scales, layout.rows, layout.columns)


def _scales(stored: StoredTensors, name: str, layout: _Layout) -> Tensor:
    """Return scales; those that are stored as exponents as powers of two."""
    found = stored.read(name).reshape(layout.shape)
    if found.dtype != torch.uint8:
        return found
    return torch.ldexp(torch.ones(layout.shape), found.int() - _BIAS)


def _of_eight_bits(stored: StoredTensors, stem: str, schemes: list[JsonObject]) -> StoredTensor:
    weight, scale, zero = (f"{stem}.weight{end}" for end in ("", "_scale", "_zero_point"))
    shape = stored[weight].shape
    if len(shape) != 2:
        raise stored.wrong(f"{weight} has shape {shape}, expected two sizes")
    layout = _Layout(stored, scale, weight, (shape[0], shape[1]), schemes)
    parts = {weight, scale}
    if zero in stored:
        stored.expect(zero, layout.shape, stored[scale].shape)
        parts.add(zero)
    return StoredTensor(
        weight, shape, partial(_read_eight_bits, stored, stem, layout), frozenset(parts)
    )


def _read_eight_bits(stored: StoredTensors, stem: str, layout: _Layout) -> PackedTensor:
    weight, scale, zero = (f"{stem}.weight{end}" for end in ("", "_scale", "_zero_point"))
    scales = _scales(stored, scale, layout)
    zeros = stored.read(zero).reshape(layout.shape) if zero in stored else None
    return PackedTensor(stored.read(weight), scales, layout.rows, layout.columns, zeros)
