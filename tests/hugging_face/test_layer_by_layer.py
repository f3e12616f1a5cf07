"""``--proof layers``: each layer of a model beside the original's, and what is quantised of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import linexport
from linexport import parity
from linexport.artifact.temporary import open_written
from linexport.conversion import run as stages
from linexport.conversion.context import Job, TracedOriginal
from linexport.conversion.pipeline import job_of
from linexport.conversion.write_model import written
from linexport.errors import UnsupportedModelError, UsageError
from linexport.graph import external_data
from linexport.graph.segments import cut
from linexport.manifest import ConvertOptions, Manifest, read
from linexport.quantization import forecast
from linexport.sources import load_model
from linexport.system import room
from linexport.system.progress import Silent
from tests.support.command_line import Result
from tests.support.families import TINY

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILY = "qwen3_5_text"
LINEAR, SOFTMAX = "linear_attention", "full_attention"
DEEP = {"num_hidden_layers": 4, "layer_types": [LINEAR, LINEAR, SOFTMAX, SOFTMAX]}
"""Layers before the first softmax layer, and after it, may read how long its state is."""


class Written:
    """A model that was traced and written, with its original."""

    def __init__(self, source: Path, folder: Path) -> None:
        options = ConvertOptions(bench=False, threads=1)
        self.job: Job = job_of(source, folder, options, folder, Silent())
        loaded = load_model(source)
        self.original: TracedOriginal = stages._trace(self.job, loaded)
        self.manifest: Manifest = written(self.job, self.original, True, {}).manifest
        self.tested = stages._tested(self.job, self.manifest, self.original)
        self.values = parity.layer_values(self.tested, self.original.traced)
        self.graph, self.weights = external_data.read_mapped(self.job.model)

    def check(self, graph: onnx.ModelProto) -> parity.Parity:
        """Compare every layer of a graph."""
        outcome, _ = parity.check_layers(
            self.tested, self.values, graph, lambda part: open_written(part, self.weights, 1)
        )
        return outcome


@pytest.fixture(scope="module")
def model(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(model_folder(FAMILY, **DEEP), tmp_path_factory.mktemp("written"))


@pytest.mark.services
def test_every_layer_equals_that_of_the_original(model: Written) -> None:
    found = model.check(model.graph).record()
    assert found.passed and found.greedy is None
    names = [f"model.model.layers.{number}" for number in range(4)]
    assert [layer.name for layer in found.layers] == [*names, "after the last layer"]
    assert all(0 < (layer.max_relative_error or 0) < 5e-5 for layer in found.layers)
    assert found.lengths == (1, 64, 65, 150, 300)


@pytest.mark.services
def test_a_wrong_layer_is_named_and_the_others_pass(model: Written) -> None:
    """Each is run on the inputs of the original: an error of one is not that of the next."""
    graph = onnx.ModelProto()
    graph.CopyFrom(model.graph)
    states = {s.past: s.present for s in model.tested.states}
    first, second, *_ = (
        {t.name for t in part.model.graph.initializer if len(t.dims) == 2}
        for part in cut(graph, list(model.values.values()), states)
    )
    name = min(second - first)
    tensor = next(t for t in graph.graph.initializer if t.name == name)
    values = numpy_helper.to_array(tensor).copy()
    values.flat[0] += np.abs(values).max()
    tensor.CopyFrom(numpy_helper.from_array(values, name))
    found = model.check(graph).record()
    assert not found.passed
    assert [layer.passed for layer in found.layers] == [True, False, True, True, True]
    failed = {case.output for case in found.cases if not case.passed}
    assert failed == {"model.model.layers.1"}


@pytest.mark.services
def test_parts_of_a_graph_give_all_its_outputs(model: Written) -> None:
    states = {s.past: s.present for s in model.tested.states}
    parts = cut(model.graph, list(model.values.values()), states)
    assert {name for part in parts for name in part.outputs} == {
        o.name for o in model.graph.graph.output
    }
    assert [part.ends for part in parts] == [*model.values.values(), None]
    with pytest.raises(UnsupportedModelError, match="no value nowhere"):
        cut(model.graph, ["nowhere"], states)
    with pytest.raises(UnsupportedModelError, match="cannot be cut there"):
        cut(model.graph, list(model.values.values())[::-1], states)


@pytest.mark.services
def test_layers_are_chosen_where_memory_is_short_and_validate_finds_the_same(
    cli: Callable[..., Result],
    model_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The recorded divergence is from the float32 layers; validate's is from the original."""
    monkeypatch.setattr(forecast, "SMALL", 0)
    size = forecast.ModelSize(1, TINY[FAMILY]["vocab_size"])
    between = (forecast.memory(forecast.LAYERS, size) + forecast.memory(forecast.WHOLE, size)) // 2
    monkeypatch.setattr(room, "available_memory", lambda: between - room.held_memory())
    options = ("--weights", "int4", "--threads", "1", "--no-bench")
    result = cli("convert", model_folder(FAMILY), "-o", tmp_path / "q", *options)
    assert result.code == 0, result.err
    assert "Memory is short for a proof of the whole float32 model" in " ".join(result.err.split())
    assert "3 of 3 float32 layers, each by itself" in " ".join(result.out.split())
    manifest = read(tmp_path / "q")
    record = manifest.quantisation
    assert manifest.parity and len(manifest.parity.layers) == 3 and record and record.divergence
    assert manifest.streaming and manifest.streaming.passed
    assert record.reference == "the float32 layers" and record.divergence.tokens > 4096
    assert {t.method for t in record.tensors if t.bits == 4} == {"gptq"}
    assert "each layer was given what" in (tmp_path / "q" / "report.html").read_text()
    monkeypatch.undo()
    result = cli("validate", tmp_path / "q", "--threads", "1", "--record")
    assert result.code == 0, result.err
    again = read(tmp_path / "q")
    assert again.quantisation and again.quantisation.divergence and again.quantisation.drift
    assert again.quantisation.reference == "the original in PyTorch"
    assert again.quantisation.divergence.mean == pytest.approx(record.divergence.mean, rel=0.02)
    assert again.parity and again.parity.layers == manifest.parity.layers
    assert record.drift and set(record.drift.states) == {s.past for s in manifest.states} - {
        "past_mask"
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "auto"}, 'proof="layers" is not for weights="auto"'),
        ({"weights": "bf16"}, 'proof="layers" is not for weights="bf16"'),
        ({"weights": "int4", "target": "onnx"}, 'proof="layers" is not for target onnx'),
        ({"weights": "int4", "isolated": True}, 'proof="layers" is not for isolated=True'),
        ({}, "proof are for quantised weights"),
    ],
)
def test_what_cannot_be_proven_by_layers_is_refused_by_name(
    options: dict[str, Any], message: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        linexport.convert(model_folder(FAMILY), tmp_path / "q", proof="layers", **options)
    with pytest.raises(UsageError, match="proof is 'half'; expected whole or layers"):
        linexport.convert(model_folder(FAMILY), tmp_path / "q", proof="half", weights="int4")
    with pytest.raises(UsageError, match="is not a folder of a Hugging Face model"):
        linexport.convert(tmp_path, tmp_path / "q", proof="layers", weights="int4")
    assert not (tmp_path / "q").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(TINY))
def test_layers_of_every_family(
    family: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    model = Written(model_folder(family), tmp_path)
    found = model.check(model.graph).record()
    assert found.passed, [(c.output, c.max_relative_error) for c in found.cases if not c.passed]
