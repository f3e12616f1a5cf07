"""Weights in few bits, written by the definitions of the formats, with what they mean in float64.

Each writer draws integers and scales, and returns the tensors that its format stores for a weight
(outputs, inputs), by the ends of their names, and the numbers that these mean.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Written = tuple[dict[str, Tensor], np.ndarray]
Writer = Callable[[np.random.Generator, tuple[int, int]], Written]

NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(fields: np.ndarray, bits: int) -> np.ndarray:
    """Pack rows of integers into 32-bit words, each row as one long number, lowest first."""
    count = -(-fields.shape[-1] * bits // 32)
    numbers = (sum(int(v) << (bits * k) for k, v in enumerate(row)) for row in fields)
    found = [[(n >> (32 * w)) & 0xFFFFFFFF for w in range(count)] for n in numbers]
    return np.array(found, np.uint32).view(np.int32)


def tensor(values: np.ndarray) -> Tensor:
    """Return a tensor of its own memory."""
    return torch.from_numpy(np.ascontiguousarray(values))


def draw(
    generator: np.random.Generator, shape: tuple[int, int], bits: int, groups: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes, zeros and scales in half precision of groups of inputs."""
    codes = generator.integers(0, 1 << bits, shape)
    zeros = generator.integers(0, 1 << bits, (shape[0], groups))
    scales = generator.uniform(0.05, 0.1, zeros.shape) / (1 << bits)
    return codes, zeros, scales.astype(np.float16)


