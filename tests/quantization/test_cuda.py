"""Weights in fewer bits for ONNX Runtime on CUDA: values on a CPU, and what its kernels take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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
from linexport.quantization import quantisable
from linexport.quantization.block_quantisation import Grid, nearest
from linexport.quantization.choose_bits import Chosen
from linexport.quantization.cuda import cuda_model
from linexport.quantization.expert_products import without_kernel
from linexport.quantization.experts import find_experts
from linexport.targets.trt.precision import widen
from tests.quantization.test_experts import drawn, model_of, routed
from tests.support.command_line import Result

pytestmark = pytest.mark.usefixtures("one_thread")

HALF = {"fp16": "float16", "bf16": "bfloat16"}
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
PRODUCT = {"bits": {4, 8}, "block_size": {16, 32}, "accuracy_level": {0}}
"""What CUDA's MatMulNBits is given, of what it takes."""


def tied(width: int, kind: str) -> tuple[onnx.ModelProto, np.ndarray]:
    """A table that is looked up and multiplied with, and its values."""
    table = np.random.default_rng(width).standard_normal((50, width)).astype(kind)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Transpose", ["table"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["rows", "turned"], ["logits"]),
    ]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["b", "n"])
    outputs = [
        helper.make_tensor_value_info(name, TYPES[kind], ["b", "n", size])
        for name, size in (("rows", width), ("logits", 50))
    ]
    stored = numpy_helper.from_array(table, "table")
    graph = helper.make_graph(nodes, "g", [ids], outputs, [stored])
    opsets = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), table


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("width", [40, 44, 64, 96])
def test_a_tied_table_is_stored_once_looked_up_and_multiplied(width: int, kind: str) -> None:
    model, table = tied(width, kind)
    wide = table.astype(np.float32)
    [weight], _ = quantisable.find(model, {"table": wide})
    found = nearest(wide, Grid(8, 32, scales=kind))
    made = cuda_model(model, {"table": SimpleNamespace(weight=weight, quantised=found)})
    large = [t.name for t in made.graph.initializer if len(t.raw_data) >= 50 * width]
    assert large == ["table/values"]
    session = onnxruntime.InferenceSession(made.SerializeToString())
    ids = np.asarray([[3, 0, 49], [-1, 7, 7]])
    rows, logits = session.run(["rows", "logits"], {"ids": ids})
    assert rows.dtype == logits.dtype == np.dtype(kind)
    np.testing.assert_array_equal(rows, found.matrix()[ids].astype(kind))
    expected = rows.astype(np.float64) @ found.matrix().T.astype(np.float64)
    error = 1e-5 if kind == "float32" else 3e-3
    np.testing.assert_allclose(logits, expected, atol=error * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("magnitude", [1e-9, 1e-3, 1e3])
def test_scales_are_numbers_of_their_type_and_never_zero(magnitude: float, kind: str) -> None:
    """The smallest weights that float16 has are below its normal numbers."""
    drawn = np.random.default_rng(0).standard_normal((9, 100)) * magnitude
    matrix = drawn.astype(np.float32)
    matrix[3] = 0
    for bits in (4, 8):
        found = nearest(matrix, Grid(bits, 32, bits == 4, kind))
        own = found.packed()["scales"]
        assert str(own.dtype) == kind and own.astype(np.float32).all()
        np.testing.assert_array_equal(own.astype(np.float32), found.scales)
        assert np.isfinite(found.matrix()).all() and not found.matrix()[3].any()
        if kind == "bfloat16" or magnitude >= 1e-3:
            error = np.linalg.norm(found.matrix() - matrix) / np.linalg.norm(matrix)
            assert error < (0.1 if bits == 4 else 0.008)


def quantised(source: Any, place: Path, weights: str, **options: Any) -> Manifest:
    return linexport.convert(
        source, place, target="ort-cuda", weights=weights, bench=False, threads=1, **options
    )


@pytest.fixture(scope="module")
def hybrid(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3.5 with a linear and a softmax layer and a tied head, in fp16, for CUDA in int4."""
    place = tmp_path_factory.mktemp("cuda") / "q"
    source = model_folder("qwen3_5_text", tie_word_embeddings=True)
    quantised(source, place, "int4", precision="fp16")
    return place


def test_a_hybrid_with_a_tied_head_has_what_cuda_takes(hybrid: Path) -> None:
    manifest = read(hybrid)
    record = manifest.quantisation
    assert manifest.status == "ok" and record and record.divergence and record.drift
    assert (manifest.target, manifest.precision, record.weights) == ("ort-cuda", "fp16", "int4")
    assert record.reference == "the fp16 artifact, computed in float32"
    assert 0 < record.divergence.mean < 0.12 and record.passed  # 0.08 on the CPU target, too
    assert record.drift.tolerance == 5e-3
    model = onnx.load_model(str(hybrid / "model.onnx"))
    products = [n for n in model.graph.node if n.op_type == "MatMulNBits"]
    kinds = {t.name: t.data_type for t in model.graph.initializer}
    for node in products:
        found = {a.name: a.i for a in node.attribute}
        assert all(found[name] in allowed for name, allowed in PRODUCT.items())
        assert kinds[node.input[2]] == TensorProto.FLOAT16
    ops = Counter(n.op_type for n in model.graph.node)
    assert ops["GatherBlockQuantized"] == 1 and ops["MatMulNBits"] > 10
    read_by = Counter(name for n in model.graph.node for name in n.input if "/values" in name)
    assert max(read_by.values()) == 2  # the table's rows are the head's
    tables = {t.name for t in record.tensors if t.bits == 8}
    assert len(tables) == 1 and {t.bits for t in record.tensors} == {4, 8}


def test_the_hybrid_is_the_float_graph_with_dequantised_values(hybrid: Path) -> None:
    """Independently: every quantised node becomes the standard operator on float32 values."""
    artifact = linexport.load(hybrid, threads=1)
    model = onnx.load_model(str(hybrid / "model.onnx"))
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type not in ("MatMulNBits", "GatherBlockQuantized"):
            continue
        own = {a.name: a.i for a in node.attribute}
        looked_up = node.op_type == "GatherBlockQuantized"
        name, scales, *zeros = [node.input[i] for i in ((0, 2, 3) if looked_up else (1, 2))]
        zeros += node.input[3:4] if not looked_up else []
        matrix = dequantised(stored[name], stored[scales], stored.get(*zeros[:1] or [""]), own)
        weight = f"{node.output[0]}/float"
        rows = matrix if looked_up else np.ascontiguousarray(matrix[:, : own["K"]].T)
        half = rows.astype(np.float16)
        model.graph.initializer.append(numpy_helper.from_array(half, weight))
        given = [weight, node.input[1]] if looked_up else [node.input[0], weight]
        output = node.output[0]
        node.CopyFrom(helper.make_node("Gather" if looked_up else "MatMul", given, [output]))
    widen(model, TensorProto.FLOAT16)
    ids = np.random.default_rng(0).integers(3, 60, (1, 40))
    feeds = artifact.feeds(ids)
    wide = {n: v.astype(np.float32) if v.dtype == np.float16 else v for n, v in feeds.items()}
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(["logits"], wide)[0]
    got = artifact.run_graph(feeds)["logits"]
    np.testing.assert_allclose(got, expected, atol=5e-3 * np.abs(expected).max())


def dequantised(
    values: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, own: dict[str, int]
) -> np.ndarray:
    """Return (q - z) s, (N, K), in float32."""
    q = values if own["bits"] == 8 else np.stack([values & 15, values >> 4], -1)
    q = q.reshape(len(q), -1, own["block_size"]).astype(np.float32)
    z = np.float32(2 ** (own["bits"] - 1))
    if zeros is not None:
        z = zeros.reshape(len(q), -1, 1).astype(np.float32)
    return ((q - z) * scales.reshape(len(q), -1, 1).astype(np.float32)).reshape(len(q), -1)


def test_a_stream_of_the_hybrid_is_its_whole_sequence(hybrid: Path) -> None:
    artifact = linexport.load(hybrid, threads=1)
    ids = np.random.default_rng(1).integers(3, 60, (1, 40))
    whole = artifact.run(ids)["logits"]
    stream = artifact.stream()
    parts = [stream.step(ids[:, a:b])["logits"] for a, b in ((0, 7), (7, 8), (8, 40))]
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=5e-3 * np.abs(whole).max())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_precision_has_scales_of_its_type(
    precision: str, converted: Callable[..., Path], tmp_path: Path
) -> None:
    exact = converted("language_model", target="ort-cuda", precision=precision)
    made = linexport.quantize(exact, tmp_path / "q", weights="int8", threads=1)
    record = made.quantisation
    assert record and record.passed and record.divergence and record.divergence.mean < 1e-3
    model = onnx.load_model(str(tmp_path / "q" / "model.onnx"))
    scales = [numpy_helper.to_array(t) for t in model.graph.initializer if "/scales" in t.name]
    assert {str(s.dtype) for s in scales} == {HALF.get(precision, "float32")}
    ids = np.arange(40, dtype=np.int64)[None]
    outputs = [linexport.load(p, threads=1).run(ids)["output"] for p in (exact, tmp_path / "q")]
    np.testing.assert_allclose(*outputs[::-1], atol=0.05 * np.abs(outputs[0]).max())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("function", [ExpertFunction("silu", True), ExpertFunction("relu2", False)])
def test_experts_are_products_in_half_precision(function: ExpertFunction, bits: int) -> None:
    weights, given = drawn(64, 32, function.gated), routed(64)
    model = model_of(weights, function)
    made: dict[str, Chosen] = {}
    for weight in find_experts(model, weights)[0]:
        assert weight.experts
        own = without_kernel(weight, weight.experts)
        grid = Grid(bits, own.block, scales="float16")
        found = nearest(own.matrix(weights[own.name]), grid)
        made[own.name] = Chosen(own, found, "nearest")
    matrices = {n: c.quantised.matrix().reshape(weights[n].shape) for n, c in made.items()}
    half = {n: a.astype(np.float16) if a.dtype == np.float32 else a for n, a in given.items()}
    wide = {n: a if n == "index" else a.astype(np.float64) for n, a in half.items()}
    expected = mixture_of_experts(function, **wide, **matrices)
    result = cuda_model(model, made)
    for value in (*result.graph.input, *result.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    ops = {n.op_type for n in result.graph.node}
    assert "MatMulNBits" in ops and "QMoE" not in ops
    [y] = onnxruntime.InferenceSession(result.SerializeToString()).run(None, half)
    np.testing.assert_allclose(y, expected, atol=5e-3 * np.abs(expected).max())


@pytest.mark.slow
def test_a_model_of_experts_has_them_as_products(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    made = quantised(model_folder("qwen3_5_moe_text"), tmp_path / "q", "int4")
    record = made.quantisation
    assert made.status == "ok" and record and record.divergence
    assert 0 < record.divergence.mean < 0.15
    model = onnx.load_model(str(tmp_path / "q" / "model.onnx"))
    assert all(n.op_type != "QMoE" for n in model.graph.node)
    names = [t.name for t in model.graph.initializer if "experts" in t.name]
    assert any(name.endswith("/3/values") for name in names)
    assert {t.bits for t in record.tensors if "experts" in t.name} == {4}


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("fp16", "For ort-cuda there are int8, int4, auto. --precision fp16 computes in half"),
        ("keep", "--weights keep is for targets ort and onnx; found target ort-cuda"),
    ],
)
def test_weights_that_cuda_has_not_are_refused_at_once(
    weights: str, said: str, cli: Callable[..., Result], tmp_path: Path
) -> None:
    given = ("--weights", weights, "--target", "ort-cuda", "-o", tmp_path / "q")
    result = cli("convert", "absent.pt", *given)
    assert result.code == 2 and said in " ".join(result.err.split())


def test_packed_batches_are_refused(converted: Callable[..., Path], tmp_path: Path) -> None:
    packed = converted("language_model", target="ort-cuda", packed_batches=True)
    with pytest.raises(UsageError, match="takes packed batches, for which weights in fewer bits"):
        linexport.quantize(packed, tmp_path / "q")
