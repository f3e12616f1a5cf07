"""Engines of the reference models, really built: their plugin layers, what is refused, rebuilding.

All have two heads of 20, so that they share kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from onnx import TensorProto

from linexport import passes, targets, trace
from linexport.errors import BuildError
from linexport.graph import dims as dimensions
from linexport.graph import states
from linexport.plugins.tensorrt.flavour import RTX
from linexport.sources import load_model
from linexport.targets import Options
from linexport.targets.lowering.choice import lower
from linexport.targets.trt import parser_form
from linexport.targets.trt.build import BuiltEngine, build_engine
from linexport.targets.trt.profiles import profiles

pytestmark = pytest.mark.services

ATTENTION, CONV, MAP = "LinearAttention", "CausalConvWithState", "FeatureMap"
EXPONENTIALS = "StabilizedExp"

LAYERS = {
    "layer": {ATTENTION},
    "bidirectional": {ATTENTION},
    "language_model": {
        f"blocks.{i}.{part}" for i in (0, 1) for part in (f"attention/{ATTENTION}", f"conv/{CONV}")
    },
    "digits": {f"blocks.{i}.attention/{ATTENTION}" for i in (0, 1)},
    "gated_delta": {f"blocks.0.attention/{ATTENTION}", f"blocks.0.conv/{CONV}"},
    "taylor": {ATTENTION},
    "random_features": {ATTENTION},
    "stabilised": {EXPONENTIALS, ATTENTION, f"feature_map/{MAP}", f"feature_map/{MAP}_2"},
}
"""Names of the layers that plugins run."""

SHARED = ("layer", "bidirectional", "language_model", "digits", "stabilised")


@pytest.fixture(scope="module")
def reference(rtx: Any) -> Callable[..., SimpleNamespace]:
    """``reference(name, precision)``: the lowered model and the profiles of its engine."""
    traced: dict[str, Any] = {}
    made: dict[Any, SimpleNamespace] = {}

    def get(name: str, precision: str = "fp32") -> SimpleNamespace:
        if name not in traced:
            found = trace.trace(load_model(f"reference_models:{name}"))
            traced[name] = found, passes.rewrite(found.model, passes.STAGES).model
        if (name, precision) not in made:
            found, rewritten = traced[name]
            target = targets.find_target("tensorrt-rtx")
            target = target.configure(target, Options(precision=precision, sms=(89, 120)))
            model, _ = lower(target.prepare(rewritten), target.candidates)
            dims = target.bound(dimensions.merge(found.dims, {}))
            chosen = profiles(dims, bool(states.find_states(model)))
            made[name, precision] = SimpleNamespace(model=model, profiles=chosen)
        return made[name, precision]

    return get


def built(found: SimpleNamespace, sm: int, model: onnx.ModelProto | None = None) -> BuiltEngine:
    one = parser_form.only(parser_form.parsable(model or found.model), sm)
    return build_engine(RTX, one, Path("model.onnx"), found.profiles, sm)


def check(engine: BuiltEngine, name: str) -> None:
    """The plugin layers are those named, none more, and the engine runs each by its plugin."""
    assert set(engine.plugins) == LAYERS[name] and len(engine.plugins) == len(LAYERS[name])
    run = [layer["name"] for layer in engine.layers if layer["type"] == "custom_layer"]
    for layer in LAYERS[name]:
        assert any(found.startswith(layer) for found in run), layer
    assert all(any(found.startswith(layer) for layer in LAYERS[name]) for found in run)


@pytest.mark.parametrize("sm", [89, 120])
@pytest.mark.parametrize("name", SHARED)
def test_engines_have_exactly_their_plugin_layers(
    reference: Callable[..., SimpleNamespace], name: str, sm: int
) -> None:
    check(built(reference(name), sm), name)


@pytest.mark.slow
@pytest.mark.parametrize("sm", [89, 120])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", LAYERS)
def test_engines_of_every_precision_have_them_too(
    reference: Callable[..., SimpleNamespace], name: str, precision: str, sm: int
) -> None:
    found = reference(name, precision)
    onnx.checker.check_model(found.model)
    targets.find_target("tensorrt-rtx").open(found.model.SerializeToString())
    check(built(found, sm), name)


@pytest.mark.parametrize("name", SHARED)
def test_rebuilding_gives_the_same_layers_and_memory(
    reference: Callable[..., SimpleNamespace], name: str
) -> None:
    first, second = (built(reference(name), 89) for _ in range(2))
    assert first.layers == second.layers and first.plugins == second.plugins
    assert first.layer_scratch == second.layer_scratch
    assert first.activations == second.activations
    assert abs(len(first.plan) - len(second.plan)) <= 4096


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("wrong", ["dtype", "shape"])
def test_inputs_of_another_dtype_or_shape_are_refused(
    reference: Callable[..., SimpleNamespace], name: str, wrong: str
) -> None:
    """In the first input that has a fixed width: a state, if the model holds one, else its own."""
    found, model = reference(name), onnx.ModelProto()
    model.CopyFrom(found.model)
    *_, value = sorted(model.graph.input, key=lambda i: i.name.startswith("past_state"))
    kind = value.type.tensor_type
    if wrong == "dtype":
        kind.elem_type = TensorProto.FLOAT16
    else:
        kind.shape.dim[len(kind.shape.dim) - 1].dim_value += 4
    with pytest.raises(BuildError, match=r"TensorRT-RTX .* cannot (parse|build)"):
        built(found, 89, model)
