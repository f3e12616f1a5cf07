"""Each format read for sizes drawn at random: equal to its definition in float64."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from linexport.errors import UnsupportedModelError
from linexport.sources.packed import StoredWeights, read_weights, registered
from linexport.sources.packed.record import unpack
from tests.support import quantised
from tests.support.quantised import Writer, scheme, words

BNB = {"quant_method": "bitsandbytes"}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 24]}


def opened(folder: Path, parts: dict[str, torch.Tensor], config: dict[str, Any]) -> StoredWeights:
    """Return the weights of a file with these tensors of a layer."""
    path = folder / "model.safetensors"
    save_file({f"layer.{name}": part for name, part in parts.items()}, path)
    return read_weights(folder, [path], {"quantization_config": config})


def check(write: Writer, config: dict[str, Any], shape: tuple[int, int], bound: float = 0) -> None:
    """Compare what is read of a weight with what was written."""
    parts, meant = write(np.random.default_rng(sum(shape)), shape)
    with tempfile.TemporaryDirectory() as folder:
        found = opened(Path(folder), parts, config).tensors["layer.weight"]
        assert found.shape == shape
        expected = torch.from_numpy(meant.astype(np.float32))
        torch.testing.assert_close(found.read(), expected, rtol=bound, atol=0)


def sizes(rows: int = 1, columns: int = 1) -> st.SearchStrategy[tuple[int, int]]:
    """Draw multiples of these."""
    numbers = st.integers(1, 5)
    return st.tuples(numbers.map(lambda n: n * rows), numbers.map(lambda n: n * columns))


fast = settings(max_examples=20, deadline=None)


@fast
@given(
    sizes(32, 32),
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from(["blocks", "own"]),
)
def test_gptq(shape: tuple[int, int], bits: int, version: int, order: str) -> None:
    layout = "gptq" if version == 1 else "gptq_v2"
    config = {"quant_method": "gptq", "bits": bits, "group_size": 16, "checkpoint_format": layout}
    check(quantised.gptq(bits, 16, version, order), config, shape)


@fast
@given(sizes(8, 8), st.sampled_from([8, 16, 24]))
def test_awq(shape: tuple[int, int], size: int) -> None:
    check(quantised.awq(size), {"quant_method": "awq", "bits": 4, "group_size": size}, shape)


@fast
@given(sizes(1, 4), st.integers(2, 8), st.sampled_from([None, 4]), st.booleans(), st.booleans())
def test_compressed_tensors(
    shape: tuple[int, int], bits: int, size: int | None, symmetric: bool, ordered: bool
) -> None:
    config = scheme(bits, symmetric=symmetric, group_size=size)
    check(quantised.compressed(bits, size, symmetric, ordered or not size), config, shape)


@fast
@given(sizes(5, 7), st.sampled_from([None, (16, 24)]))
def test_fp8(shape: tuple[int, int], block: tuple[int, int] | None) -> None:
    check(quantised.fp8(block), FP8, shape)


@fast
@given(sizes(1, 32), st.sampled_from([2, 3, 4, 5, 6, 8]), st.sampled_from([16, 32]))
def test_mlx(shape: tuple[int, int], bits: int, size: int) -> None:
    check(quantised.mlx(bits, size), {"bits": bits, "group_size": size}, shape)


@fast
@given(sizes(3, 5), st.sampled_from([8, 64]), st.sampled_from([None, 4]))
def test_four_bits_of_bitsandbytes(shape: tuple[int, int], size: int, nested: int | None) -> None:
    check(quantised.nf4(size, nested), BNB, shape, 0 if nested is None else 2.0**-21)


@fast
@given(sizes(3, 5))
def test_eight_bits_of_bitsandbytes(shape: tuple[int, int]) -> None:
    check(quantised.rows, BNB, shape, 2.0**-22)


@fast
@given(sizes(1, 32), st.booleans())
def test_floats_of_four_bits(shape: tuple[int, int], nvidia: bool) -> None:
    check(quantised.fp4(nvidia), NVFP4 if nvidia else MXFP4, shape)


@fast
@given(st.integers(1, 8), st.integers(1, 70), st.integers(0, 99))
def test_integers_lie_in_words_without_gaps(bits: int, count: int, seed: int) -> None:
    fields = np.random.default_rng(seed).integers(0, 1 << bits, (2, count))
    found = unpack(torch.from_numpy(words(fields, bits)), bits)[:, :count]
    assert np.array_equal(found.numpy(), fields)


def test_weights_of_experts_with_scales_of_blocks(tmp_path: Path) -> None:
    """Three of them in one tensor, as transformers writes those of a mixture."""
    drawn = [quantised.fp8()(np.random.default_rng(k), (20, 30)) for k in range(3)]
    parts = {
        name: torch.stack(
            [
                part[name].view(torch.uint8 if name == "weight" else torch.float32)
                for part, _ in drawn
            ]
        )
        for name in drawn[0][0]
    }
    parts["weight"] = parts["weight"].view(torch.float8_e4m3fn)
    found = opened(tmp_path, parts, FP8).tensors["layer.weight"].read()
    expected = np.stack([meant for _, meant in drawn]).astype(np.float32)
    assert torch.equal(found, torch.from_numpy(expected))


def test_a_weight_is_read_when_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a checkpoint reads headers, not codes: a model need not fit in memory."""
    parts, _ = quantised.gptq()(np.random.default_rng(0), (32, 32))
    weights = opened(tmp_path, parts, {"quant_method": "gptq", "bits": 4, "group_size": 16})
    assert weights.float32_bytes == 4 * 32 * 32
    stored = weights.tensors["layer.weight"]
    monkeypatch.setattr("linexport.sources.packed.stored.StoredTensors.read", None)
    with pytest.raises(TypeError):
        stored.read()


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
NVFP4, MXFP4 = (
    {**scheme(4, type="float", group_size=size), "format": f"{name}-pack-quantized"}
    for name, size in (("nvfp4", 16), ("mxfp4", 32))
)
BAD: list[tuple[str, Writer, dict[str, Any], Any, str]] = [
    ("scales of GPTQ", quantised.gptq(), GPTQ, "scales", "without layer.scales, so"),
    ("zeros of GPTQ", quantised.gptq(), GPTQ, "qzeros", "without layer.qzeros, so"),
    ("a later GPTQ", quantised.gptq(), {**GPTQ, "checkpoint_format": "gptq_v3"}, None, "'gptq_v3'"),
    ("GPTQ of 5 bits", quantised.gptq(), {**GPTQ, "bits": 5}, None, "of 5 bits; read are"),
    ("GPTQ without bits", quantised.gptq(), {"quant_method": "gptq"}, None, "of None bits"),
    ("scales of AWQ", quantised.awq(), {"quant_method": "awq"}, "scales", "layer.scales, so"),
    (
        "AWQ of vectors",
        quantised.awq(),
        {"quant_method": "awq", "version": "gemv"},
        None,
        "'gemv'; expected 4 bits in 'gemm'",
    ),
    (
        "scales",
        quantised.compressed(),
        scheme(4, group_size=16),
        "weight_scale",
        "weight_scale, so",
    ),
    ("sizes", quantised.compressed(), scheme(4, group_size=16), "weight_shape", "weight_shape, so"),
    ("other bits", quantised.compressed(), scheme(8, group_size=16), None, "bits in config_groups"),
    (
        "packed in two of four",
        quantised.compressed(),
        {**scheme(4), "format": "marlin-24"},
        None,
        "in the format marlin-24; read are",
    ),
    (
        "Marlin's layout",
        quantised.gptq(),
        {**GPTQ, "is_marlin_format": True},
        None,
        "in the format 'marlin'; expected gptq, gptq_v2.*onvert it with GPTQModel",
    ),
    (
        "the scale of a whole weight",
        quantised.fp4(),
        NVFP4,
        "weight_global_scale",
        "without layer.weight_global_scale, so",
    ),
    ("scales of fp8", quantised.fp8(), FP8, "weight_scale_inv", "without layer.weight_scale_inv"),
    ("biases of MLX", quantised.mlx(), {"bits": 4, "group_size": 16}, "biases", "layer.biases, so"),
    (
        "another mode",
        quantised.mlx(),
        {"bits": 4, "group_size": 16, "mode": "mxfp4"},
        None,
        "mxfp4",
    ),
    ("scales of nf4", quantised.nf4(), BNB, "weight.absmax", "without layer.weight.absmax, so"),
    (
        "a state that is missing",
        quantised.nf4(),
        BNB,
        "weight.quant_state.bitsandbytes__nf4",
        "layer.weight of dtype U8, bitsandbytes has no such weights",
    ),
    ("an unknown method", quantised.awq(), {"quant_method": "aqlm"}, None, "by aqlm; those by awq"),
    ("no method", quantised.awq(), {"w": 4}, None, "by an unknown method"),
]


