"""Public models by their shape: sizes that are published, and a conversion with real words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]

MILLIONS = {
    "qwen3.5-0.8b": 752,
    "lfm2-1.2b": 1170,
    "granite-4-h-350m": 340,
    "mamba2-370m": 368,
    "rwkv7-0.4b": 451,
}
"""Published numbers of weights; a tied one counts once."""


@pytest.fixture(scope="module")
def shapes() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        import real_shapes

        yield real_shapes
    sys.modules.pop("real_shapes")


def parameters(shape: Any, layers: int) -> int:
    """Return the number of weights of a model that has none in memory."""
    import torch

    configuration = shape.of(layers)
    with torch.device("meta"):
        if shape.model_type == "rwkv7":
            from linexport.models.flash_linear_attention import build

            model: Any = build({"model_type": "rwkv7", **configuration})
        else:
            transformers = pytest.importorskip("transformers", reason="needs the hf extra")
            parsed = transformers.AutoConfig.for_model(shape.model_type, **configuration)
            model = transformers.AutoModelForCausalLM.from_config(parsed)
            model.tie_weights()
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", MILLIONS)
def test_a_shape_has_the_weights_that_are_published(shapes: Any, name: str) -> None:
    shape = shapes.SHAPES[name]
    assert parameters(shape, shape.layers) == pytest.approx(1e6 * MILLIONS[name], rel=0.02)


def test_options_name_a_shape_and_its_first_layers(shapes: Any) -> None:
    import argparse

    options = argparse.ArgumentParser()
    options.add_argument("--layers", type=int)
    shapes.add_options(options)
    assert shapes.chosen(options.parse_args([])) is None
    whole = shapes.chosen(options.parse_args(["--shape", "kimi-like"]))
    assert whole.layers == 12 and shapes.Chosen.parse(str(whole)) == whole
    part = shapes.chosen(options.parse_args(["--shape", "lfm2-1.2b", "--layers", "3"]))
    assert part.shape.of(part.layers)["layer_types"] == ["conv", "conv", "full_attention"]
    with pytest.raises(SystemExit):
        options.parse_args(["--shape", "unknown"])


@pytest.mark.slow
def test_a_model_of_151_936_words_is_converted_and_proven(shapes: Any, tmp_path: Path) -> None:
    """Two layers, with the words of Qwen3; the head is most of the model. Two minutes of a core."""
    pytest.importorskip("transformers", reason="needs the hf extra")
    import linexport

    words = 151_936
    shapes.Chosen("qwen3.5-0.8b", 2).save(tmp_path / "model", words)
    found = linexport.convert(tmp_path / "model", tmp_path / "artifact", bench=False, threads=1)
    head = found.parity.head
    assert found.status == "ok" and head is not None and head.passed
    assert head.positions >= 400 and head.bound < 5e-5
    assert found.parity.greedy.passed and found.streaming.passed
    logits = linexport.load(tmp_path / "artifact", threads=1).run(np.array([[3, words - 1]]))
    assert logits["logits"].shape == (1, 2, words)
