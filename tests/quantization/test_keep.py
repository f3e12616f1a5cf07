"""Checkpoints in few bits, converted with their own integers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file

import linexport
from linexport.errors import UsageError
from linexport.graph import external_data
from linexport.manifest import Manifest
from linexport.quantization.opened import open_exactly
from linexport.report.quantisation import numbers, summary
from linexport.sources import load_model
from tests.sources.packed.test_folders import FORMATS
from tests.support import quantised
from tests.support.quantised import Written, quantise

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

IDS = torch.arange(2 * 9).reshape(2, 9) % 64


def kept(few: Path, place: Path, **options: Any) -> Manifest:
    """Convert a folder with its own integers."""
    return linexport.convert(few, place, weights="keep", bench=False, threads=1, **options)


def initializers(artifact: Path) -> dict[str, np.ndarray]:
    """Return all initializers of an artifact."""
    model, external = external_data.read_mapped(artifact / "model.onnx")
    own = {t.name: t for t in model.graph.initializer}
    return {n: external[n] if n in external else numpy_helper.to_array(t) for n, t in own.items()}


def stems(manifest: Manifest) -> dict[str, str]:
    """Return the kept weights, by the names that the checkpoint has for them without an ending."""
    record = manifest.quantisation
    assert record is not None and record.checkpoint is not None
    names = [tensor.name for tensor in record.tensors]
    assert record.checkpoint.matrices == len(names) > 0
    return {n.removeprefix("model.").removesuffix(".weight.T"): n for n in names}


def check_outputs(artifact: Path, floats: Path) -> None:
    """Compare an artifact with the model of the numbers that the checkpoint means."""
    with torch.no_grad():
        expected = load_model(floats).module(IDS, torch.ones_like(IDS)).numpy()
    opened = linexport.load(artifact, threads=1)
    found = opened.run(IDS.numpy())["logits"]
    rounded = np.abs(found - expected).max() / np.abs(expected).max()
    assert rounded < 0.02  # of activations in 8 bits
    exactly = open_exactly(artifact / "model.onnx", 1)(opened.feeds(IDS.numpy()))["logits"]
    np.testing.assert_allclose(exactly, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gptq", "packed-4"])
def test_integers_and_scales_are_those_of_the_checkpoint_byte_for_byte(
    name: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Both formats store the integers of a row one after another, lowest bits first, as here."""
    few, floats = quantise(model_folder("falcon_h1"), tmp_path, *FORMATS[name])
    manifest = kept(few, tmp_path / "artifact")
    assert manifest.status == "ok"
    stored, found = load_file(few / "model.safetensors"), initializers(tmp_path / "artifact")
    for stem, weight in stems(manifest).items():
        words, scales = (
            (stored[f"{stem}.qweight"].T, stored[f"{stem}.scales"].T)
            if name == "gptq"
            else (stored[f"{stem}.weight_packed"], stored[f"{stem}.weight_scale"])
        )
        assert found[f"{weight}/values"].tobytes() == words.contiguous().numpy().tobytes()
        np.testing.assert_array_equal(found[f"{weight}/scales"], scales.float().numpy())
        if name == "gptq":  # zero points are stored lower by one, without a borrow
            zeros = stored[f"{stem}.qzeros"].numpy().view(np.uint32) + np.uint32(0x11111111)
            fields = (zeros[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
            rows = fields.reshape(len(zeros), -1).T
            even = np.pad(rows, ((0, 0), (0, rows.shape[1] % 2)))
            packed = even[:, 0::2] | even[:, 1::2] << 4
            np.testing.assert_array_equal(found[f"{weight}/zeros"], packed)
        else:
            assert f"{weight}/zeros" not in found  # they are the middle, which is not stored
    check_outputs(tmp_path / "artifact", floats)
    record = manifest.quantisation
    assert record is not None
    title = FORMATS[name][1]["quant_method"]
    assert f"weights as the checkpoint has them ({record.checkpoint.format})" in summary(record)
    assert record.checkpoint.format.lower() == title
    table = numbers(record)
    assert table is not None and "each equal to the float32 weights" in str(table)


def test_integers_of_experts_are_kept(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """A checkpoint has each expert by itself; here they are stacked, gates and values in turns."""
    few, floats = quantise(model_folder("qwen3_next"), tmp_path, *FORMATS["packed-4"])
    manifest = kept(few, tmp_path / "artifact")
    stored, found = load_file(few / "model.safetensors"), initializers(tmp_path / "artifact")
    experts = "model.layers.1.mlp.experts"
    gates, ups, downs = (
        np.stack([stored[f"{experts}.{e}.{part}_proj.weight_packed"].numpy() for e in range(4)])
        for part in ("gate", "up", "down")
    )
    up = np.stack([gates, ups], 2).reshape(4, -1, gates.shape[-1])
    for name, expected in (("gate_up_proj", up), ("down_proj", downs)):
        values = found[f"model.{experts}.{name}/values"]
        np.testing.assert_array_equal(values, expected.view(np.uint8))
    assert manifest.status == "ok"
    check_outputs(tmp_path / "artifact", floats)


def test_a_model_that_is_proven_by_layers_keeps_its_integers(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    few, floats = quantise(model_folder("qwen3_next"), tmp_path, *FORMATS["gptq"])
    manifest = kept(few, tmp_path / "artifact", proof="layers")
    record = manifest.quantisation
    assert manifest.status == "ok" and record is not None and record.checkpoint is not None
    assert record.reference == "the float32 layers" and record.checkpoint.matrices == 11
    assert record.divergence is not None and record.divergence.mean < 1e-4
    check_outputs(tmp_path / "artifact", floats)


@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_groups_in_another_order_are_kept_and_inputs_gathered(
    target: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """All products of one value read one Gather of it."""
    write = quantised.gptq(order="shared")
    settings = FORMATS["gptq-act-order"][1]
    few, floats = quantise(model_folder("falcon_h1"), tmp_path, write, settings)
    manifest = kept(few, tmp_path / "artifact", target=target)
    stored = load_file(few / "model.safetensors")
    assert all(f"{stem}.g_idx" in stored for stem in stems(manifest))
    assert len(stems(manifest)) == 12
    check_outputs(tmp_path / "artifact", floats)
    model = onnx.load(tmp_path / "artifact" / "model.onnx", load_external_data=False)
    gathers = [n for n in model.graph.node if any("input_order/" in name for name in n.input[1:])]
    values = {n.input[0] for n in gathers}
    assert len(values) == len(gathers)
    read = {n.output[0] for n in gathers}
    products = [n for n in model.graph.node if n.op_type in ("MatMulNBits", "MatMul")]
    assert sum(n.input[0] in read for n in products) == 12 > len(gathers)
    assert sum("input_order/" in t.name for t in model.graph.initializer) == len(
        {int(w.shape[0]) for name, w in stored.items() if name.endswith("g_idx")}
    )


def test_experts_in_another_order_are_left_in_float32_with_a_reason(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    write = quantised.gptq(order="shared")
    settings = FORMATS["gptq-act-order"][1]
    few, floats = quantise(model_folder("qwen3_next"), tmp_path, write, settings)
    manifest = kept(few, tmp_path / "artifact")
    assert manifest.quantisation is not None
    reasons = {one.name: one.reason for one in manifest.quantisation.kept}
    assert "neither those of experts" in reasons["model.model.layers.1.mlp.experts.gate_up_proj"]
    check_outputs(tmp_path / "artifact", floats)


def test_weights_that_cannot_be_kept_are_left_in_float32_with_a_reason(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Half of the weights have groups that no blocks hold."""
    turn = iter(range(99))

    def write(generator: np.random.Generator, shape: tuple[int, int]) -> Written:
        return quantised.gptq(size=16 if next(turn) % 2 else 8)(generator, shape)

    settings = {**FORMATS["gptq"][1], "group_size": -1}
    few, floats = quantise(model_folder("mamba2"), tmp_path, write, settings)
    manifest = kept(few, tmp_path / "artifact", target="onnx")
    found = initializers(tmp_path / "artifact")
    record = manifest.quantisation
    assert record is not None
    reasons = {one.name: one.reason for one in record.kept}
    assert any("end inside of blocks of 16" in reason for reason in reasons.values())
    assert any("the checkpoint has it in floats" in reason for reason in reasons.values())
    assert all(found[name].dtype == np.float32 for name in reasons)
    check_outputs(tmp_path / "artifact", floats)


def test_an_adapter_that_changes_weights_leaves_these_in_float32(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    from tests.sources.packed.test_folders import write_adapter

    few, _ = quantise(model_folder("mamba2"), tmp_path, *FORMATS["packed-4"])
    settings = {"lora_alpha": 6, "r": 3, "peft_type": "LORA", "task_type": "CAUSAL_LM"}
    place = write_adapter(few, tmp_path / "adapter", settings)
    with pytest.raises(linexport.errors.UnsupportedModelError, match="or an adapter does"):
        kept(place, tmp_path / "artifact")
    assert not (tmp_path / "artifact").exists()


def test_a_float_checkpoint_has_no_integers_to_keep(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    said = r'weights="keep" stores the integers of a quantised checkpoint, and .* has none'
    with pytest.raises(UsageError, match=said):
        kept(model_folder("falcon_h1"), tmp_path / "artifact")
    with pytest.raises(UsageError, match=said):
        linexport.convert(
            torch.nn.Linear(9, 4), tmp_path / "a", args=(IDS.float(),), weights="keep"
        )


def test_floats_are_refused_without_being_read(
    model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint may be large, and its headers say that it has no integers."""

    def read(*_: object) -> torch.Tensor:
        raise OSError("it was read")

    monkeypatch.setattr("linexport.sources.packed.stored.StoredTensors.read", read)
    with pytest.raises(UsageError, match="all of its weights are floats"):
        kept(model_folder("falcon_h1"), tmp_path / "artifact")


def test_an_artifact_has_no_integers_to_keep(exact: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Pass it to linexport convert with the checkpoint"):
        linexport.quantize(exact, tmp_path / "q", weights="keep")


def test_an_isolated_conversion_keeps_none(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    few, _ = quantise(model_folder("falcon_h1"), tmp_path, *FORMATS["gptq"])
    with pytest.raises(UsageError, match="outside of the process of"):
        kept(few, tmp_path / "artifact", isolated=True)


def test_integers_of_an_artifact_are_valid_onnx(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    few, _ = quantise(model_folder("mamba2"), tmp_path, *FORMATS["packed-8"])
    manifest = kept(few, tmp_path / "artifact")
    onnx.checker.check_model(str(tmp_path / "artifact" / "model.onnx"))
    checked = linexport.validate(tmp_path / "artifact", threads=1)
    assert checked.status == manifest.status == "ok"
    assert checked.quantisation is not None and manifest.quantisation is not None
    assert checked.quantisation.checkpoint == manifest.quantisation.checkpoint


EXACT = ("gptq", "gptq-v2", "gptq-8", "awq", "packed-4", "packed-8", "packed-asymmetric")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EXACT, "int-quantized", "int8"])
def test_every_format_of_integers_is_kept(
    name: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    few, floats = quantise(model_folder("falcon_h1"), tmp_path, *FORMATS[name])
    manifest = kept(few, tmp_path / "artifact")
    assert manifest.status == "ok" and len(stems(manifest)) == 12
    check_outputs(tmp_path / "artifact", floats)