@pytest.mark.parametrize(
    ("write", "config", "lost", "match"), [b[1:] for b in BAD], ids=[b[0] for b in BAD]
)
def test_parts_that_are_missing_are_said_in_one_sentence(
    tmp_path: Path, write: Writer, config: dict[str, Any], lost: str | None, match: str
) -> None:
    parts, _ = write(np.random.default_rng(0), (32, 48))
    parts.pop(lost or "", None)
    with pytest.raises(UnsupportedModelError, match=match) as caught:
        opened(tmp_path, parts, config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("write", "config"),
    [
        (quantised.gptq(), GPTQ),
        (quantised.gptq(order="own"), GPTQ),
        (quantised.awq(), {"quant_method": "awq", "group_size": 16}),
        (quantised.compressed(symmetric=False), scheme(4, symmetric=False, group_size=16)),
        (quantised.fp8(), FP8),
        (quantised.mlx(), {"bits": 4, "group_size": 16}),
        (quantised.nf4(nested=4), BNB),
        (quantised.rows, BNB),
    ],
)
def test_tensors_of_wrong_sizes_are_refused(
    tmp_path: Path, write: Writer, config: dict[str, Any]
) -> None:
    """Each part in turn is cut to half of its rows."""
    parts, _ = write(np.random.default_rng(0), (32, 48))
    for name, part in parts.items():
        if part.ndim == 0:
            continue
        with pytest.raises(UnsupportedModelError):
            opened(tmp_path, {**parts, name: part[: len(part) // 2].contiguous()}, config)


def test_groups_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    parts, _ = quantised.gptq(order="own")(np.random.default_rng(0), (32, 48))
    parts["g_idx"] = parts["g_idx"] + 1
    with pytest.raises(UnsupportedModelError, match=r"names groups that layer\.scales has not"):
        opened(tmp_path, parts, GPTQ).tensors["layer.weight"].read()


def test_experts_and_norms_of_mlx_are_those_of_the_library(tmp_path: Path) -> None:
    """mlx-lm joins experts, adds 1 to the norms of Qwen and puts channels last."""
    generator = np.random.default_rng(0)
    drawn = [quantised.mlx()(generator, (8, 32)) for _ in range(3)]
    stem, plain = "model.layers.0.mlp.switch_mlp", torch.randn(3, 4, 8)
    tensors = {
        f"{stem}.up_proj.{end}": torch.stack([parts[end].view(kind) for parts, _ in drawn])
        for end, kind in (("weight", torch.int32), ("scales", torch.half), ("biases", torch.half))
    }
    tensors[f"{stem}.up_proj.weight"] = tensors[f"{stem}.up_proj.weight"].view(torch.uint32)
    tensors |= {
        f"{stem}.down_proj.weight": plain,
        "model.norm.weight": torch.full((4,), 1.5),
        "model.layers.0.linear_attn.norm.weight": torch.full((4,), 1.5),
        "model.layers.0.linear_attn.conv1d.weight": torch.arange(8.0).reshape(2, 4, 1),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "qwen3_next", "quantization": {"bits": 4, "group_size": 16}}
    found = read_weights(tmp_path, [tmp_path / "model.safetensors"], config).tensors
    experts = "model.layers.0.mlp.experts"
    for index, (_, meant) in enumerate(drawn):
        expected = torch.from_numpy(meant.astype(np.float32))
        assert torch.equal(found[f"{experts}.{index}.up_proj.weight"].read(), expected)
        assert torch.equal(found[f"{experts}.{index}.down_proj.weight"].read(), plain[index])
    assert found["model.norm.weight"].read().tolist() == [0.5] * 4
    assert found["model.layers.0.linear_attn.norm.weight"].read().tolist() == [1.5] * 4
    convolution = found["model.layers.0.linear_attn.conv1d.weight"]
    assert convolution.shape == tuple(convolution.read().shape) == (2, 1, 4)
    assert convolution.read()[1, 0].tolist() == [4, 5, 6, 7]


ODD: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.text(max_size=4) | st.just(float("nan")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=4,
)
"""Any value of JSON."""

SETTINGS = [
    (quantised.gptq(), GPTQ),
    (quantised.awq(), {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}),
    (quantised.compressed(), scheme(4, group_size=16)),
    (quantised.fp8(), FP8),
    (quantised.mlx(), {"bits": 4, "group_size": 16, "mode": "affine", "layer": None}),
]


@fast
@given(st.data(), st.sampled_from(SETTINGS))
def test_settings_of_any_kind_are_read_or_refused(
    data: st.DataObject, case: tuple[Writer, dict[str, Any]]
) -> None:
    write, config = case
    key = data.draw(st.sampled_from(sorted(config)))
    parts, _ = write(np.random.default_rng(0), (32, 48))
    with tempfile.TemporaryDirectory() as folder:
        try:
            weights = opened(Path(folder), parts, {**config, key: data.draw(ODD)})
        except UnsupportedModelError as error:
            assert "\n" not in str(error)
        else:
            assert "layer.weight" in weights.tensors


def test_every_format_has_what_the_reader_takes() -> None:
    for method, format in registered().items():
        assert method in format.METHODS
        assert format.TITLE
        assert isinstance(format.IGNORED, tuple)
