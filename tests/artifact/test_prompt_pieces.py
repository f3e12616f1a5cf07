"""What a call of a prompt takes is known for every layout of its tokens, and cuts it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linexport
from linexport.artifact.text import prompt_pieces
from linexport.manifest import MODEL
from linexport.serving.call_memory import CallMemory
from linexport.sources.onnx_file.skeleton import skeleton

pytestmark = pytest.mark.usefixtures("one_thread")

LAYOUTS: dict[str, dict[str, Any]] = {
    "rows": {},
    "packed": {"target": "ort-cuda", "packed_batches": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_prompts_are_cut(
    converted: Callable[..., Path],
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = linexport.load(converted("language_model", **LAYOUTS[layout]), threads=1)
    prompt = np.random.default_rng(0).integers(0, 256, 1500)
    whole, pieces = list(model.generate(prompt, max_tokens=4)), model._pieces
    assert pieces.bytes(512, 1, 0) > 4 * pieces.bytes(64, 1, 0)
    assert pieces.bytes(64, 8, 0) > 4 * pieces.bytes(64, 1, 0)
    monkeypatch.setattr(prompt_pieces, "LARGEST", pieces.bytes(256, 1, 0))
    with caplog.at_level(logging.INFO, prompt_pieces.__name__):
        assert list(model.generate(prompt, max_tokens=4)) == whole
    assert "The prompt of 1,500 tokens is computed 256 at a time" in caplog.text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_server_counts_every_token_of_a_call(converted: Callable[..., Path], layout: str) -> None:
    folder = converted("language_model", **LAYOUTS[layout])
    memory = CallMemory.of_model(linexport.load(folder).manifest, skeleton(folder / MODEL))
    assert memory.row(512) > 4 * memory.row(64)
