"""``linexport plan`` of a model folder, beside the plan of the artifact that is made of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linexport
from linexport.planning import from_artifact, from_configuration
from linexport.planning.planned_model import PlannedModel
from linexport.planning.weights import KINDS, bytes_read, size

Converted = Callable[[str], tuple[Path, Any]]


def compare(before: PlannedModel, after: PlannedModel) -> None:
    """Sizes in every kind of weights, what a step reads, and states."""
    for kind in KINDS:  # of weights this small, a gate in float32 is a part of all
        assert size(before.weights, kind) == pytest.approx(size(after.weights, kind), rel=0.1)
        read = [bytes_read(model.weights, kind, 1) for model in (before, after)]
        assert read[0] == pytest.approx(read[1], rel=0.1)
    assert before.token_bytes == pytest.approx(after.token_bytes, abs=8)  # a mask of 8 bytes
    # transformers keeps as many columns of a convolution as it has taps, and linexport one less.
    assert after.state_bytes <= before.state_bytes <= 1.5 * after.state_bytes


@pytest.mark.parametrize(
    "model_type",
    ["lfm2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3_next", "jamba"))],
)
def test_a_folder_is_planned_as_its_artifact(
    model_type: str, model_folder: Callable[..., Path], converted_family: Converted, tmp_path: Path
) -> None:
    """From the configuration alone: there are no weights beside it."""
    shutil.copyfile(model_folder(model_type) / "config.json", tmp_path / "config.json")
    artifact, _ = converted_family(model_type)
    after = from_artifact.planned(artifact)
    compare(from_configuration.planned(tmp_path), after)
    stream = linexport.load(artifact, threads=1).stream()
    tokens = 11
    stream.step({"input_ids": np.zeros((1, tokens), np.int64)})
    held = sum(array.nbytes for array in stream.state().arrays.values())
    assert held == after.state_bytes + tokens * after.token_bytes


def test_layouts_of_other_libraries_are_refused(tmp_path: Path, cli: Callable[..., Any]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "rwkv7"}')
    done = cli("plan", tmp_path, "--device", "l4", "--context", 100)
    assert done.code == 4 and "plan with the artifact" in done.err
    (tmp_path / "config.json").write_text('{"model_type": "bert_of_nobody"}')
    done = cli("plan", tmp_path, "--device", "l4", "--context", 100)
    assert done.code == 4 and "bert_of_nobody" in done.err
