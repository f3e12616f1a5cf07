"""Integers of checkpoints in blocks: they are the same integers, and mean the same numbers."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from safetensors import safe_open
from safetensors.torch import save_file

from linexport.quantization.block_quantisation import Quantised
from linexport.quantization.stored_integers import NotExactError, as_blocks
from linexport.sources.packed import read_weights
from linexport.sources.packed.record import PackedTensor, blocks
from tests.support import ROOT, quantised
from tests.support.quantised import Writer, scheme

fast = settings(max_examples=20, deadline=None)


def stored(write: Writer, config: dict[str, Any], shape: tuple[int, int]) -> PackedTensor:
    """Write a weight in a format, and read it as it is stored."""
    parts, _ = write(np.random.default_rng(sum(shape)), shape)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({f"layer.{name}": part for name, part in parts.items()}, path)
        found = read_weights(Path(folder), [path], {"quantization_config": config})
        packed = found.tensors["layer.weight"].packed()
    assert packed is not None
    return packed


def check(packed: PackedTensor) -> Quantised:
    """Compare integers, scales, zero points and the numbers that they mean."""
    made = as_blocks(packed)
    outputs, inputs = packed.codes.shape
    size, numbers = made.grid.block, made.values.reshape(outputs, -1)[:, :inputs].astype(int)
    order = np.arange(inputs) if made.order is None else made.order
    assert sorted(order) == list(range(inputs))
    shift = numbers - packed.codes.numpy().astype(int)[:, order]
    assert np.unique(shift).tolist() in ([0], [8], [128])
    first = packed.columns[order][::size]
    scales = packed.scales.float()[:, first][packed.rows].numpy()
    np.testing.assert_array_equal(made.scales.view(np.uint32), scales.view(np.uint32))
    if packed.offsets is None:
        zeros = 0 if packed.zeros is None else packed.zeros[:, first][packed.rows].numpy()
        assert np.all(made.zeros.astype(int) - shift.flat[0] == zeros)
    np.testing.assert_array_equal(made.matrix(), packed.dequantised().numpy())
    np.testing.assert_array_equal(product_with_identity(made), made.matrix().T)
    return made


def product_with_identity(made: Quantised) -> np.ndarray:
    """Return the matrix, transposed, as ONNX Runtime's MatMulNBits reads it."""
    parts = made.packed()
    node = helper.make_node(
        "MatMulNBits",
        ["x", *parts],
        ["y"],
        domain="com.microsoft",
        K=made.inputs,
        N=len(made.values),
        bits=made.grid.bits,
        block_size=made.grid.block,
        accuracy_level=1,
    )
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, None]) for n in "xy")
    initializers = [numpy_helper.from_array(array, name) for name, array in parts.items()]
    model = helper.make_model(
        helper.make_graph([node], "g", [x], [y], initializers),
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    identity = np.eye(made.inputs, dtype=np.float32)
    gathered = identity if made.order is None else identity[:, made.order]
    return session.run(None, {"x": gathered})[0]


def sizes(rows: int = 1, columns: int = 1, most: int = 5) -> st.SearchStrategy[tuple[int, int]]:
    """Draw multiples of these."""
    numbers = st.integers(1, most)
    return st.tuples(numbers.map(lambda n: n * rows), numbers.map(lambda n: n * columns))


@fast
@given(
    sizes(32, 32), st.sampled_from([2, 3, 4, 8]), st.sampled_from([1, 2]), st.sampled_from([16, 32])
)
def test_gptq(shape: tuple[int, int], bits: int, version: int, size: int) -> None:
    layout = "gptq" if version == 1 else "gptq_v2"
    config = {"quant_method": "gptq", "bits": bits, "checkpoint_format": layout}
    packed = stored(quantised.gptq(bits, size, version), config | {"group_size": size}, shape)
    assert check(packed).grid.bits == (8 if bits == 8 else 4)


@fast
@given(sizes(32, 32), st.sampled_from([4, 8]), st.sampled_from([16, 32, 48]))
def test_gptq_in_the_order_of_activations(shape: tuple[int, int], bits: int, size: int) -> None:
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": True}
    packed = stored(quantised.gptq(bits, size, order="own"), config, shape)
    made = check(packed)
    in_order = not bool((packed.columns.diff() < 0).any())
    assert (made.order is None) == in_order


@fast
@given(sizes(8, 16), st.sampled_from([16, 48, 64]))
def test_awq(shape: tuple[int, int], size: int) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": size}
    made = check(stored(quantised.awq(size), config, shape))
    assert made.grid.bits == 4


@fast
@given(sizes(1, 4, 40), st.sampled_from([4, 8]), st.sampled_from([None, 16, 32]), st.booleans())
def test_compressed_tensors(
    shape: tuple[int, int], bits: int, size: int | None, symmetric: bool
) -> None:
    config = scheme(bits, symmetric=symmetric, group_size=size)
    made = check(stored(quantised.compressed(bits, size, symmetric), config, shape))
    assert made.grid.symmetric == (bits == 4 and bool((made.zeros == 8).all()))


@fast
@given(sizes(3, 5, 30))
def test_integers_of_eight_bits_by_row(shape: tuple[int, int]) -> None:
    config = scheme(8, strategy="channel") | {"format": "int-quantized"}
    check(stored(quantised.eight_bits, config, shape))
    check(stored(quantised.rows, {"quant_method": "bitsandbytes"}, shape))


@fast
@given(
    st.integers(1, 5),
    st.integers(1, 200),
    st.sampled_from([16, 32, 48, 64, 128, 256, 512]),
    st.integers(0, 99),
    st.integers(-300, 300),
    st.integers(1, 300),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_blocks_of_rows_and_any_range_of_integers(
    outputs: int, inputs: int, size: int, seed: int, low: int, span: int, kind: torch.dtype
) -> None:
    """Integers from low on: those that 8 bits hold are kept, others are said to be out of them."""
    drawn = np.random.default_rng(seed)
    columns = blocks(inputs, size)
    groups = (-(-outputs // 2), int(columns[-1]) + 1)
    codes = torch.from_numpy(drawn.integers(low, low + span, (outputs, inputs)))
    zeros = torch.from_numpy(drawn.integers(low, low + span, groups))
    scales = torch.from_numpy(drawn.standard_normal(groups)).to(kind)
    packed = PackedTensor(codes, scales, blocks(outputs, 2), columns, zeros)
    both = np.concatenate([codes.numpy().ravel(), zeros.numpy().ravel()])
    least, most = both.min(), both.max()
    if (least >= 0 and most < 256) or (least >= -128 and most < 128):
        check(packed)
    else:
        with pytest.raises(NotExactError, match=f"from {least} to {most}"):
            as_blocks(packed)


@fast
@given(sizes(1, 16, 6), st.integers(0, 99), st.sampled_from([(4, -3), (4, 0), (4, 15), (8, 200)]))
def test_an_offset_that_is_a_multiple_of_the_scale_is_a_zero_point(
    shape: tuple[int, int], seed: int, given_zero: tuple[int, int]
) -> None:
    bits, zero = given_zero
    packed = affine(shape, bits, seed)
    made = check(replace(packed, offsets=-zero * packed.scales.float()))
    assert made.grid.bits == (4 if bits == 4 and zero >= 0 else 8)


@fast
@given(sizes(1, 16, 6), st.integers(0, 99))
def test_any_other_offset_is_said_to_be_none(shape: tuple[int, int], seed: int) -> None:
    packed = affine(shape, 4, seed)
    offsets = torch.from_numpy(np.random.default_rng(seed).uniform(-1, 0, packed.scales.shape))
    ratio = offsets.double() / packed.scales.double()
    assume(bool((ratio != torch.round(ratio)).any()))
    with pytest.raises(NotExactError, match="not an integer times their scale"):
        as_blocks(replace(packed, offsets=offsets))


def affine(shape: tuple[int, int], bits: int, seed: int) -> PackedTensor:
    """Draw integers with positive scales of groups of 16."""
    codes, _, scales = quantised.draw(np.random.default_rng(seed), shape, bits, shape[1] // 16)
    columns = blocks(shape[1], 16)
    return PackedTensor(
        torch.from_numpy(codes), torch.from_numpy(scales), torch.arange(shape[0]), columns
    )


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
NOT_KEPT: dict[str, tuple[Writer, dict[str, Any], str]] = {
    "groups of 24": (
        quantised.awq(24),
        {"quant_method": "awq", "group_size": 24},
        "groups of 24 inputs end inside of blocks of 16",
    ),
    "fp8": (quantised.fp8(), {"quant_method": "fp8", "weight_block_size": [16, 24]}, "are floats"),
    "nf4": (quantised.nf4(), {"quant_method": "bitsandbytes"}, "values of a table"),
    "mlx": (quantised.mlx(), {"bits": 4, "group_size": 16}, "not an integer times their scale"),
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_what_cannot_be_held_has_a_reason(name: str) -> None:
    write, config, reason = NOT_KEPT[name]
    with pytest.raises(NotExactError, match=reason):
        as_blocks(stored(write, config, (32, 96)))


def test_zero_points_between_integers_are_not_held() -> None:
    packed = affine((4, 32), 4, 0)
    halves = torch.full(packed.scales.shape, 7.5)
    with pytest.raises(NotExactError, match="zero points are not integers"):
        as_blocks(replace(packed, zeros=halves))


RECORDED = ROOT / "tests" / "sources" / "packed" / "recorded"
HELD = {
    *("awq-4", "gptq-2", "gptq-3", "gptq-4", "gptq-4-act", "gptq-8-act", "mlx-2"),
    *("ct-int8", "ct-pack3-asym-channel", "ct-pack4", "ct-pack4-asym", "ct-pack8"),
}
"""Files whose integers blocks hold; of MLX, that whose offsets happen to be even multiples."""


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.safetensors")), ids=lambda p: p.stem)
def test_integers_that_libraries_wrote(path: Path) -> None:
    with safe_open(path, "pt") as file:
        config = {"quantization_config": json.loads(file.metadata()["settings"])}
        expected = file.get_tensor("expected").numpy()
    packed = read_weights(path.parent, [path], config).tensors["layer.weight"].packed()
    assert packed is not None
    if path.stem in HELD:
        np.testing.assert_array_equal(check(packed).matrix(), expected)
    else:
        with pytest.raises(NotExactError):
            as_blocks(packed)
