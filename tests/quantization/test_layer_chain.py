"""Layers one after another: where a graph is cut, what they give, and weights chosen by them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from linexport.artifact.checked import checked_artifact
from linexport.artifact.text.language_interface import LanguageInterface
from linexport.graph.bottlenecks import bottlenecks
from linexport.graph.outputs import with_outputs
from linexport.manifest import MODEL
from linexport.quantization.by_target import FORMS
from linexport.quantization.calibration_inputs import inputs_of
from linexport.quantization.choose_bits import Chosen, Quantiser
from linexport.quantization.layer_chain import LayerChain
from linexport.quantization.opened import FloatModel, unopened
from linexport.quantization.sensitivity import stored

LANGUAGE = LanguageInterface("tokens", "output", 256)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(converted: Callable[..., Path]) -> FloatModel:
    folder = converted("language_model")
    return FloatModel.of(unopened(checked_artifact(folder), 1), folder / MODEL, 1)


def cuts(model: FloatModel, quantiser: Quantiser) -> list[str]:
    weights = {use.weight for weight in quantiser.weights for use in weight.uses}
    return bottlenecks(model.graph, weights, "seq")


def test_a_graph_is_cut_at_its_residual_stream(model: FloatModel) -> None:
    found = cuts(model, Quantiser(model, FORMS["ort"]))
    made = {name: node for node in model.graph.graph.node for name in node.output}
    assert [made[name].op_type for name in found] == ["Gather", *["Add"] * 4]


def test_layers_give_what_the_whole_model_gives(model: FloatModel) -> None:
    quantiser = Quantiser(model, FORMS["ort"])
    ids = np.random.default_rng(0).integers(0, 256, 700)
    chain = LayerChain(model, LANGUAGE, cuts(model, quantiser), [ids[:600]], [ids])
    inputs = {w.activations[0] for w in quantiser.weights if w.activations}
    whole = model.run(with_outputs(model.graph, inputs))(model.artifact.feeds(ids[None, :600]))
    seen = set()
    for index in range(len(chain.segments)):
        names = sorted(inputs & chain.computes(index))
        parts = list(chain.values(index, names)) if names else []
        for name in names:
            got = np.concatenate([part[name] for part in parts], 1)
            np.testing.assert_allclose(got, whole[name], rtol=0, atol=2e-5)
        seen.update(names)
        chain.leave(index)
    assert seen == inputs
    got = np.concatenate([part["output"] for part in chain.outputs(chain._compared[0])], 1)
    expected = model.artifact.run_graph(model.artifact.feeds(ids[None]))["output"]
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_values_follow_from_those_that_were_measured(model: FloatModel) -> None:
    """One after another as all at once; weights before a known value no longer count."""
    quantiser = Quantiser(model, FORMS["ort"])
    ids = np.random.default_rng(1).integers(0, 256, 700)
    values = cuts(model, quantiser)
    once, turns = (LayerChain(model, LANGUAGE, values, [ids, ids[:90]]) for _ in range(2))
    read: dict[str, list[str]] = {}
    for weight in quantiser.weights:
        for name in weight.activations[:1]:
            read.setdefault(name, []).extend(use.weight for use in weight.uses)
    skipped = 0
    for index in range(len(once.segments)):
        names = [name for name in read if name in once.computes(index)]
        want = once.values(index, names)
        for name in names:
            found = turns.values(index, [name])
            assert [piece[name].shape[1] for piece in found] == [512, 188, 90]
            for a, b in zip(want, found, strict=True):
                np.testing.assert_allclose(b[name], a[name], rtol=0, atol=2e-5)
        before = [weight for name in names[:-1] for weight in read[name]]
        turns.replace({weight: np.zeros_like(model.values[weight]) for weight in before})
        skipped += len(before)
        once.leave(index)
        turns.leave(index)
    assert skipped


def test_weights_make_up_for_errors_of_those_before(model: FloatModel) -> None:
    """Beside weights chosen for exact inputs, on text that neither has seen."""
    inputs = inputs_of(model.artifact, None, 0)
    assert inputs.windows is not None
    calibration = inputs.windows.calibration[:16]

    def error(chosen: list[Chosen]) -> float:
        changed = dict(model.values)
        for c in chosen:
            changed |= stored(c.weight, c.quantised.matrix(), model.values)
        tried = FloatModel(model.artifact, model.graph, changed, 1)
        runs = [m.run(with_outputs(m.graph, ["output"])) for m in (model, tried)]
        feeds = [model.artifact.feeds(ids[None]) for ids in inputs.windows.compared[:6]]
        return sum(float(((runs[0](x)["output"] - runs[1](x)["output"]) ** 2).sum()) for x in feeds)

    alone, together = Quantiser(model, FORMS["ort"]), Quantiser(model, FORMS["ort"])
    alone.calibrate([model.artifact.feeds(ids[None]) for ids in calibration])
    values = cuts(model, together)
    exact, made = (LayerChain(model, LANGUAGE, values, calibration) for _ in range(2))
    told: list[int] = []
    found = together.by_layers(exact, made, 4, lambda done, _: told.append(done))
    assert told == sorted(set(told)) and told[-1] == len(found)
    assert {c.method for c in found if not c.weight.is_table} == {"gptq"}
    assert error(found) < 0.9 * error(alone.uniform(4))
