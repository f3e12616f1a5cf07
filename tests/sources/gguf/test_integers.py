"""Integers and scales of GGUF's blocks, of any bytes: what the package gguf computes of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linexport.quantization.stored_integers import NotExactError, as_blocks
from linexport.sources.gguf import integers

gguf = pytest.importorskip("gguf")

HALVES = {"Q3_K": (108,), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
"""Places of numbers in half precision; of other types 0."""


def drawn(kind: str, rows: int, row_blocks: int, seed: int) -> np.ndarray:
    """Draw blocks of any bytes, whose numbers in half precision are finite."""
    generator = np.random.default_rng(seed)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    found = generator.integers(0, 256, (rows * row_blocks, size), np.uint8)
    for place in HALVES.get(kind, (0,)):
        halves = generator.normal(0, 0.1, (len(found), 1)).astype(np.float16)
        found[:, place : place + 2] = halves.view(np.uint8)
    return found.reshape(rows, -1)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(integers.LAYOUTS)),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 999),
)
def test_integers_mean_the_numbers_that_the_package_reads(
    kind: str, rows: int, row_blocks: int, seed: int
) -> None:
    data, own = drawn(kind, rows, row_blocks, seed), gguf.GGMLQuantizationType[kind]
    packed = integers.packed(data, own)
    assert packed is not None
    expected = gguf.dequantize(data, own)
    np.testing.assert_array_equal(packed.dequantised().numpy(), expected)
    if packed.offsets is not None:
        with pytest.raises(NotExactError):
            as_blocks(packed)
        return
    made = as_blocks(packed)
    assert made.grid.bits == (4 if kind in ("Q4_0", "Q3_K") else 8)
    assert made.grid.block == integers.LAYOUTS[kind].group
    np.testing.assert_array_equal(made.matrix(), expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_integers_are_those_of_the_bytes(kind: str) -> None:
    data = drawn(kind, 3, 2, 0)
    made = as_blocks(integers.packed(data, gguf.GGMLQuantizationType[kind]))  # type: ignore[arg-type]
    own = data.reshape(3, 2, -1)[..., 2:]
    codes = own ^ 0x80 if kind == "Q8_0" else np.concatenate([own & 15, own >> 4], -1)
    np.testing.assert_array_equal(made.values, codes)
    scales = data.reshape(3, 2, -1)[..., :2].copy().view(np.float16)[..., 0]
    np.testing.assert_array_equal(made.scales, scales.astype(np.float32))


def test_other_types_are_read_as_floats() -> None:
    data = drawn("Q4_K", 1, 1, 0)
    assert integers.packed(data, gguf.GGMLQuantizationType.Q4_K) is None
