"""The bodies take memory and work linear in the length, seen on the tensors they really compute.

The functions are inlined and every value is made a graph output; the values inside a Scan become
scan outputs, stacked over its iterations. Running that graph at two lengths on ONNX Runtime gives
the size of every tensor the body computes: the largest is its memory, their sum its work.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, inliner

from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from tests.support import runtimes
from tests.support.layouts import Layout, one_op_model


def expose_everything(model: onnx.ModelProto) -> onnx.ModelProto:
    """The inlined model with every value it computes as an output; scanned ones as ``scan:...``."""
    flat = inliner.inline_local_functions(model)
    for node in flat.graph.node:
        if node.op_type == "Scan":
            body = next(a.g for a in node.attribute if a.name == "body")
            inner = [name for n in body.node for name in n.output]
            for name in inner:
                copy = f"scan:{name}"
                body.node.append(helper.make_node("Identity", [name], [copy]))
                body.output.append(helper.make_value_info(copy, onnx.TypeProto()))
                node.output.append(copy)
    values = [name for node in flat.graph.node for name in node.output if name]
    del flat.graph.output[:]
    flat.graph.output.extend(helper.make_value_info(n, onnx.TypeProto()) for n in values)
    return flat


def tensor_sizes(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[int]:
    """Bytes of every tensor computed; one inside a Scan counts once per iteration."""
    opened = runtimes.session(expose_everything(model), optimise=False)
    sizes = []
    for output, value in zip(opened.get_outputs(), opened.run(None, inputs), strict=True):
        if output.name.startswith("scan:") and value.size:
            sizes += [value.nbytes // len(value)] * len(value)
        else:
            sizes.append(value.nbytes)
    return sizes


LAYOUTS = {
    "linear": {},
    "gated": {},
    "gated per channel": {"per_channel": True},
    "delta": {},
    "gated_delta": {},
    "gated_delta per channel": {"per_channel": True},
    "bidirectional": {"past": False},
}


@pytest.mark.parametrize("heads", [(2, 2, 2), (4, 2, 1), (2, 4, 4)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_body(name: str, heads: tuple[int, int, int]) -> None:
    rule = name.split()[0]
    causal = rule != "bidirectional"
    spec = LinearAttentionSpec(
        *heads[:2],
        rule if causal else "linear",
        causal=causal,
        normalize="delta" not in rule,
        chunk_size=32,
    )
    layout = Layout(spec, heads[2], d_k=32, d_v=32, masked=True, **{"past": True, **LAYOUTS[name]})
    model = layout.model()
    measured = {}
    for length in (256, 512):
        x = layout.inputs(np.random.default_rng(0), 1, length)
        measured[length] = tensor_sizes(model, x)
        ends = sum(a.nbytes for a in [*x.values(), *runtimes.on_onnxruntime(model)(x)])
    assert max(measured[512]) <= 2.2 * max(measured[256])
    assert max(measured[512]) <= 3 * ends
    assert sum(measured[512]) <= 2.2 * sum(measured[256])


def test_the_measure_sees_a_quadratic_body() -> None:
    """softmax-free attention through a (T, T) matrix, outside a Scan and inside one."""
    infos = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
        for n, s in (("q", (1, "T", 8)), ("k", (1, 8, "T")), ("y", (1, "T", 8)))
    ]
    plain = [
        helper.make_node("MatMul", ["q", "k"], ["scores"]),
        helper.make_node("MatMul", ["scores", "q"], ["y"]),
    ]
    body = helper.make_graph(
        [helper.make_node("MatMul", ["row", "k"], ["inner"])],
        "body",
        [helper.make_value_info("row", onnx.TypeProto())],
        [helper.make_value_info("inner", onnx.TypeProto())],
    )
    scanned = [
        helper.make_node("Scan", ["q"], ["rows"], body=body, num_scan_inputs=1),
        helper.make_node("Squeeze", ["rows"], ["y"]),
    ]
    for nodes in (plain, scanned):
        model = one_op_model(nodes, infos[:2], infos[2:])
        largest = []
        for length in (256, 512):
            x = np.ones((1, length, 8), np.float32)
            sizes = tensor_sizes(model, {"q": x, "k": x.transpose(0, 2, 1).copy()})
            largest.append(max(sizes))
        assert largest[1] >= 3.9 * largest[0]
