"""Weights in fewer bits in engines: values in ONNX Runtime, and what the builder makes of them.

Engines are really built, by TensorRT-RTX, for GPUs that are not here. Packed weights show in the
engine's size, in its memory for activations, and in that no layer is a plain product: a matrix that
is computed before it is read would be a layer of its own and take that memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import linexport
from linexport.errors import UsageError
from linexport.manifest import Manifest, read
from linexport.plugins.ops.mixture_of_experts import ExpertFunction, mixture_of_experts
from linexport.plugins.tensorrt.flavour import RTX, TENSORRT
from linexport.quantization import engines, quantisable
from linexport.quantization.block_quantisation import Grid, Quantised, nearest
from linexport.quantization.by_target import check_gpus
from linexport.quantization.choose_bits import Chosen
from linexport.quantization.engine_experts import as_one_layer
from linexport.quantization.experts import find_experts
from linexport.quantization.form import ToGrid
from linexport.quantization.gptq import CalibratedInputs, gptq
from linexport.quantization.sensitivity import stored
from linexport.targets.runtime.options import FLOAT_PRODUCTS
from linexport.targets.trt.build import BuiltEngine, build_engine
from linexport.targets.trt.profiles import Profile, needs_pairs, with_pairs
from tests.hugging_face.conftest import model_folder
from tests.quantization.test_experts import drawn as drawn_experts
from tests.quantization.test_experts import model_of, routed
from tests.support.command_line import Result

TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
KINDS: dict[str, tuple[ToGrid, int]] = {
    "int4": (engines.grid, 4),
    "int8": (engines.grid, 8),
    "fp8": (engines.floats, 8),
}
STORED = {"int4": TensorProto.INT4, "int8": TensorProto.INT8, "fp8": TensorProto.FLOAT8E4M3FN}
MANY = Profile("prefill", {"b": (1, 1, 1), "t": (1, 64, 256)})
ONE = Profile("decode", {"b": (1, 1, 1), "t": (1, 1, 1)})

Weights = dict[str, np.ndarray]

__all__ = ["model_folder"]


def decoder(weights: Weights, kind: str) -> onnx.ModelProto:
    """A table, a gated pair of products, another one, and an output layer tied to the table."""
    words, width = weights["table"].shape
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("MatMul", ["rows", "up"], ["wide"], "up"),
        helper.make_node("MatMul", ["rows", "gate"], ["closed"], "gate"),
        helper.make_node("Relu", ["closed"], ["open"]),
        helper.make_node("Mul", ["wide", "open"], ["gated"]),
        helper.make_node("MatMul", ["gated", "down"], ["last"], "down"),
        helper.make_node("Transpose", ["table"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["last", "turned"], ["logits"], "head"),
    ]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["b", "t"])
    outputs = [
        helper.make_tensor_value_info(name, TYPES[kind], ["b", "t", size])
        for name, size in (("rows", width), ("logits", words))
    ]
    stored = [numpy_helper.from_array(a.astype(kind), name) for name, a in weights.items()]
    graph = helper.make_graph(nodes, "g", [ids], outputs, stored)
    opsets = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def drawn(words: int, width: int, inner: int) -> Weights:
    random = np.random.default_rng(width)
    shapes = {
        "table": (words, width),
        "up": (width, inner),
        "gate": (width, inner),
        "down": (inner, width),
    }
    return {
        name: (random.standard_normal(shape) / shape[0] ** 0.5).astype(np.float16).astype("f4")
        for name, shape in shapes.items()
    }


def quantised(
    weights: Weights, choice: str, kind: str
) -> tuple[onnx.ModelProto, dict[str, Quantised]]:
    """Return the decoder with quantised weights, and those."""
    model = decoder(weights, kind)
    to_grid, bits = KINDS[choice]
    made = {}
    for weight in quantisable.find(decoder(weights, "float32"), weights)[0]:
        own = to_grid(weight, max(bits, 8 if weight.is_table else 0), kind)
        found = nearest(weight.matrix(weights[weight.name]), own)
        made[weight.name] = SimpleNamespace(weight=weight, quantised=found)
    result = engines.engine_model(model, made)
    onnx.checker.check_model(result)
    return result, {name: found.quantised for name, found in made.items()}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("choice", KINDS)
def test_the_graph_computes_with_the_quantised_values(choice: str, kind: str) -> None:
    """An inner width that no block divides is in 8 bits, and the table is stored once."""
    for inner in (96, 72):
        weights = drawn(130, 64, inner)
        model, made = quantised(weights, choice, kind)
        types = {t.name: t.data_type for t in model.graph.initializer}
        down = "int8" if choice == "int4" and inner == 72 else choice
        joint = next(name for name in types if name.endswith("/joint/values"))
        assert types[joint] == STORED[choice] and types["down/values"] == STORED[down]
        assert sum(n.op_type == "MatMul" for n in model.graph.node) == 3
        tables = [t for t in model.graph.initializer if list(t.dims) in ([64, 130], [130, 64])]
        assert [t.name for t in tables] == ["table/values"]
        assert types["table/values"] == STORED["fp8" if choice == "fp8" else "int8"]
        options = onnxruntime.SessionOptions()
        for name, value in FLOAT_PRODUCTS.items():
            options.add_session_config_entry(name, value)
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        ids = np.asarray([[3, 0, 129], [-1, 7, 7]])
        rows, logits = session.run(["rows", "logits"], {"ids": ids})
        matrices = {name: found.matrix().astype(np.float64) for name, found in made.items()}
        np.testing.assert_array_equal(rows, matrices["table"][ids].astype(kind))
        given = rows.astype(np.float64)
        inside = (given @ matrices["up"].T) * np.maximum(given @ matrices["gate"].T, 0)
        expected = inside @ matrices["down"].T @ matrices["table"].T
        error = 1e-5 if kind == "float32" else 5e-3
        np.testing.assert_allclose(logits, expected, atol=error * np.abs(expected).max())


def test_values_are_near_the_weights_and_gptq_is_nearer_where_inputs_vary_together() -> None:
    random = np.random.default_rng(0)
    matrix = random.standard_normal((40, 200)).astype(np.float32)
    mixing = random.standard_normal((200, 200)) * np.linspace(0.02, 2, 200)
    moment = mixing.T @ mixing
    allowed = {"int8": 0.01, "fp8": 0.03}
    for choice, limit in allowed.items():
        own = Grid(8, 200, True, "float16", positive=True, floating=choice == "fp8")
        plain, better = nearest(matrix, own), gptq(matrix, own, CalibratedInputs(moment))
        costs = []
        for found in (plain, better):
            assert (found.scales > 0).all() and found.scales.shape == (40, 1)
            np.testing.assert_array_equal(found.scales, found.scales.astype(np.float16))
            wrong = (found.matrix() - matrix).astype(np.float64)
            costs.append(np.trace(wrong @ moment @ wrong.T))
        error = np.linalg.norm(plain.matrix() - matrix) / np.linalg.norm(matrix)
        assert error < limit and costs[1] < 0.8 * costs[0]


def built(model: onnx.ModelProto, profiles: Sequence[Profile], sm: int, place: Path) -> BuiltEngine:
    return build_engine(RTX, model, place / "model.onnx", profiles, sm)


@pytest.mark.parametrize(
    ("choice", "sm"), [("int4", 86), ("int4", 120), ("int8", 86), ("int8", 120), ("fp8", 89)]
)
def test_the_builder_keeps_weights_packed(rtx: Any, choice: str, sm: int, tmp_path: Path) -> None:
    weights = drawn(4096, 256, 1024)
    model, made = quantised(weights, choice, "float16")
    packed = sum(a.nbytes for found in made.values() for a in found.packed().values())
    half = sum(2 * a.size for a in weights.values())
    assert packed < 0.55 * half and needs_pairs(model)
    for profile in (MANY, with_pairs([MANY, ONE])[1]):
        found = built(model, [profile], sm, tmp_path)
        plain = built(decoder(weights, "float16"), [profile], sm, tmp_path)
        assert packed < len(found.plan) < packed + 0.1 * half
        assert half < len(plain.plan)
        if profile is not MANY:  # nothing of a matrix is in the few rows of a step
            assert found.activations < plain.activations + 2**14
        kinds = {layer["type"] for layer in found.layers}
        assert "gemm" in {layer["type"] for layer in plain.layers} and "gemm" not in kinds


def experts_of(
    function: ExpertFunction, choice: str, kind: str, width: int, inner: int
) -> tuple[onnx.ModelProto, Weights]:
    """A node of experts with quantised weights, and what these mean, by expert."""
    weights = drawn_experts(width, inner, function.gated)
    model = model_of(weights, function)
    to_grid, bits = KINDS[choice]
    made, matrices = {}, {}
    for found in find_experts(model, weights)[0]:
        assert found.experts
        weight = as_one_layer(found, found.experts)
        own = nearest(weight.matrix(weights[weight.name]), to_grid(weight, bits, kind))
        made[weight.name] = Chosen(weight, own, "nearest")
        matrices |= stored(weight, own.matrix(), weights)
    result = engines.engine_model(model, made)
    for value in (*result.graph.input, *result.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TYPES[kind]
    del result.functions[:]
    return result, matrices


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("choice", KINDS)
@pytest.mark.parametrize(
    "function",
    [
        ExpertFunction("silu", True),
        ExpertFunction("relu2", False),
        ExpertFunction("silu", True, 0.5, 0.25),
    ],
)
def test_experts_are_one_layer_of_the_quantised_values(
    function: ExpertFunction, choice: str, kind: str
) -> None:
    """Shares may be negative; blocks of the second product cross from expert to expert."""
    model, matrices = experts_of(function, choice, kind, 64, 48)
    given = routed(64)
    given["weight"][0, 0] *= -1
    typed = {n: a if n == "index" else a.astype(kind) for n, a in given.items()}
    wide = {n: a if n == "index" else a.astype(np.float64) for n, a in typed.items()}
    expected = mixture_of_experts(function, **wide, **matrices)
    options = onnxruntime.SessionOptions()
    for name, value in FLOAT_PRODUCTS.items():
        options.add_session_config_entry(name, value)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    [y] = session.run(None, typed)
    error = 1e-5 if kind == "float32" else 5e-3
    np.testing.assert_allclose(y, expected, atol=error * np.abs(expected).max())


@pytest.mark.parametrize("choice", KINDS)
def test_the_builder_keeps_experts_packed(rtx: Any, choice: str, tmp_path: Path) -> None:
    model, matrices = experts_of(ExpertFunction("silu", True), choice, "float16", 256, 256)
    found = built(model, [Profile("decode", {"n": (1, 1, 2)})], 89, tmp_path)
    values = sum(a.size for a in matrices.values())
    assert len(found.plan) < (0.75 if choice == "int4" else 1.2) * values  # 2 in fp16
    assert "gemm" not in {layer["type"] for layer in found.layers}


def test_one_row_alone_would_unpack_eight_bits(rtx: Any, tmp_path: Path) -> None:
    """Hence two in a profile; with a builder that has no need of them ``needs_pairs`` may go."""
    model, _ = quantised(drawn(4096, 256, 1024), "int8", "float16")
    found = built(model, [ONE], 89, tmp_path)
    assert "gemm" in {layer["type"] for layer in found.layers}


@pytest.fixture(scope="module")
def hybrid(
    rtx: Any, model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """``hybrid(weights)``: Qwen3.5 of a linear and a softmax layer and a tied head, fp16."""
    folder = tmp_path_factory.mktemp("engines")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}

    def make(weights: str) -> Path:
        place = folder / weights
        if not place.exists():
            linexport.convert(
                *(model_folder("qwen3_5_text", **sizes), place),
                target="tensorrt-rtx",
                precision="fp16",
                weights=weights,
                sms=(89,),
                dims=("batch=1:1:1", "seq=1:16:64"),
                bench=False,
                threads=1,
            )
        return place

    return make


@pytest.mark.services
@pytest.mark.parametrize("weights", ["int4", "fp8"])
def test_a_hybrid_has_its_proof_and_its_engine(weights: str, hybrid: Callable[[str], Path]) -> None:
    manifest = read(hybrid(weights))
    record = manifest.quantisation
    assert manifest.status == "ok" and record and record.passed
    assert record.divergence and record.drift and record.drift.tolerance == 5e-3
    assert 0 < record.divergence.mean < 0.1
    assert record.reference == "the fp16 artifact, computed in float32"
    assert {t.bits for t in record.tensors} == ({4, 8} if weights == "int4" else {8})
    (engine,) = manifest.engines
    assert engine.checked is None and engine.reason and "take fewer bits" in engine.reason
    assert not any(layer.type == "gemm" for layer in engine.layers)
    assert manifest.dims["seq"].max == 64
    assert manifest.files[engine.file].bytes == (hybrid(weights) / engine.file).stat().st_size
    artifact = linexport.load(hybrid(weights), engine=False)
    ids = np.random.default_rng(1).integers(3, 60, (1, 40))
    whole = artifact.run(ids)["logits"]
    stream = artifact.stream()
    parts = [stream.step(ids[:, a:b])["logits"] for a, b in ((0, 7), (7, 8), (8, 40))]
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=5e-3 * np.abs(whole).max())


@pytest.mark.services
def test_a_folder_is_prepared_with_them(converted: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="kernels are written in Triton: pip install triton")
    if TENSORRT.installed:
        pytest.skip("TensorRT is installed here")
    options = {"target": "tensorrt", "sms": (87,), "dims": ("seq=1:16:200",), "precision": "fp16"}
    before = read(converted("language_model", **options))
    found: Manifest = linexport.quantize(
        converted("language_model", **options), tmp_path / "q", weights="int8", threads=1
    )
    assert found.quantisation and found.quantisation.divergence and found.prepared
    assert before.prepared and found.prepared.loaders == before.prepared.loaders
    assert found.files.keys() == before.files.keys()
    with pytest.raises(UsageError, match=r"compute capability 8\.9 and later; sms names 8\.7"):
        linexport.quantize(converted("language_model", **options), tmp_path / "f", weights="fp8")


@pytest.mark.parametrize(
    ("weights", "sm", "said"),
    [
        (
            "fp8",
            87,
            r"fp8\" is for engines .* 8\.9 and later; sms names 8\.7. Use .*int4\" or int8",
        ),
        ("int4", 75, r"int4\" is for engines .* 8\.0 and later; sms names 7\.5. Use .*int8\" for"),
    ],
)
def test_gpus_without_such_weights_are_named(weights: str, sm: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_gpus("tensorrt", weights, (89, sm))
    check_gpus("ort-cuda", "int4", (sm,))


def test_the_command_refuses_them_before_it_loads(cli: Callable[..., Result]) -> None:
    given = ("--weights", "fp8", "--target", "tensorrt-rtx", "--sm", "rtx3090", "-o", "absent")
    result = cli("convert", "absent.pt", *given)
    assert result.code == 2 and "--sm names 8.6" in " ".join(result.err.split())
