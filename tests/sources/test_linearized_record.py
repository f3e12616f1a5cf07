"""The softmax original of a linear form, in a checkpoint and in an exported program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from linexport import models
from linexport.manifest.records import SoftmaxOriginal
from linexport.models import checkpoint
from linexport.sources import load_model
from linexport.sources.linearized import NAME, as_json, original_in, original_of

ORIGINAL = SoftmaxOriginal("a model", "a processor", (64, 1024), (1.5, 20.0))


def test_a_checkpoint_keeps_it(tmp_path: Path) -> None:
    module = models.build("linear_attention_layer", {"num_heads": 2, "head_dim": 4})
    checkpoint.save(module, tmp_path / "with.pt", {NAME: as_json(ORIGINAL)})
    checkpoint.save(module, tmp_path / "without.pt")
    assert load_model(tmp_path / "with.pt", seed=0).source.linearized == ORIGINAL
    assert load_model(tmp_path / "without.pt", seed=0).source.linearized is None


def test_an_exported_program_keeps_it(tmp_path: Path) -> None:
    program = torch.export.export(nn.Linear(2, 2), (torch.randn(3, 2),))
    notes = {f"{NAME}.json": json.dumps(as_json(ORIGINAL))}
    torch.export.save(program, tmp_path / "with.pt2", extra_files=notes)
    torch.export.save(program, tmp_path / "without.pt2")
    assert load_model(tmp_path / "with.pt2", seed=0).source.linearized == ORIGINAL
    assert load_model(tmp_path / "without.pt2", seed=0).source.linearized is None


@pytest.mark.slow
def test_a_program_with_maps_is_loaded_by_a_process_that_has_none(tmp_path: Path) -> None:
    layer = {"num_heads": 2, "head_dim": 4, "feature_map": "taylor2"}
    module = models.build("linear_attention_layer", layer)
    program = torch.export.export(module, module.example_inputs(1, 5, 0))
    torch.export.save(program, tmp_path / "layer.pt2")
    code = "import sys; from linexport.sources import load_model as f; f(sys.argv[1], seed=0)"
    command = [sys.executable, "-c", code, str(tmp_path / "layer.pt2")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": [64]},
        {"lengths": [64, -1]},
        {"lengths": [64, True]},
        {"lengths": "64"},
        {"milliseconds": [1.0, float("nan")]},
        {"milliseconds": [1.0, 0.0]},
        {"milliseconds": None},
        {"cpu": 3},
        {"more": 1},
    ],
)
def test_a_damaged_record_is_none(change: dict[str, Any]) -> None:
    assert original_of(as_json(ORIGINAL)) == ORIGINAL
    assert original_of(as_json(ORIGINAL) | change) is None


@pytest.mark.parametrize("text", [None, "", "{", "[" * 100_000, "[]", b"\xff", "null"])
def test_a_text_that_is_no_record_is_none(text: str | bytes | None) -> None:
    assert original_in(text) is None
