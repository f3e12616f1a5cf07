"""The pass that folds constants, shares equal nodes and drops those that do nothing."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from linexport.passes import simplify


def simplified(
    *nodes: onnx.NodeProto, outputs: tuple[str, ...], **constants: object
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    expected = ReferenceEvaluator(model).run(None, {"x": x})
    surgeon = gs.import_onnx(model)
    simplify.run(surgeon)
    result = gs.export_onnx(surgeon.cleanup().toposort(), do_type_check=False)
    got = ReferenceEvaluator(result).run(None, {"x": x})
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_array_equal(a, b)
    return result


def ops(model: onnx.ModelProto) -> list[str]:
    return sorted(node.op_type for node in model.graph.node)


def node(op: str, inputs: str, outputs: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(","), outputs.split(","), **attributes)


def test_constants_are_folded_whatever_their_size() -> None:
    model = simplified(
        node("Add", "tiny,tiny", "two"),
        node("Reshape", "two,shape", "flat"),
        node("Add", "x,flat", "y"),
        outputs=("y",),
        tiny=np.full((2, 2), 1e-15, np.float32),
        shape=np.array([4]),
    )
    assert ops(model) == ["Add"]
    [constant] = model.graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(constant), np.full(4, 2e-15, np.float32))


def test_an_epsilon_stays() -> None:
    model = simplified(node("Add", "x,eps", "y"), outputs=("y",), eps=np.array(1e-15, np.float32))
    assert ops(model) == ["Add"]


def test_equal_nodes_are_shared_and_others_are_not() -> None:
    model = simplified(
        node("Add", "x,a", "p"),
        node("Add", "x,b", "q"),
        node("Add", "x,c", "r"),
        node("Mul", "p,q", "s"),
        node("Mul", "s,r", "y"),
        outputs=("y",),
        a=np.array(1.0, np.float32),
        b=np.array(1.0, np.float32),
        c=np.array(2.0, np.float32),
    )
    assert ops(model) == ["Add", "Add", "Mul", "Mul"]


def test_what_does_nothing_is_dropped() -> None:
    end = np.array([np.iinfo(np.int64).max])
    model = simplified(
        node("Cast", "x", "p", to=TensorProto.FLOAT),
        node("Slice", "p,zero,end,one,one", "q"),
        node("Slice", "q,one,end,one,one", "r"),
        node("Identity", "r", "s"),
        node("Neg", "s", "y"),
        outputs=("y",),
        zero=np.array([0]),
        one=np.array([1]),
        end=end,
    )
    assert ops(model) == ["Neg", "Slice"]


def test_ones_reshapes_and_casts_that_change_nothing_are_dropped() -> None:
    """The dtype of a value is found from where it comes from, where the graph does not note it."""
    model = simplified(
        node("Mul", "x,one", "p"),
        node("Div", "p,one", "q"),
        node("Softmax", "q", "r"),
        node("Cast", "r", "s", to=TensorProto.FLOAT),
        node("CastLike", "two,s", "t"),
        node("Reshape", "s,flat", "u"),
        node("Reshape", "u,back", "v"),
        node("Mul", "v,t", "y"),
        outputs=("y",),
        one=np.array(1, np.float32),
        two=np.array(2, np.float32),
        flat=np.array([-1]),
        back=np.array([-1, 2, 2]),
    )
    assert ops(model) == ["Mul", "Reshape", "Softmax"]


def test_a_one_that_adds_an_axis_stays() -> None:
    one = np.ones((1, 1, 1), np.float32)
    model = simplified(node("Mul", "x,one", "p"), node("Neg", "p", "y"), outputs=("y",), one=one)
    assert ops(model) == ["Mul", "Neg"]


def test_a_slice_of_the_last_t_of_t_is_dropped_and_of_more_is_not() -> None:
    model = simplified(
        node("Shape", "x", "n", start=0, end=1),
        node("Neg", "n", "minus"),
        node("Slice", "x,minus,end,rows,step", "whole"),
        node("Concat", "whole,x", "twice", axis=0),
        node("Slice", "twice,minus,end,rows,step", "p"),
        node("Neg", "p", "y"),
        outputs=("y",),
        end=np.array([np.iinfo(np.int64).max]),
        rows=np.array([0]),
        step=np.array([1]),
    )
    assert ops(model).count("Slice") == 1


def test_sizes_that_are_known_are_constants_and_others_are_not() -> None:
    """With them a runtime sees the scale of an attention, and the weight of a norm."""
    model = simplified(
        node("Shape", "x", "width", start=-1),
        node("Shape", "x", "sizes"),
        node("Gather", "sizes,last", "same"),
        node("Slice", "sizes,from,to", "again"),
        node("Gather", "sizes,first", "length"),
        node("Slice", "sizes,first,to", "both"),
        node("Concat", "width,same,again", "known", axis=0),
        node("Concat", "length,both", "unknown", axis=0),
        node("Neg", "known", "y"),
        node("Neg", "unknown", "z"),
        outputs=("y", "z"),
        last=np.array([-1]),
        first=np.array([0]),
        to=np.array([2]),
        **{"from": np.array([1])},
    )
    assert ops(model) == ["Concat", "Gather", "Neg", "Neg", "Shape", "Slice"]
    assert [4, 4, 4] in [numpy_helper.to_array(c).tolist() for c in model.graph.initializer]


def test_outputs_keep_their_names_and_random_nodes_stay_apart() -> None:
    model = simplified(node("Neg", "x", "y"), node("Neg", "x", "z"), outputs=("y", "z"))
    assert [o.name for o in model.graph.output] == ["y", "z"]
    surgeon = gs.import_onnx(
        helper.make_model(
            helper.make_graph(
                [
                    node("RandomNormalLike", "x", "p"),
                    node("RandomNormalLike", "x", "q"),
                    node("Sub", "p,q", "y"),
                ],
                "g",
                [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
                [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
            )
        )
    )
    simplify.run(surgeon)
    assert len(surgeon.cleanup().nodes) == 3


def test_a_large_constant_that_others_read_is_not_copied() -> None:
    weight = np.ones((200, 200), np.float32)
    model = simplified(
        node("Transpose", "w", "t", perm=[1, 0]),
        node("ReduceSum", "t", "p"),
        node("ReduceSum", "w", "q"),
        node("Add", "p,q", "r"),
        node("Mul", "x,r", "y"),
        outputs=("y",),
        w=weight,
    )
    assert "Transpose" in ops(model)


def test_a_transposed_weight_is_named_after_it() -> None:
    model = simplified(
        node("Transpose", "layer.weight", "val_1", perm=[1, 0]),
        node("MatMul", "x,val_1", "y"),
        outputs=("y",),
        **{"layer.weight": np.arange(8, dtype=np.float32).reshape(2, 4)},
    )
    [constant] = model.graph.initializer
    assert constant.name == "layer.weight.T" and list(constant.dims) == [4, 2]


def test_a_sequence_of_constants_is_no_constant() -> None:
    model = simplified(
        node("SplitToSequence", "pair,sizes", "parts", axis=0),
        node("SequenceAt", "parts,one", "row"),
        node("Add", "x,row", "y"),
        outputs=("y",),
        pair=np.arange(12, dtype=np.float32).reshape(3, 4),
        sizes=np.array([2, 1]),
        one=np.array(1),
    )
    assert ops(model) == ["Add", "SequenceAt", "SplitToSequence"]
