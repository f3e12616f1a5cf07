"""Target ort-cuda in bfloat16: what functions are made of has kernels of that type on CUDA.

Every function is inlined and its types are inferred: of the operators that take or give bfloat16,
all are in the table of those that CUDA has in it, and ONNX Runtime's own are not among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, inliner, numpy_helper, shape_inference

from linexport import targets
from linexport.models.feature_maps import find_map, kinds, make
from linexport.plugins.ops import feature_map
from linexport.plugins.ops.body import MICROSOFT
from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from linexport.plugins.ops.registry import all_ops
from linexport.targets import Options
from linexport.targets.lowering.choice import lower
from linexport.targets.lowering.cuda_bfloat16 import OPERATORS
from tests.support import op_cases
from tests.support.layouts import Layout, layouts, mapped_model, one_op_model

pytestmark = pytest.mark.filterwarnings("ignore:Feature map")

BFLOAT16 = TensorProto.BFLOAT16
RULES = ("linear", "gated", "delta", "gated_delta")


def lowered(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model as target ort-cuda writes it in bfloat16."""
    target = targets.find_target("ort-cuda")
    chosen = target.configure(target, Options("bf16"))
    del model.functions[:]
    return lower(chosen.prepare(model), chosen.candidates)[0]


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without functions, the type of every value known: ONNX Runtime's are float32."""
    flat = inliner.inline_local_functions(model)
    known = {info.name for info in [*flat.graph.output, *flat.graph.value_info]}
    for node in flat.graph.node:
        if node.domain == MICROSOFT:
            flat.graph.value_info.extend(
                helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
                for name in node.output
                if name and name not in known
            )
    return shape_inference.infer_shapes(flat)


def typed(
    graph: onnx.GraphProto, outer: Mapping[str, int]
) -> Iterator[tuple[onnx.NodeProto, set[int]]]:
    """Every node, those of subgraphs too, with the types that it takes and gives."""
    types = dict(outer)
    for info in [*graph.value_info, *graph.output, *graph.input]:
        types[info.name] = info.type.tensor_type.elem_type
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from typed(attribute.g, types)
        yield node, {types.get(name, 0) for name in [*node.input, *node.output] if name}


def check(model: onnx.ModelProto) -> None:
    """Nothing of the model is in bfloat16 that CUDA has no kernel of, and something is."""
    found = [*typed(inlined(lowered(model)).graph, {})]
    of_unknown_type = {node.op_type for node, types in found if 0 in types}
    assert not of_unknown_type
    narrow = {(node.domain, node.op_type) for node, types in found if BFLOAT16 in types}
    assert narrow
    assert narrow <= {("", name) for name in (*OPERATORS, "CastLike", "Constant")}


@pytest.mark.parametrize("name", sorted(all_ops()))
def test_functions_of_every_op(name: str) -> None:
    op = all_ops()[name]
    model = op_cases.model(op, symbols=True)
    if name == "StabilizedExp":  # whose exponents are float32 in every precision
        found = typed(inlined(lowered(model)).graph, {})
        assert not any(BFLOAT16 in types for _, types in found)
    else:
        check(model)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=30, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_attention_of_every_layout(rule: str, data: st.DataObject) -> None:
    check(data.draw(layouts(rule)).model())


@pytest.mark.parametrize("heads", [(4, 2, 2), (2, 2, 2)])
@pytest.mark.parametrize("width", [48, 64, 300])
@pytest.mark.parametrize("rule", RULES)
def test_attention_of_usual_widths(rule: str, width: int, heads: tuple[int, int, int]) -> None:
    spec = LinearAttentionSpec(*heads[:2], rule, normalize="delta" not in rule)
    check(Layout(spec, heads[2], d_k=width, d_v=width, past=True, masked=True).model())


def test_features_and_attention_that_applies_their_map() -> None:
    """Both sides of every map."""
    for kind in kinds():
        known = vars(find_map(kind).Options()).keys()
        phi = make(kind, 4, {"features": 12} if "features" in known else {})
        frozen = [
            numpy_helper.from_array(tensor.numpy(), name)
            for name, tensor in zip(feature_map.NAMES, phi.frozen(), strict=False)
        ]
        for side in feature_map.SIDES:
            node = helper.make_node(
                "FeatureMap",
                ["x", *(tensor.name for tensor in frozen)],
                ["y"],
                domain="linexport",
                kind=kind,
                num_heads=2,
                side=side,
            )
            ends = [
                helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", "T", width])
                for name, width in (("x", 8), ("y", 2 * phi.features))
            ]
            model = one_op_model([node], ends[:1], ends[1:])
            model.graph.initializer.extend(frozen)
            check(model)
        if not feature_map.formulas(kind).over_time:
            spec = LinearAttentionSpec(2, 2, normalize=True)
            shapes = dict.fromkeys(("query", "key", "value"), ("B", "T", 8))
            check(mapped_model(spec, phi, shapes))


def test_other_operators_of_a_graph_stay_in_float32() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Clip", ["h", "", "one"], ["c"]),
        helper.make_node("LeakyRelu", ["c"], ["l"]),
        helper.make_node("Tanh", ["l"], ["t"]),
        helper.make_node("MatMul", ["t", "w"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["B", 4]) for n in "xy"]
    model = one_op_model(nodes, ends[:1], ends[1:])
    model.graph.initializer.extend(
        numpy_helper.from_array(np.ones(shape, np.float32), name)
        for name, shape in (("w", (4, 4)), ("one", ()))
    )
    written = lowered(model)
    onnx.checker.check_model(written, full_check=True)
    narrow = [n.op_type for n, types in typed(inlined(written).graph, {}) if BFLOAT16 in types]
    assert sorted({*narrow}) == ["Cast", "MatMul"]


def test_the_table_names_operators() -> None:
    defined = {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}
    assert defined >= OPERATORS
