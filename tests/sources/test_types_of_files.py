"""ONNX files that are quantised, or in other floating-point types than float32, converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization

import linexport

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 32
node = helper.make_node


def weight(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return (np.random.default_rng(sum(shape)).standard_normal(shape) * 0.3).astype(dtype)


def attention(sums: int = TensorProto.FLOAT) -> list[onnx.NodeProto]:
    """relu(q) against the running sum of relu(k) v, which is added up in the type ``sums``."""
    return [
        node("Relu", ["q0"], ["q"]),
        node("Relu", ["k0"], ["k"]),
        node("Unsqueeze", ["k", "three"], ["k4"]),
        node("Unsqueeze", ["v", "two"], ["v4"]),
        node("Mul", ["k4", "v4"], ["kv"]),
        node("Cast", ["kv"], ["kv32"], to=sums),
        node("CumSum", ["kv32", "one"], ["s32"]),
        node("CastLike", ["s32", "kv"], ["s"]),
        node("Unsqueeze", ["q", "two"], ["q4"]),
        node("MatMul", ["q4", "s"], ["y4"]),
        node("Squeeze", ["y4", "two"], ["y"]),
    ]


def file(
    path: Path,
    opset: int,
    nodes: list[onnx.NodeProto],
    kind: int = TensorProto.FLOAT,
    **constants: np.ndarray,
) -> Path:
    constants |= {"one": np.array(1), "two": np.array([2]), "three": np.array([3])}
    read = {name for n in nodes for name in n.input}
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", kind, ["B", "T", WIDTH])],
        [value("y", kind, ["B", "T", WIDTH])],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items() if k in read],
    )
    imports = [helper.make_opsetid("", opset)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), path)
    return path


def products(x: str = "x") -> list[onnx.NodeProto]:
    return [node("MatMul", [x, f"w{c}"], [name]) for c, name in (("q", "q0"), ("k", "k0"))] + [
        node("MatMul", [x, "wv"], ["v"])
    ]


WEIGHTS = {f"w{c}": weight(WIDTH, WIDTH) for c in "qkv"}
LEVELS = np.random.default_rng(0).integers(-7, 8, (WIDTH, WIDTH))
SCALES = weight(WIDTH) ** 2 + np.float32(0.01)
BLOCKS = weight(WIDTH // 16, WIDTH) ** 2 + np.float32(0.01)

QUANTISED: dict[str, tuple[int, dict[str, Any], dict[str, int]]] = {
    "axis 13": (15, {"levels": LEVELS.astype(np.int8), "scales": SCALES}, {"axis": 1}),
    "axis 17": (17, {"levels": LEVELS.astype(np.int8), "scales": SCALES}, {"axis": 1}),
    "uint8 18": (18, {"levels": (LEVELS + 7).astype(np.uint8), "scales": np.float32(0.1)}, {}),
    "float8 19": (
        19,
        {"levels": weight(WIDTH, WIDTH, dtype=ml_dtypes.float8_e4m3fn), "scales": np.float32(0.5)},
        {},
    ),
    "blocks of int4 21": (
        21,
        {"levels": LEVELS.astype(ml_dtypes.int4), "scales": BLOCKS},
        {"axis": 0, "block_size": 16},
    ),
    "blocks 25": (
        25,
        {"levels": LEVELS.astype(np.int8), "scales": BLOCKS},
        {"block_size": 16, "axis": 0},
    ),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_quantised_file_converts(kind: str, tmp_path: Path) -> None:
    """Tokens are quantised, and one weight; both as the operators say, compared in float64 too."""
    opset, stored, attributes = QUANTISED[kind]
    numbers = {"step": np.float32(0.02), "zero": np.int8(3)}
    nodes = [
        node("QuantizeLinear", ["x", "step", "zero"], ["x8"]),
        node("DequantizeLinear", ["x8", "step", "zero"], ["xd"]),
        node("DequantizeLinear", ["levels", "scales"], ["wq"], **attributes),
        *products("xd"),
        *attention(),
    ]
    given = {k: v for k, v in WEIGHTS.items() if k != "wq"}
    source = file(tmp_path / "q.onnx", opset, nodes, **given, **stored, **numbers)
    manifest = linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.fused["LinearAttention"] == 1
    assert manifest.streaming.passed
    assert {c.reference for c in manifest.parity.cases} == {"float32", "float64"}


class Heads(torch.nn.Module):
    """Causal linear attention of two heads, its tokens reshaped before they are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(2, (2, -1)).transpose(1, 2) for p in self.parts[:3])
        q, k = q.sigmoid(), k.sigmoid()
        sums = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)
        y = (q.unsqueeze(-2) @ sums).squeeze(-2) / (q * k.cumsum(2)).sum(-1, keepdim=True)
        return self.parts[3](y.transpose(1, 2).flatten(2))


class Calibration(quantization.CalibrationDataReader):
    """Two batches of tokens."""

    def __init__(self, name: str) -> None:
        self.batches = [{name: weight(2, 40, WIDTH) * n} for n in (1, 3)]

    def get_next(self) -> Any:
        return self.batches.pop() if self.batches else None


