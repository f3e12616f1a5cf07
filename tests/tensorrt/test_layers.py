"""Attention with its operands as one plugin: its kernels beside the nodes they are in place of.

The kernels of a converted model's layers run in Triton's interpreter, by the description that the
node carries; ONNX Runtime runs the node's function, which is the nodes of the original graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

import linexport
from linexport.plugins.kernels.contract import LAYER
from linexport.plugins.kernels.description import Description
from linexport.plugins.kernels.plans.parameters import OPERANDS
from linexport.plugins.kernels.run import ELEMENTS, run
from linexport.targets.base import OrtSession
from linexport.targets.trt.operands import Facts, LargeOperandError, OperandReader
from linexport.targets.trt.parser_form import described
from tests.support import families, kernels
from tests.support.interpreter import prepare_once_a_launch

pytestmark = pytest.mark.services

pytest.importorskip("triton", reason="kernels are written in Triton: pip install triton")
pytest.importorskip("transformers", reason="families are transformers' models")

LENGTHS = (1, 3, 4, 5, 40)


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_once_a_launch(monkeypatch)


FAMILIES = [
    ("qwen3_5_text", (4,)),
    *(
        pytest.param(kind, LENGTHS, marks=pytest.mark.slow)
        for kind in ("qwen3_5_text", "kimi_linear", "qwen3_next", "olmo_hybrid")
    ),
]
"""Families of which a layer computes all operands, a decay per channel among them (Kimi Linear)."""


def converted(
    kind: str, folder: Path, precision: str = "fp32", target: str = "tensorrt"
) -> onnx.ModelProto:
    """A tiny model of a family, for TensorRT or ONNX Runtime on an H100."""
    families.save_model(families.TINY[kind], kind, folder / "model")
    options = {"target": target, "sms": (90,), "dims": ("seq=1:16:64",), "bench": False}
    manifest = linexport.convert(
        folder / "model", folder / "artifact", threads=1, precision=precision, **options
    )
    assert manifest.status == "ok"
    return onnx.load_model(str(folder / "artifact" / "model.onnx"))


def layers(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == LAYER]


@pytest.mark.parametrize(("kind", "lengths"), FAMILIES)
def test_kernels_compute_what_the_nodes_compute(
    kind: str, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    model = converted(kind, tmp_path)
    found = layers(model)
    assert found and not any(n.op_type == "LinearAttention" for n in model.graph.node)
    assert not any(n.op_type == "CausalConvTokens" for n in model.graph.node)
    node, description = found[0], described(found[0])
    assert {x.name for x in description.inputs if x}.isdisjoint(OPERANDS)
    for length in lengths:
        check(model, node, description, length)


def test_kernels_read_norms_that_are_one_operator(tmp_path: Path) -> None:
    """As target ort-cuda writes them: an operand's norm is computed by the kernel, too."""
    model = converted("qwen3_5_text", tmp_path, target="ort-cuda")
    (node,) = layers(model)
    inside = [n.op_type for f in model.functions if f.name == LAYER for n in f.node]
    assert "SimplifiedLayerNormalization" in inside and "ReduceMean" not in inside
    assert {x.name for x in described(node).inputs if x}.isdisjoint(OPERANDS)
    check(model, node, described(node), 4)


def check(
    model: onnx.ModelProto, node: onnx.NodeProto, description: Description, length: int
) -> None:
    rng, sizes = np.random.default_rng(length), {"batch": 2, "length": length}
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    feeds, states = {}, {i.name for i in model.graph.input}
    for x, name in zip(description.inputs, node.input, strict=True):
        assert x is not None
        shape = [sizes.get(str(n), n) for n in x.shape]
        random = rng.normal(size=shape).astype(np.float32)
        if len(shape) == 4 and name not in states:  # a softplus, of which decays are made
            random = abs(random)
        feeds[name] = random > -1 if x.type == "i8" else weights.get(name, random)
    given = {
        x.name: torch.from_numpy(feeds[name].copy())
        for x, name in zip(description.inputs, node.input, strict=True)
        if x is not None
    }
    made = {
        x.name: torch.full([sizes.get(str(n), n) for n in x.shape], np.nan).to(ELEMENTS[x.type])
        for x in description.outputs
    }
    wanted = OrtSession(alone(model, node, description).SerializeToString(), 1).run(feeds)
    run(description.plans[90], {**given, **made}, 2, length, 132)
    for x, name in zip(description.outputs, node.output, strict=True):
        got, reference = kernels.wide(made[x.name]), wanted[name].astype(np.float64)
        scale = max(np.abs(reference).max(initial=0.0), 1e-3)
        np.testing.assert_allclose(got, reference, rtol=0, atol=2e-5 * scale, err_msg=x.name)


def alone(
    model: onnx.ModelProto, node: onnx.NodeProto, description: Description
) -> onnx.ModelProto:
    """A model of this node only, which runs its function."""
    types = {"fp32": onnx.TensorProto.FLOAT, "i8": onnx.TensorProto.BOOL}

    def typed(names: Any, tensors: Any) -> list[onnx.ValueInfoProto]:
        pairs = {name: x for name, x in zip(names, tensors, strict=True) if x is not None}
        return [helper.make_tensor_value_info(n, types[x.type], x.shape) for n, x in pairs.items()]

    graph = helper.make_graph(
        [node],
        "layer",
        typed(node.input, description.inputs),
        typed(node.output, description.outputs),
    )
    own = [f for f in model.functions if (f.name, f.overload) == (LAYER, node.overload)]
    return helper.make_model(
        graph, opset_imports=model.opset_import, ir_version=model.ir_version, functions=own
    )


def test_an_engine_has_one_layer_from_projection_to_attention(rtx: Any, tmp_path: Path) -> None:
    """Products, the plugin, the gated norm, a product: nothing is computed or copied between."""
    families.save_model(families.TINY["qwen3_5_text"], "qwen3_5_text", tmp_path / "model")
    options = {"target": "tensorrt-rtx", "sms": (89,), "dims": ("seq=1:16:64",), "bench": False}
    manifest = linexport.convert(tmp_path / "model", tmp_path / "artifact", threads=1, **options)
    (engine,) = manifest.engines
    assert len(engine.plugins) == 1
    kinds = [layer.type for layer in engine.layers]
    places = [i for i, kind in enumerate(kinds) if kind == "custom_layer"]
    assert len(places) == 2, "one for each profile"
    for place in places:
        assert kinds[place - 1 : place + 3] == ["gemm", "custom_layer", "kgen", "gemm"]


def test_an_operand_of_too_many_values_stays_a_tensor() -> None:
    """Thirty squares of squares: read as a tree, a thousand million values."""
    nodes = [helper.make_node("Mul", [f"v{i}", f"v{i}"], [f"v{i + 1}"]) for i in range(30)]
    names = [f"v{i}" for i in range(31)]
    facts = Facts(
        shapes=dict.fromkeys(names, ("batch", "length", 4)),
        types=dict.fromkeys(names, onnx.TensorProto.FLOAT),
        constants={},
        producers={node.output[0]: node for node in nodes},
    )
    with pytest.raises(LargeOperandError, match="256 values"):
        OperandReader(facts, ("batch", "length"), set()).operand("v30", 2, 2)
