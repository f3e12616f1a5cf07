"""Experts that ONNX Runtime's kernel does not have, quantised in models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from onnx import numpy_helper

import linexport
from linexport.artifact.temporary import open_written
from linexport.quantization.block_quantisation import Grid, nearest
from linexport.quantization.choose_bits import Chosen
from linexport.quantization.experts import find_experts
from linexport.quantization.quantisable import floating_weights
from linexport.quantization.rewrite import float_activations, quantised_model

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]


def dequantised(stored: dict[str, np.ndarray], name: str, experts: int, inputs: int) -> np.ndarray:
    """Return a weight (E, F, K) from its 4-bit values in the file, float64."""
    matrices = []
    for expert in range(experts):
        values, scales, zeros = (
            stored[f"{name}/{expert}/{part}"] for part in ("values", "scales", "zeros")
        )
        q = np.stack([values & 15, values >> 4], -1).reshape(*values.shape[:2], -1)
        z = np.stack([zeros & 15, zeros >> 4], -1).reshape(len(zeros), -1)[:, : scales.shape[1]]
        matrix = (q.astype(np.float64) - z[..., None]) * scales[..., None].astype(np.float64)
        matrices.append(matrix.reshape(len(matrix), -1)[:, :inputs])
    return np.stack(matrices)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("nemotron_h", {}),
        pytest.param("granitemoehybrid", {"hidden_act": "gelu"}, marks=pytest.mark.slow),
    ],
)
def test_a_model_with_quantised_experts_is_transformers_with_their_values(
    family: str, changes: dict[str, Any], model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """relu2, and gated GELU; all other weights are float32."""
    source = model_folder(family, **changes)
    linexport.convert(source, tmp_path / "exact", bench=False, threads=1)
    exact = onnx.load_model(str(tmp_path / "exact" / "model.onnx"))
    values = {t.name: numpy_helper.to_array(t) for t in floating_weights(exact)}
    made = {
        w.name: Chosen(w, nearest(w.matrix(values[w.name]), Grid(4, w.block)), "nearest")
        for w in find_experts(exact, values)[0]
    }
    quantised = float_activations(quantised_model(exact, made))
    stored = {t.name: numpy_helper.to_array(t) for t in quantised.graph.initializer}
    hub: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    hub.set_experts_implementation("eager")
    parameters = {f"model.{name}": value for name, value in hub.named_parameters()}
    for name in made:
        weight = parameters[name].data
        matrices = torch.from_numpy(dequantised(stored, name, len(weight), weight.shape[-1]))
        assert 1e-3 < (matrices - weight).abs().max() / weight.abs().max() < 0.2
        weight.copy_(matrices)
    ids = np.random.default_rng(0).integers(3, 60, (2, 40))
    feeds = linexport.load(tmp_path / "exact", threads=1).feeds(ids)
    got = open_written(quantised, {}, 1)(feeds)["logits"]
    with torch.no_grad():
        expected = hub(torch.from_numpy(ids), use_cache=False).logits.numpy()
    np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())

    manifest = linexport.quantize(tmp_path / "exact", tmp_path / "q", weights="int4", threads=1)
    record = manifest.quantisation
    assert record and record.passed and record.drift and record.drift.streaming < 5e-5
    own = {t.name: t for t in record.tensors if t.name in made}
    assert own.keys() == made.keys() and not {k.name for k in record.kept} & made.keys()
    file = onnx.load_model(str(tmp_path / "q" / "model.onnx")).graph
    for name, tensor in own.items():
        parts = [t for t in file.initializer if t.name.startswith(f"{name}/")]
        assert tensor.bits == 4
        assert tensor.bytes == sum(numpy_helper.to_array(t).nbytes for t in parts)
        assert name not in {t.name for t in file.initializer}