def test_a_file_of_the_quantiser_of_onnx_runtime_converts_and_opens(tmp_path: Path) -> None:
    """Quantised in front of every operator. ONNX Runtime ended the process on such an artifact."""
    torch.manual_seed(0)
    plain, path = tmp_path / "plain.onnx", tmp_path / "static.onnx"
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
    x = torch.randn(2, 40, WIDTH)
    torch.onnx.export(
        Heads().eval(),
        (x,),
        plain,
        dynamo=True,
        dynamic_shapes=(sizes,),
        external_data=False,
        verbose=False,
    )
    reader = Calibration(onnx.load(plain).graph.input[0].name)
    quantization.quantize_static(plain, path, reader, activation_type=quantization.QuantType.QInt8)
    manifest = linexport.convert(path, tmp_path / "artifact", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.streaming.passed
    session = onnxruntime.InferenceSession(
        tmp_path / "artifact/model.onnx", providers=["CPUExecutionProvider"]
    )
    assert len(session.get_inputs()) == 1 + len(manifest.states)


@pytest.mark.parametrize(
    ("kind", "dtype", "sums", "given"),
    [
        (TensorProto.FLOAT16, np.float16, TensorProto.FLOAT, "float16"),
        (TensorProto.FLOAT16, np.float16, TensorProto.FLOAT16, "float16"),
        (TensorProto.BFLOAT16, ml_dtypes.bfloat16, TensorProto.FLOAT, "float32"),
    ],
    ids=["float16, float32 inside", "float16", "bfloat16"],
)
def test_a_file_in_half_precision_converts(
    tmp_path: Path, kind: int, dtype: Any, sums: int, given: str
) -> None:
    """float16 as it is, compared in three precisions; bfloat16 in float32, as CPUs compute it."""
    weights = {name: value.astype(dtype) for name, value in WEIGHTS.items()}
    source = file(tmp_path / "h.onnx", 20, [*products(), *attention(sums)], kind, **weights)
    manifest = linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.fused["LinearAttention"] == 1
    assert manifest.streaming.passed
    assert [t.dtype for t in (*manifest.inputs[:1], *manifest.outputs[:1])] == [given, given]
    precisions = {"float32", "float64", given}
    assert {c.reference for c in manifest.parity.cases} == precisions
    assert any("in bfloat16" in w for w in manifest.warnings) == (given == "float32")
    if given == "float16":
        own = [c for c in manifest.parity.cases if c.magnitude == 1]
        assert all(c.rounding > 0 for c in own) and max(c.length for c in own) == 150
        assert any("overflows in float16 on the random inputs" in w for w in manifest.warnings)


def test_an_error_in_half_precision_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An artifact that is off by several times what half precision loses is not the file."""
    from linexport.sources.onnx_file import module

    weights = {name: value.astype(np.float16) for name, value in WEIGHTS.items()}
    source = file(
        tmp_path / "h.onnx", 20, [*products(), *attention()], TensorProto.FLOAT16, **weights
    )
    forward = module.OnnxModule.forward

    def off(self: Any, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(y * 1.02 for y in forward(self, *args))

    monkeypatch.setattr(module.OnnxModule, "forward", off)
    manifest = linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)
    assert manifest.status == "parity_failed"


def test_a_file_in_float64_keeps_its_precision(tmp_path: Path) -> None:
    weights = {name: value.astype(np.float64) for name, value in WEIGHTS.items()}
    nodes = [*products(), *attention(TensorProto.DOUBLE)]
    source = file(tmp_path / "d.onnx", 20, nodes, TensorProto.DOUBLE, **weights)
    manifest = linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)
    assert manifest.status == "ok"
    x = np.random.default_rng(0).standard_normal((1, 9, WIDTH))
    [got] = linexport.load(manifest.artifact).run(x).values()
    options = onnxruntime.SessionOptions()
    session = onnxruntime.InferenceSession(source, options, ["CPUExecutionProvider"])
    [expected] = session.run(None, {"x": x})
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def quantised_twice(path: Path) -> Path:
    """Weights and tokens in 8 bits, and the output, as files of quantisers are."""
    numbers = {"step": np.float32(0.05), "zero": np.int8(0), "scales": np.float32(0.01)}
    nodes = [
        node("QuantizeLinear", ["x", "step", "zero"], ["x8"]),
        node("DequantizeLinear", ["x8", "step", "zero"], ["xd"]),
        node("DequantizeLinear", ["levels", "scales"], ["wq"]),
        *products("xd"),
        *attention()[:-1],
        node("Squeeze", ["y4", "two"], ["sums"]),
        node("QuantizeLinear", ["sums", "wide", "zero"], ["y8"]),
        node("DequantizeLinear", ["y8", "wide", "zero"], ["y"]),
    ]
    given = {k: v for k, v in WEIGHTS.items() if k != "wq"}
    levels = LEVELS.astype(np.int8)
    return file(path, 17, nodes, **given, **numbers, levels=levels, wide=np.float32(4.0))


def test_values_between_two_steps_may_go_to_either(tmp_path: Path) -> None:
    """Sums in another order turn some of a hundred thousand: by one step of the output, no more."""
    source = quantised_twice(tmp_path / "q.onnx")
    manifest = linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.parity.tolerance.dtype == "int8"
    errors = [c.max_absolute_error for c in manifest.parity.cases if c.reference == "float32"]
    assert set(np.round(errors, 3)) <= {0.0, 4.0}
    again = linexport.validate(manifest.artifact, source=source)
    assert again.status == "ok" and again.parity.tolerance.dtype == "int8"


def test_three_steps_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from linexport.sources.onnx_file import module

    forward = module.OnnxModule.forward

    def off(self: Any, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(y + 12.0 * (y > 0) for y in forward(self, *args))

    source = quantised_twice(tmp_path / "q.onnx")
    monkeypatch.setattr(module.OnnxModule, "forward", off)
    manifest = linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)
    assert manifest.status == "parity_failed"
