"""GatedDeltaNet as it is defined, beside a recurrence in float64 that shares no code with it.

What is written fits the schema, whose shapes are inferred. On the CPU, what stands for it gives
what the schema says, and so does the kernel, which ONNX Runtime has there from 1.32 on.
"""

from __future__ import annotations

import numpy as np
import onnx
from hypothesis import given, settings
from onnx import TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from linexport.plugins.ops.body import MICROSOFT, Body
from linexport.plugins.ops.linear_attention.spec import LinearAttentionSpec
from linexport.targets.lowering import gated_delta_net, op_functions
from tests.support.gated_delta_net import calls, has_kernel, opened, opens, recurrence


def written(
    rule: str, scale: float, past: bool, per_head: bool, split: dict[str, np.ndarray]
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one call, and what it is fed: packed heads."""
    (batch, length, shared, _), heads = split["q"].shape, split["v"].shape[2]
    fed = {n: split[n].reshape(batch, length, -1) for n in ("q", "k", "v", "g", "beta")}
    fed["S"] = split["S"]
    fed["beta"] = fed["beta"] if per_head else fed["beta"][..., :1]
    unread = {"g": "gated" not in rule, "beta": "delta" not in rule, "S": not past}
    fed = {n: x for n, x in fed.items() if not unread.get(n, False)}
    spec = LinearAttentionSpec(shared, heads, update_rule=rule, scale=scale)
    names = ("q", "k", "v", "S", "g", "beta")
    widths = {n: (1, 1, x.shape[-1]) for n, x in fed.items() if n != "S"}
    sizes = spec.check(*(widths[n] for n in "qkv"), decay=widths.get("g"), beta=widths.get("beta"))
    b = Body()
    outputs = gated_delta_net.call(b, spec, sizes, tuple(n if n in fed else "" for n in names))
    typed = [
        helper.make_tensor_value_info(
            n, TensorProto.FLOAT, ["B", *x.shape[1:]] if n == "S" else ["B", "T", x.shape[-1]]
        )
        for n, x in fed.items()
    ]
    graph = helper.make_graph(
        b.nodes, "call", typed, [helper.make_empty_tensor_value_info(o) for o in outputs]
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), fed


@given(calls())
@settings(max_examples=80, deadline=None)
def test_on_the_cpu_it_gives_what_the_recurrence_does(
    drawn: tuple[str, float, bool, bool, dict[str, np.ndarray]],
) -> None:
    rule, scale, past, per_head, split = drawn
    model, fed = written(rule, scale, past, per_head, split)
    expected, last = recurrence(split, rule, scale)
    by_kernel = [model] if has_kernel(gated_delta_net.OP) else []
    for runs in (op_functions.defined(model), *by_kernel):
        output, state = opened(runs).run(None, fed)
        for got, right in ((output, expected.reshape(output.shape)), (state, last)):
            assert got.shape == right.shape
            assert np.abs(got - right).max() <= 2e-5 * max(1.0, np.abs(right).max())


@given(calls())
@settings(max_examples=20, deadline=None)
def test_what_is_written_fits_the_schema(
    drawn: tuple[str, float, bool, bool, dict[str, np.ndarray]],
) -> None:
    model, _ = written(*drawn)
    with opens(gated_delta_net.OP):
        opened(model)
    schema = next(
        s
        for s in ort_state.get_all_operator_schema()
        if (s.domain, s.name) == (MICROSOFT, gated_delta_net.OP)
    )
    assert tuple(i.name for i in schema.inputs)[: len(gated_delta_net.INPUTS)] == (
        gated_delta_net.INPUTS
    )
    node = next(n for n in model.graph.node if n.op_type == gated_delta_net.OP)
    assert {a.name for a in node.attribute} <= set(schema.attributes)


def test_a_model_without_it_is_left_as_it_is() -> None:
    node = helper.make_node("Identity", ["x"], ["y"])
    model = helper.make_model(helper.make_graph([node], "g", [], []))
    assert op_functions.defined(model) is model