def gptq(bits: int = 4, size: int = 16, version: int = 1, order: str = "blocks") -> Writer:
    """GPTQ; version 1 has zeros lower by one.

    Args:
        bits: of an integer.
        size: inputs of a group.
        version: of the format, 1 or 2.
        order: of ``g_idx``: "blocks", "own" of each weight, or "shared" by weights of as many
            inputs, as by those of one layer.
    """

    def write(generator: np.random.Generator, shape: tuple[int, int]) -> Written:
        inputs = shape[1]
        groups = -(-inputs // size)
        codes, zeros, scales = draw(generator, shape, bits, groups)
        index = np.arange(inputs) // size
        drawn = np.random.default_rng(inputs) if order == "shared" else generator
        index = index if order == "blocks" else drawn.permutation(index)
        if version == 1 and bits == 3:
            zeros = np.maximum(zeros, 1)  # no borrow from a field that lies across words
        stored = words(zeros.T, bits).view(np.uint32)
        if version == 1 and bits == 3:
            stored = words(zeros.T - 1, bits).view(np.uint32)
        elif version == 1:
            stored = stored - np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
        parts = {
            "qweight": tensor(words(codes, bits).T),
            "qzeros": tensor(stored.view(np.int32)),
            "scales": tensor(scales.T),
            "g_idx": tensor(index.astype(np.int32)),
        }
        if order == "blocks" and inputs % size == 0:
            del parts["g_idx"]
        return parts, (codes - zeros[:, index]) * scales.astype(np.float64)[:, index]

    return write


def awq(size: int = 16) -> Writer:
    """AWQ's matrix products: outputs in eights, in an order of their own."""

    def packed(fields: np.ndarray) -> Tensor:
        """(inputs or groups, outputs) to words, eight outputs each."""
        return tensor(words(fields.reshape(-1, 8)[:, AWQ_ORDER], 4).reshape(len(fields), -1))

    def write(generator: np.random.Generator, shape: tuple[int, int]) -> Written:
        codes, zeros, scales = draw(generator, shape, 4, -(-shape[1] // size))
        index = np.arange(shape[1]) // size
        parts = {
            "qweight": packed(codes.T),
            "qzeros": packed(zeros.T),
            "scales": tensor(scales.T),
        }
        return parts, (codes - zeros[:, index]) * scales.astype(np.float64)[:, index]

    return write


def compressed(
    bits: int = 4, size: int | None = 16, symmetric: bool = True, ordered: bool = True
) -> Writer:
    """compressed-tensors' packed integers; size None: a scale for each output."""

    def write(generator: np.random.Generator, shape: tuple[int, int]) -> Written:
        inputs = shape[1]
        groups = -(-inputs // (size or inputs))
        codes, zeros, scales = draw(generator, shape, bits, groups)
        zeros = np.full_like(zeros, 1 << (bits - 1)) if symmetric else zeros
        index = np.arange(inputs) // (size or inputs)
        index = index if ordered else generator.permutation(index)
        parts = {
            "weight_packed": tensor(words(codes, bits)),
            "weight_scale": tensor(scales),
            "weight_shape": torch.tensor(shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = tensor(words(zeros.T, bits).T)
        if not ordered:
            parts["weight_g_idx"] = tensor(index.astype(np.int32))
        return parts, (codes - zeros[:, index]) * scales.astype(np.float64)[:, index]

    return write


def eight_bits(generator: np.random.Generator, shape: tuple[int, int]) -> Written:
    """compressed-tensors' plain integers, with a scale for each output."""
    codes = generator.integers(-128, 128, shape).astype(np.int8)
    scales = generator.uniform(0.0002, 0.0004, (shape[0], 1)).astype(np.float32)
    parts = {"weight": tensor(codes), "weight_scale": tensor(scales)}
    return parts, codes * scales.astype(np.float64)


def float8(generator: np.random.Generator, shape: tuple[int, int]) -> tuple[Tensor, np.ndarray]:
    """Draw floats of four bits of exponent and three of mantissa, and their values."""
    codes = generator.integers(0, 0x7F, shape) | (generator.integers(0, 2, shape) << 7)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    stored = tensor(codes.astype(np.uint8)).view(torch.float8_e4m3fn)
    return stored, np.where(codes >> 7, -values, values)


def fp8(block: Sequence[int] | None = (16, 24), name: str = "weight_scale_inv") -> Writer:
    """Floats of eight bits with a scale for each block; None: for the whole weight."""

    def write(generator: np.random.Generator, shape: tuple[int, int]) -> Written:
        stored, values = float8(generator, shape)
        high, wide = block or shape
        counts = (-(-shape[0] // high), -(-shape[1] // wide))
        scales = generator.uniform(1e-4, 2e-4, counts).astype(np.float32)
        spread = scales.astype(np.float64).repeat(high, 0).repeat(wide, 1)
        parts = {"weight": stored, name: tensor(scales if block else scales.reshape(1))}
        return parts, values * spread[: shape[0], : shape[1]]

    return write


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def fp4(nvidia: bool = True) -> Writer:
    """compressed-tensors' floats of four bits, with the scales of NVFP4 or of MXFP4."""

    def write(generator: np.random.Generator, shape: tuple[int, int]) -> Written:
        size = 16 if nvidia else 32
        codes = generator.integers(0, 16, shape)
        groups = shape[0], shape[1] // size
        parts = {"weight_packed": tensor((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))}
        if nvidia:
            stored, scales = float8(generator, groups)
            whole = np.float32(generator.uniform(500, 3000))
            parts |= {"weight_scale": stored, "weight_global_scale": tensor(whole.reshape(1))}
            scales = (scales.astype(np.float32) / whole).astype(np.float64)
        else:
            exponents = generator.integers(115, 125, groups)
            parts["weight_scale"] = tensor(exponents.astype(np.uint8))
            scales = 2.0 ** (exponents - 127)
        values = FP4[codes & 7] * np.where(codes & 8, -1, 1)
        return parts, values * scales.repeat(size, 1)

    return write


def mlx(bits: int = 4, size: int = 16) -> Writer:
    """MLX's affine weights: scales and what is added."""

    def write(generator: np.random.Generator, shape: tuple[int, int]) -> Written:
        codes, _, scales = draw(generator, shape, bits, -(-shape[1] // size))
        index = np.arange(shape[1]) // size
        biases = generator.uniform(-0.05, 0, scales.shape).astype(np.float16)
        parts = {
            "weight": tensor(words(codes, bits)).view(torch.uint32),
            "scales": tensor(scales),
            "biases": tensor(biases),
        }
        meant = codes * scales.astype(np.float64)[:, index] + biases.astype(np.float64)[:, index]
        return parts, meant

    return write


def nf4(size: int = 64, nested: int | None = None) -> Writer:
    """bitsandbytes' four bits; nested: scales in eight bits, with a scale for so many of them."""

    def write(generator: np.random.Generator, shape: tuple[int, int]) -> Written:
        count = shape[0] * shape[1]
        codes = generator.integers(0, 16, count)
        number = -(-count // size)
        halves = np.pad(codes, (0, count % 2)).reshape(-1, 2)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": size, "dtype": "float16"}
        state["shape"] = list(shape)
        parts = {
            "weight": tensor((halves[:, :1] << 4 | halves[:, 1:]).astype(np.uint8)),
            "weight.quant_map": tensor(NF4.copy()),
        }
        scales = generator.uniform(0.02, 0.06, number).astype(np.float32).astype(np.float64)
        if nested is None:
            parts["weight.absmax"] = tensor(scales.astype(np.float32))
        else:
            table = np.sort(generator.uniform(-1, 1, 256)).astype(np.float32)
            inner = generator.integers(0, 256, number).astype(np.uint8)
            outer = generator.uniform(0.005, 0.01, -(-number // nested)).astype(np.float32)
            state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": 0.04}
            parts |= {
                "weight.absmax": tensor(inner),
                "weight.nested_absmax": tensor(outer),
                "weight.nested_quant_map": tensor(table),
            }
            each = outer.astype(np.float64).repeat(nested)[:number]
            scales = table.astype(np.float64)[inner] * each + 0.04
        text = json.dumps(state).encode()
        parts["weight.quant_state.bitsandbytes__nf4"] = tensor(np.frombuffer(text, np.uint8).copy())
        meant = NF4.astype(np.float64)[codes] * scales.repeat(size)[:count]
        return parts, meant.reshape(shape)

    return write


def rows(generator: np.random.Generator, shape: tuple[int, int]) -> Written:
    """bitsandbytes' eight bits."""
    codes = generator.integers(-127, 128, shape).astype(np.int8)
    scales = generator.uniform(0.02, 0.06, shape[0]).astype(np.float32)
    parts = {"weight": tensor(codes), "SCB": tensor(scales), "weight_format": torch.tensor(0)}
    parts["weight_format"] = parts["weight_format"].to(torch.uint8)
    return parts, codes * scales.astype(np.float64)[:, None] / 127


def scheme(bits: int, **more: Any) -> dict[str, Any]:
    """Return the settings of compressed-tensors for linear layers of so many bits."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group"} | more
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def quantise(
    source: Path,
    place: Path,
    write: Writer,
    settings: dict[str, Any],
    key: str = "quantization_config",
) -> tuple[Path, Path]:
    """Write a folder's linear layers in few bits, and a folder of the floats that they mean.

    Args:
        source: a folder of floats, in one file.
        place: both are made in.
        write: a format.
        settings: of the configuration.
        key: of the configuration that they are under; MLX has ``quantization``.

    Returns:
        The folder in few bits and that of floats.
    """
    generator = np.random.default_rng(0)
    few, floats = place / "few", place / "floats"
    shutil.copytree(source, few)
    shutil.copytree(source, floats)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if weight.ndim != 2 or not name.endswith("proj.weight") or weight.shape[0] % 8:
            last = key == "quantization" and "conv1d.weight" in name  # MLX has channels last
            stored[name] = weight.transpose(1, 2).contiguous() if last else weight
            meant[name] = weight
            continue
        parts, values = write(generator, tuple(weight.shape))
        stem = name.removesuffix("weight")
        stored |= {f"{stem}{end}": part for end, part in parts.items()}
        meant[name] = torch.from_numpy(values.astype(np.float32))
    assert stored.keys() != meant.keys()
    save_file(stored, few / "model.safetensors", {"format": "pt"})
    save_file(meant, floats / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config[key] = settings
    (few / "config.json").write_text(json.dumps(config))
    return few, floats
