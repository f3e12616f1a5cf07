"""The models that every runtime is tried with, each made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import linexport
from tests.support.families import TINY, save_model


def _convert(source: str, output: Path, dims: tuple[str, ...] = ()) -> str:
    linexport.convert(source, output, target="onnx", bench=False, threads=1, dims=dims)
    return source


def _hugging_face(family: str, output: Path) -> str:
    folder = output.with_name("checkpoint")
    save_model(TINY[family], family, folder)
    return _convert(str(folder), output)


MODELS: dict[str, Callable[[Path], str]] = {
    "linear": partial(_convert, "reference_models:linear_rule"),
    "gated": partial(_convert, "reference_models:gated_rule"),
    "delta": partial(_convert, "reference_models:delta_rule"),
    "gated delta": partial(_convert, "reference_models:gated_delta"),
    "bidirectional": partial(_convert, "reference_models:bidirectional"),
    "EfficientViT": partial(
        _convert, "zoo:efficientvit", dims=("dim_2=33:64:96", "dim_3=33:64:96")
    ),
    "Qwen3.5": partial(_hugging_face, "qwen3_5_text"),
}
"""Title of each, and what writes its portable artifact and returns its source."""
