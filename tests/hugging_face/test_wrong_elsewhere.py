"""What other exporters get wrong without an error, and linexport right on the same model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime as ort
import pytest
import torch

import linexport
from linexport.parity.tolerances import TOLERANCES
from linexport.sources import load_model

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_epsilon_that_an_optimiser_drops(
    factories: SimpleNamespace, converted: Callable[..., Path]
) -> None:
    """torch.onnx.export's default optimiser takes x + 1e-15 for x, and 0 / 0 is no number."""
    loaded = load_model(factories.source("epsilon"))
    exported = torch.onnx.export(loaded.module, loaded.args, dynamo=True, verbose=False)
    assert exported is not None
    session = ort.InferenceSession(
        exported.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    x = -np.ones((2, 16, 8), np.float32)
    x[0, 0] = 0
    with torch.no_grad():
        expected = loaded.module(torch.from_numpy(x)).numpy()
    theirs = session.run(None, {session.get_inputs()[0].name: x})[0]
    ours = linexport.load(converted("epsilon"), threads=1).run(x)["output"]
    assert not np.isfinite(theirs).all()
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


@pytest.mark.slow
def test_the_chunks_that_an_exporter_counts_while_tracing(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """transformers' exporter, asked for a dynamic length, keeps the one chunk of its example.

    The library's gated delta rule loops over chunks of 64 tokens in Python. Its graph runs at other
    lengths without an error, and every token after the 64th is wrong.
    """
    from transformers import AutoModelForCausalLM
    from transformers.exporters import OnnxExporter
    from transformers.exporters.configs import OnnxConfig

    one_layer = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    folder = model_folder("qwen3_5_text", **one_layer)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    axes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    with torch.no_grad():
        exported = OnnxExporter().export(
            model,
            {"input_ids": torch.zeros(2, 16, dtype=torch.int64), "use_cache": False},
            config=OnnxConfig(dynamic=True, dynamic_shapes={"input_ids": axes}, optimize=False),
        )
    exported.save_pretrained(tmp_path / "theirs")
    (file,) = (tmp_path / "theirs").rglob("*.onnx")
    theirs = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    artifact = tmp_path / "artifact"
    assert linexport.convert(folder, artifact, bench=False, threads=1).status == "ok"
    tokens = np.random.default_rng(0).integers(64, size=(1, 100))
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens), use_cache=False).logits.numpy()
    near = TOLERANCES["float32"].relative * np.abs(expected).max()
    found = theirs.run(None, {theirs.get_inputs()[0].name: tokens})[0]
    ours = linexport.load(artifact, threads=1).run(tokens)["logits"]
    assert np.abs(found - expected)[:, :64].max() <= near
    assert np.abs(found - expected)[:, 64:].max() > 0.1 * expected.std()
    assert np.abs(ours - expected).max() <= near
