"""Linear attention is found however it is spelled; what is none stays byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import pytest
import torch

from linexport import passes
from linexport.graph import states
from linexport.match.search import matcher
from linexport.plugins.ops.registry import attach_functions
from tests.support import packed
from tests.support.outcomes import HALF
from tests.support.work import MOST, finished, times_as_long

Export = Callable[[str], tuple[Any, onnx.ModelProto]]
Rewrite = Callable[[str], passes.Rewritten]

FUSED = ("canonicalise", "fuse")


def run(model: onnx.ModelProto, x: np.ndarray, **state: np.ndarray) -> dict[str, np.ndarray]:
    """The model with portable function bodies in ONNX Runtime."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    attach_functions(copy)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        copy.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [i.name for i in session.get_inputs() if i.name not in state]
    outputs = session.run(None, {names[0]: x, **state})
    return dict(zip([o.name for o in session.get_outputs()], outputs, strict=True))


def lengths(name: str) -> tuple[int, ...]:
    return (16, 48, 128) if name == "chunks_of_a_multiple" else (1, 7, 130)


def check(name: str, export: Export, rewritten: passes.Rewritten, causal: bool) -> None:
    module, model = export(name)
    found = rewritten.findings
    assert not found.rejected
    assert len(found.matches) == module.formulation.nodes
    for match in found.matches:
        assert match.causal is causal
        assert len(match.proof.sizes) == 2
        for attribute, expected in module.formulation.expected.items():
            got = getattr(match, attribute)
            assert got == (pytest.approx(expected) if isinstance(expected, float) else expected)
    exact = module.double() if not packed.find(name).half else module.float()
    for length in lengths(name):
        x = module.example(3, length, seed=length)
        with torch.no_grad():
            expected = exact(x.to(next(exact.parameters(), torch.zeros((), dtype=x.dtype)).dtype))
        got = run(rewritten.model, x.numpy())["output"]
        error = np.abs(got - expected.double().numpy()).max() / expected.abs().max().item()
        assert error <= (HALF if packed.find(name).half else 1e-5), f"length {length}"
    module.float()
    # A rewrite that takes longer is kept where it is what gives the state.
    assert causal or times_as_long(module, model, finished(rewritten.model)) <= MOST


def test_causal_formulations_are_fused(causal: str, export: Export, rewrite: Rewrite) -> None:
    check(causal, export, rewrite(causal), causal=True)


def test_bidirectional_formulations_are_fused(
    bidirectional: str, export: Export, rewrite: Rewrite
) -> None:
    check(bidirectional, export, rewrite(bidirectional), causal=False)


def test_numerator_and_denominator_that_differ_are_two(
    separate: str, export: Export, rewrite: Rewrite
) -> None:
    rewritten = rewrite(separate)
    check(separate, export, rewritten, causal=True)
    assert not rewritten.findings.unmatched, "nothing is left that could be refused"


def test_other_attention_stays_as_it_is(other: str, export: Export) -> None:
    _, model = export(other)
    rewritten = passes.rewrite(model, FUSED)
    assert not rewritten.findings.matches and not rewritten.findings.rejected
    kept = passes.run(model, FUSED[:1])
    assert rewritten.model.graph.SerializeToString() == kept.graph.SerializeToString()
    if other != "running_mean":
        reasons = {n.reason for n in rewritten.findings.unmatched}
        assert len(reasons) == 1, reasons


def test_passes_run_twice_find_nothing_more(formulation: str, rewrite: Rewrite) -> None:
    once = rewrite(formulation)
    twice = passes.rewrite(once.model, FUSED)
    assert not twice.findings.matches and not twice.findings.rejected
    # Sorting nodes again may put independent ones in another order.
    before, after = (
        sorted(n.SerializeToString() for n in m.graph.node) for m in (once.model, twice.model)
    )
    assert before == after


@pytest.mark.parametrize("name", ["block", "gated", "clamped_denominator", "litemla"])
def test_the_order_within_a_stage_does_not_matter(name: str, export: Export) -> None:
    _, model = export(name)
    results = set()
    for order in (1, -1):
        graph = gs.import_onnx(model)
        for stage in passes.STAGES:
            for found in passes.all_passes()[::order]:
                if stage == found.stage:
                    found.run(graph)
        graph.cleanup().toposort()
        results.add(gs.export_onnx(graph, do_type_check=False).graph.SerializeToString())
    assert len(results) == 1


def test_causal_formulations_stream(causal: str, export: Export) -> None:
    """Two calls that hand the state on give what one gives."""
    module, model = export(causal)
    if causal == "chunks_of_a_multiple":
        pytest.skip("it computes with whole chunks")
    streaming = passes.run(model)
    found = states.find_states(streaming)
    assert found
    x = module.example(2, 11).numpy()
    whole = run(streaming, x, **{s.past: s.start(2) for s in found})
    first = run(streaming, x[:, :4], **{s.past: s.start(2) for s in found})
    second = run(streaming, x[:, 4:], **{s.past: first[s.present] for s in found})
    pieces = np.concatenate([first["output"], second["output"]], axis=1)
    np.testing.assert_allclose(pieces, whole["output"], rtol=0, atol=2e-5 * np.abs(pieces).max())


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"eps": 1e-3}, id="epsilon"),
        pytest.param({"scale": 0.5}, id="scale"),
        pytest.param({"causal": False}, id="mask"),
        pytest.param({"normalize": False}, id="normaliser"),
        pytest.param({"post": 2.0}, id="factor"),
    ],
)
def test_a_wrong_reading_is_refused(
    wrong: dict[str, Any], export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof alone stands between a mistake of the algebra and the user."""
    _, model = export("tril_scores")
    right = matcher.read_roles

    def mistaken(*arguments: Any) -> Any:
        roles = right(*arguments)
        return roles and replace(roles, **wrong)

    monkeypatch.setattr(matcher, "read_roles", mistaken)
    rewritten = passes.rewrite(model, FUSED)
    assert not rewritten.findings.matches
    assert "output" in {r.where for r in rewritten.findings.rejected}
    assert all("inputs at" in r.reason for r in rewritten.findings.rejected)
    kept = passes.run(model, FUSED[:1])
    assert rewritten.model.graph.SerializeToString() == kept.graph.SerializeToString()
