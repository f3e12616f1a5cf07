"""Single nodes as models, and a layer as most code writes it, for the builders of TensorRT."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from linexport.models import feature_maps
from linexport.plugins.ops.registry import register_schemas

FLOAT = TensorProto.FLOAT


def node(
    rule: str = "linear",
    heads: int = 8,
    width: int = 64,
    normalize: bool = True,
    per_channel: bool = False,
    causal: bool = True,
    element: int = FLOAT,
) -> onnx.ModelProto:
    """elu(q)+1, elu(k)+1 and one LinearAttention, with its states where it is causal."""
    feature_maps.kinds()
    register_schemas()
    tokens = ["batch", "seq"]

    def value(name: str, *shape: Any, kind: int = element) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    size, state = heads * width, ("batch", heads, width, width)
    inputs = [value(n, *tokens, size) for n in ("q", "k", "v")]
    names = ["phi_q", "phi_k", "v"]
    outputs = [value("output", *tokens, size)]
    given = ["output"]
    if causal:
        inputs.append(value("past_state_0", *state, kind=FLOAT))
        outputs.append(value("present_state_0", *state, kind=FLOAT))
        names.append("past_state_0")
        given.append("present_state_0")
        if normalize:
            inputs.append(value("past_normalizer_0", *state[:-1], kind=FLOAT))
            outputs.append(value("present_normalizer_0", *state[:-1], kind=FLOAT))
            names.append("past_normalizer_0")
            given.append("present_normalizer_0")
    if rule.startswith("gated"):
        inputs.append(value("decay", *tokens, size if per_channel else heads))
        names += [""] * (5 - len(names)) + ["decay"]
    if rule.endswith("delta"):
        inputs.append(value("beta", *tokens, heads))
        names += [""] * (6 - len(names)) + ["beta"]
    maps = [
        helper.make_node(
            "FeatureMap",
            [x],
            [f"phi_{x}"],
            f"map_{x}",
            domain="linexport",
            kind="elu1",
            num_heads=heads,
            side=side,
        )
        for x, side in (("q", "query"), ("k", "key"))
    ]
    attention = helper.make_node(
        "LinearAttention",
        names,
        given,
        "attention",
        domain="linexport",
        q_num_heads=heads,
        kv_num_heads=heads,
        update_rule=rule,
        normalize=int(normalize),
        causal=int(causal),
        eps=1e-6,
    )
    between = [value(f"phi_{x}", *tokens, size) for x in ("q", "k")]
    parser_form = helper.make_graph([*maps, attention], "one", inputs, outputs, value_info=between)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("linexport", 1)]
    return helper.make_model(parser_form, opset_imports=opsets, ir_version=10)


def transition(heads: int = 8, width: int = 64) -> onnx.ModelProto:
    """A model of one GeneralizedDeltaRule with its state."""
    register_schemas()
    size, state = heads * width, ("batch", heads, width, width)
    names = ["query", "key", "value", "decay", "a", "b"]
    shapes: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys([*names, "output"], ("batch", "seq", size)),
        **dict.fromkeys(["past_state_0", "present_state_0"], state),
    }
    infos = {n: helper.make_tensor_value_info(n, FLOAT, s) for n, s in shapes.items()}
    given, made = [*names, "past_state_0"], ["output", "present_state_0"]
    node = helper.make_node(
        "GeneralizedDeltaRule", given, made, "rule", domain="linexport", num_heads=heads
    )
    graph = helper.make_graph([node], "one", [infos[n] for n in given], [infos[n] for n in made])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("linexport", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def convolution() -> onnx.ModelProto:
    """A model of one CausalConvWithState of 24 channels and size 4."""
    sizes = {"x": ["batch", 24, "seq"], "w": [24, 1, 4], "y": ["batch", 24, "seq"]}
    infos = {n: helper.make_tensor_value_info(n, FLOAT, s) for n, s in sizes.items()}
    node = helper.make_node(
        "CausalConvWithState", ["x", "w"], ["y"], "conv", domain="linexport", activation="silu"
    )
    parser_form = helper.make_graph([node], "one", [infos["x"], infos["w"]], [infos["y"]])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("linexport", 1)]
    return helper.make_model(parser_form, opset_imports=opsets, ir_version=10)


def feature_map() -> onnx.ModelProto:
    """A model of one FeatureMap: taylor2 of two heads of 8."""
    sizes = {"x": ["batch", "seq", 16], "y": ["batch", "seq", 90]}
    infos = {n: helper.make_tensor_value_info(n, FLOAT, s) for n, s in sizes.items()}
    feature_maps.kinds()
    register_schemas()
    node = helper.make_node(
        "FeatureMap", ["x"], ["y"], "map", domain="linexport", kind="taylor2", num_heads=2
    )
    parser_form = helper.make_graph([node], "one", [infos["x"]], [infos["y"]])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("linexport", 1)]
    return helper.make_model(parser_form, opset_imports=opsets, ir_version=10)


def cumsum(heads: int = 8, width: int = 64) -> onnx.ModelProto:
    """The same layer as most code spells it: a cumulative sum of outer products."""
    nodes: list[onnx.NodeProto] = []

    def add(op: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, list(inputs), [f"v{len(nodes)}"], **attributes))
        return str(nodes[-1].output[0])

    def const(values: Any) -> str:
        array = np.asarray(values)
        kept = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
        return add("Constant", value=onnx.numpy_helper.from_array(kept))

    split = const([0, 0, heads, width])
    q, k, v = (add("Reshape", x, split) for x in ("q", "k", "v"))
    q, k = (add("Add", add("Elu", x), const(1.0)) for x in (q, k))
    outer = add("Mul", add("Unsqueeze", k, const([4])), add("Unsqueeze", v, const([3])))
    states = add("CumSum", outer, const(1))
    read = add("MatMul", add("Unsqueeze", q, const([3])), states)
    sums = add("ReduceSum", add("Mul", q, add("CumSum", k, const(1))), const([3]), keepdims=1)
    ratio = add("Div", add("Squeeze", read, const([3])), sums)
    packed = add("Reshape", ratio, const([0, 0, heads * width]))
    nodes.append(helper.make_node("Identity", [packed], ["output"]))
    shape = ["batch", "seq", heads * width]
    infos = [helper.make_tensor_value_info(n, FLOAT, shape) for n in ("q", "k", "v", "output")]
    parser_form = helper.make_graph(nodes, "cumsum", infos[:3], infos[3:])
    return helper.make_model(
        parser_form, opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )
