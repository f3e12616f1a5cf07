"""Engines of a model with gated delta layers, as transformers has it, built without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import linexport
from linexport.plugins.tensorrt.flavour import RTX


@pytest.mark.slow
def test_a_gated_delta_block_is_two_plugins(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Its convolution and its attention; the layer of softmax attention beside it has none."""
    if not RTX.installed:
        pytest.skip(f"TensorRT-RTX is not installed here: {RTX.install}")
    manifest = linexport.convert(
        model_folder("qwen3_5_text"),
        tmp_path / "engines",
        target="tensorrt-rtx",
        sms=(89, 120),
        dims=("seq=1:16:64",),
        bench=False,
        threads=1,
    )
    assert manifest.status == "ok"
    assert [engine.sm for engine in manifest.engines] == [89, 120]
    for engine in manifest.engines:
        assert [name.split("/")[-1] for name in sorted(engine.plugins)] == [
            "CausalConvWithState",
            "LinearAttention",
        ]
        kinds = [layer.type for layer in engine.layers]
        assert kinds.count("custom_layer") >= len(engine.plugins)
        assert engine.checked is None
