"""Softmax attention as one node of engines: what it computes, and what it takes in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import linexport
from linexport.errors import BuildError
from linexport.plugins.tensorrt.flavour import RTX
from linexport.targets.base import OrtSession
from linexport.targets.trt.build import build_engine
from linexport.targets.trt.precision import half, widen
from linexport.targets.trt.profiles import Profile
from linexport.targets.trt.softmax_attention import with_attention
from tests.support import families

WIDTH = 16
SCALE = WIDTH**-0.5
HEADS = ((4, 2), (4, 1), (3, 3))
SIZES = ((1, 5, 0), (2, 5, 0), (2, 7, 3), (3, 1, 11), (2, 130, 77))
"""Batch, tokens and rows of the past."""

Edit = Callable[[dict[str, onnx.NodeProto], dict[str, np.ndarray[Any, Any]]], None]


def model(heads: int, groups: int, edit: Edit | None = None) -> onnx.ModelProto:
    """Attention as a hybrid has it after the passes, in float32; ``edit`` changes parts of it."""
    repeats = heads // groups
    shapes = {
        "query": ["B", heads, "T", WIDTH],
        "key": ["B", groups, "S", WIDTH],
        "value": ["B", groups, "S", WIDTH],
        "output": ["B", heads, "T", WIDTH],
    }
    constants = {
        "zero": np.float32(0),
        "low": np.finfo(np.float32).min,
        "scale": np.float32(SCALE),
        "split": np.array([0, groups, -1, WIDTH]),
        "joined": np.array([0, heads, -1, WIDTH]),
    }
    rows = [
        ("where", "Where", ["seen", "zero", "low"], {}),
        ("bias", "Concat", ["where"] * repeats, {"axis": 2}),
        ("queries", "Reshape", ["query", "split"], {}),
        ("turned", "Transpose", ["key"], {"perm": [0, 1, 3, 2]}),
        ("product", "MatMul", ["queries" if repeats > 1 else "query", "turned"], {}),
        ("scaled", "Mul", ["product", "scale"], {}),
        ("scores", "Add", ["scaled", "bias" if repeats > 1 else "where"], {}),
        ("weights", "Softmax", ["scores"], {"axis": -1}),
        ("read", "MatMul", ["weights", "value"], {}),
        (
            "output",
            *(("Reshape", ["read", "joined"]) if repeats > 1 else ("Identity", ["read"])),
            {},
        ),
    ]
    nodes = {n: helper.make_node(op, i, [n], n, **a) for n, op, i, a in rows}
    if edit is not None:
        edit(nodes, constants)
    seen = helper.make_tensor_value_info("seen", TensorProto.BOOL, ["B", 1, "T", "S"])
    typed = {n: helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()}
    graph = helper.make_graph(
        list(nodes.values()),
        "attention",
        [typed["query"], typed["key"], typed["value"], seen],
        [typed["output"]],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items()],
    )
    opsets = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def feeds(heads: int, groups: int, batch: int, tokens: int, past: int) -> dict[str, Any]:
    """Causal, with padding in the second sequence: its first tokens see nothing without a past."""
    rng, keys = np.random.default_rng(tokens), past + tokens
    seen = np.tri(tokens, keys, past, dtype=bool)[None, None].repeat(batch, 0)
    seen[1:, ..., :2] = False
    sizes = {"query": (heads, tokens), "key": (groups, keys), "value": (groups, keys)}
    normal = {n: rng.normal(size=(batch, *s, WIDTH)) for n, s in sizes.items()}
    return {n: x.astype(np.float32) for n, x in normal.items()} | {"seen": seen}


def oracle(query: Any, key: Any, value: Any, seen: Any) -> np.ndarray[Any, Any]:
    """softmax(scale Q K^T + M) V in float64."""
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    key, value = (x.repeat(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = SCALE * query @ key.swapaxes(2, 3)
    scores = np.where(seen, scores, np.finfo(np.float32).min)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ value)


def apart(nodes: dict[str, onnx.NodeProto], constants: dict[str, np.ndarray[Any, Any]]) -> None:
    """Scores and weights of each head, as conversions write where a mask is added to them."""
    _, heads, *_ = constants["joined"]
    _, groups, *_ = constants["split"]
    constants["of heads"] = np.array([0, heads, -1, 0])
    constants["below"] = np.array([0, groups, -1, 0])
    constants["joined"], constants["split"] = constants["of heads"], constants["below"]
    parted = helper.make_node("Reshape", ["product", "of heads"], ["parted"], "parted")
    grouped = helper.make_node("Reshape", ["weights", "below"], ["grouped"], "grouped")
    nodes["scaled"].input[0], nodes["scores"].input[1] = "parted", "where"
    nodes["read"].input[0] = "grouped"
    ordered = {**nodes}
    nodes.clear()
    for name, node in ordered.items():
        nodes[name] = node
        nodes.update({"product": {"parted": parted}, "weights": {"grouped": grouped}}.get(name, {}))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("heads", "groups", "edit"), [*((*some, None) for some in HEADS), (4, 2, apart), (4, 1, apart)]
)
def test_the_node_computes_what_it_is_in_place_of(
    heads: int, groups: int, edit: Edit | None, precision: str
) -> None:
    fused = with_attention(half(model(heads, groups, edit), precision))
    assert fused is not None
    kinds = [node.op_type for node in fused.graph.node]
    assert kinds.count("Attention") == 1 and not {"MatMul", "Softmax", "Reshape"} & set(kinds)
    onnx.checker.check_model(fused, full_check=True)
    if precision == "bf16":
        widen(fused)
    session = OrtSession(fused.SerializeToString(), 1)
    for sizes in SIZES:
        given = feeds(heads, groups, *sizes)
        found = session.run(given)["output"]
        bound = 4e-3 if precision == "fp16" else 1e-5  # bfloat16 is run in float32 here
        np.testing.assert_allclose(found, oracle(**given), rtol=0, atol=bound, err_msg=str(sizes))


def rather(name: str, op_type: str, inputs: list[str], **attributes: Any) -> Edit:
    """Another node of a name."""

    def edit(nodes: dict[str, onnx.NodeProto], _: Any) -> None:
        nodes[name].CopyFrom(helper.make_node(op_type, inputs, [name], name, **attributes))

    return edit


def constant(name: str, value: Any) -> Edit:
    """Another value of a constant."""
    return lambda _, constants: constants.update({name: np.asarray(value)})


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(constant("low", np.float32(-1)), id="a bias that does not hide"),
        pytest.param(constant("zero", np.float32(1)), id="a bias of what is seen"),
        pytest.param(constant("scale", np.ones(7, np.float32)), id="a scale per key"),
        pytest.param(constant("split", np.array([0, 1, -1, WIDTH])), id="other groups"),
        pytest.param(constant("joined", np.array([0, 2, -1, 32])), id="other heads"),
        pytest.param(rather("weights", "Softmax", ["scores"], axis=2), id="over queries"),
        pytest.param(rather("bias", "Concat", ["where"] * 2, axis=3), id="keys repeated"),
        pytest.param(rather("turned", "Transpose", ["key"], perm=[0, 1, 2, 3]), id="not turned"),
        pytest.param(rather("scores", "Mul", ["scaled", "bias"]), id="multiplied by the bias"),
    ],
)
def test_what_is_something_else_stays(edit: Edit) -> None:
    assert with_attention(half(model(4, 2), "fp16")) is not None
    assert with_attention(half(model(4, 2, edit), "fp16")) is None


def test_float32_and_changed_operators_stay() -> None:
    assert with_attention(model(4, 2)) is None
    other = half(model(4, 2), "fp16")
    other.graph.node.append(helper.make_node("GroupNormalization", ["a", "b", "c"], ["d"]))
    assert with_attention(other) is None


def build(attention: onnx.ModelProto, keys: int, sm: int = 89, tokens: int = 128) -> Any:
    sizes = {"B": (1, 1, 1), "T": (1, tokens, tokens), "S": (1, 1024, keys)}
    return build_engine(RTX, attention, Path("model.onnx"), [Profile("prefill", sizes)], sm)


@pytest.mark.services
@pytest.mark.parametrize("sm", [75, 80, 86, 89, 120, 121])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_builder_needs_less_scratch_memory(rtx: Any, precision: str, sm: int) -> None:
    if (precision, sm) == ("bf16", 75):
        pytest.skip("a T4 has no bfloat16")
    plain = half(model(8, 2), precision)
    fused = with_attention(plain)
    assert fused is not None
    before, after = (build(m, 8320, sm).scratch for m in (plain, fused))
    assert after < before / 5


@pytest.mark.services
@pytest.mark.parametrize(("precision", "tokens", "keys"), [("fp32", 128, 8320), ("fp16", 1, 32768)])
def test_the_builder_still_refuses_the_node(
    rtx: Any, precision: str, tokens: int, keys: int
) -> None:
    """TensorRT-RTX 1.7.1. Where it builds: match float32 too, and correct docs/evidence/gpus.md."""
    fused = with_attention(half(model(8, 2), "fp16"))
    assert fused is not None
    if precision == "fp32":
        retype(fused)
    with pytest.raises(BuildError, match="not supported by a dedicated kernel"):
        build(fused, keys, tokens=tokens)


def retype(fused: onnx.ModelProto) -> None:
    """Make every float16 value float32, in place."""
    for node in fused.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to":
                attribute.i = TensorProto.FLOAT
    for tensor in fused.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT16:
            wide = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))


@pytest.mark.services
def test_rows_in_place_still_want_a_fixed_capacity(rtx: Any) -> None:
    """States of the manifest have the rows that were fed: where it takes these, write in place."""
    messages: list[str] = []

    class Sink(rtx.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            rtx.ILogger.__init__(self)

        def log(self, _: Any, message: str) -> None:
            messages.append(message)

    sink = Sink()
    builder = rtx.Builder(sink)
    network = builder.create_network(1 << int(rtx.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    rows = [network.add_input(n, rtx.DataType.HALF, (1, 2, -1, 64)) for n in ("past", "new")]
    place = network.add_input("place", rtx.DataType.INT32, (1,))
    layer = network.add_kv_cache_update(*rows, place, rtx.KVCacheMode.LINEAR)
    with pytest.raises(RuntimeError):
        _ = layer.get_output(0).shape
    assert any("must have a static sequence length dimension" in m for m in messages), messages


@pytest.mark.services
@pytest.mark.parametrize(
    ("kind", "past", "decoded", "bound"),
    [
        ("qwen3_5_text", 8192, 1, 29e6),
        ("qwen3_5_text", 32768, 2, 103e6),
        pytest.param("olmo_hybrid", 8192, 1, 139e6, marks=pytest.mark.slow),
    ],
)
def test_a_hybrid_has_an_engine_whatever_the_builder_takes(
    rtx: Any, tmp_path: Path, kind: str, past: int, decoded: int, bound: float
) -> None:
    """It refuses heads of 8 (OLMo): that engine has the products, and as much as before."""
    families.save_model(families.TINY[kind], kind, tmp_path / "model")
    manifest = linexport.convert(
        tmp_path / "model",
        tmp_path / "artifact",
        threads=1,
        bench=False,
        precision="fp16",
        target="tensorrt-rtx",
        sms=(89,),
        dims=("seq=1:128:128", f"past=0:1024:{past}"),
    )
    (engine,) = manifest.engines
    assert bound * 0.9 < engine.scratch_bytes < bound and engine.note is None
    assert [p.dims["seq"] for p in engine.profiles] == [(1, 128, 128), (1, 1, decoded)]
