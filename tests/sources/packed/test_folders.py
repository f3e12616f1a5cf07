"""Folders in few bits: the model that is loaded has the weights that the stored numbers mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import linexport
from linexport.errors import UnsupportedModelError
from linexport.sources import load_model
from tests.support import quantised
from tests.support.quantised import quantise, scheme

pytestmark = pytest.mark.usefixtures("one_thread")

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 24]}
FORMATS: dict[str, tuple[Any, ...]] = {
    "gptq": (quantised.gptq(), GPTQ),
    "gptq-act-order": (quantised.gptq(order="own"), {**GPTQ, "desc_act": True}),
    "gptq-v2": (quantised.gptq(version=2), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq-8": (quantised.gptq(8), {**GPTQ, "bits": 8}),
    "awq": (quantised.awq(), {"quant_method": "awq", "bits": 4, "group_size": 16}),
    "packed-4": (quantised.compressed(), scheme(4, group_size=16)),
    "packed-8": (quantised.compressed(8, None), scheme(8, strategy="channel")),
    "packed-asymmetric": (
        quantised.compressed(symmetric=False),
        scheme(4, group_size=16, symmetric=False),
    ),
    "int-quantized": (
        quantised.eight_bits,
        scheme(8, strategy="channel") | {"format": "int-quantized"},
    ),
    "float-quantized": (
        quantised.fp8(None, "weight_scale"),
        scheme(8, type="float", strategy="tensor") | {"format": "float-quantized"},
    ),
    "fp8": (quantised.fp8(), BLOCKS),
    "mlx-4": (quantised.mlx(), {"bits": 4, "group_size": 16}, "quantization"),
    "mlx-8": (quantised.mlx(8), {"bits": 8, "group_size": 16, "mode": "affine"}, "quantization"),
    "nf4": (quantised.nf4(), BNB),
    "nf4-nested": (quantised.nf4(nested=8), BNB),
    "int8": (quantised.rows, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
ROUNDED = {"nf4-nested", "int8"}
"""Formats whose float32 numbers are rounded more than once."""


@pytest.fixture(params=FORMATS)
def folders(
    request: pytest.FixtureRequest, model_folder: Callable[..., Path], tmp_path: Path
) -> tuple[str, Path, Path]:
    """A format, a folder in it and the same in floats."""
    kind = "mamba2" if "mlx" in request.param else "falcon_h1"
    return request.param, *quantise(model_folder(kind), tmp_path, *FORMATS[request.param])


def test_the_model_has_the_numbers_that_are_stored(folders: tuple[str, Path, Path]) -> None:
    name, few, floats = folders
    found, expected = (load_model(folder).module.state_dict() for folder in (few, floats))
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        assert found[key].dtype == weight.dtype
        bound = 2.0**-22 if name in ROUNDED else 0.0
        torch.testing.assert_close(found[key], weight, rtol=bound, atol=0)


def test_such_a_folder_converts_and_equals_the_float_model(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    few, floats = quantise(model_folder("mamba2"), tmp_path, *FORMATS["gptq-act-order"])
    check_converted(few, floats, tmp_path / "artifact", "GPTQ")


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_converts(
    name: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    kind = "mamba2" if "mlx" in name else "falcon_h1"
    few, floats = quantise(model_folder(kind), tmp_path, *FORMATS[name])
    check_converted(few, floats, tmp_path / "artifact", "")


def check_converted(few: Path, floats: Path, place: Path, title: str) -> None:
    """Convert a folder, and compare its artifact with the model of the float numbers."""
    manifest = linexport.convert(few, place, bench=False, threads=1)
    assert f"read from weights in {title}" in manifest.source.description
    original = load_model(floats).module
    ids = torch.arange(2 * 9).reshape(2, 9) % 64
    expected = original(ids, torch.ones_like(ids)).detach()
    found = linexport.load(place, threads=1).run(ids.numpy())["logits"]
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-5)


def test_an_adapter_is_merged_into_a_model_of_four_bits(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """As after training with QLoRA: the adapter names a model whose weights are nf4."""
    found = quantise(model_folder("mamba2"), tmp_path, *FORMATS["nf4"])
    merged = []
    for base in found:
        settings = {"lora_alpha": 6, "r": 3, "peft_type": "LORA", "task_type": "CAUSAL_LM"}
        place = write_adapter(base, tmp_path / f"{base.name}-adapter", settings)
        merged.append(load_model(place).module.state_dict())
    for name, weight in merged[1].items():
        assert torch.equal(merged[0][name], weight)


def test_code_of_a_quantised_folder_is_not_used(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    few, _ = quantise(model_folder("falcon_h1"), tmp_path, *FORMATS["gptq"])
    config = json.loads((few / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "own.Own"}, "architectures": ["Own"]}
    (few / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"code is in the folder \(own\.Own\)"):
        load_model(few)
    with pytest.raises(UnsupportedModelError, match="quantised weights of a model whose code is"):
        load_model(few, trust_remote_code=True)


def write_adapter(base: Path, place: Path, settings: dict[str, Any]) -> Path:
    """Write an adapter of the projections of a Mamba2, the same one for every base."""
    torch.manual_seed(2)
    floats = load_file(base.parent / "floats" / "model.safetensors")
    factors: dict[str, torch.Tensor] = {}
    for name, weight in floats.items():
        if name.endswith("proj.weight"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            factors[f"{module}.lora_A.weight"] = torch.randn(3, weight.shape[1])
            factors[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], 3) / 9
    place.mkdir()
    save_file(factors, place / "adapter_model.safetensors")
    config = {**settings, "base_model_name_or_path": f"../{base.name}"}
    (place / "adapter_config.json").write_text(json.dumps(config))
    return place
