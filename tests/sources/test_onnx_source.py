"""ONNX files the whole way: what they become, what they are compared with and measured beside."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import parser
from torch import nn

import linexport
from linexport import trace
from linexport.errors import UnsupportedModelError
from linexport.plugins.ops.registry import known_shapes
from linexport.sources import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

Manifest = dict[str, Any]


class Block(nn.Module):
    """Elementwise operators, reductions and normalisation: what operator sets have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(ids))
        y = nn.functional.gelu(self.out(x)) / (x.relu().sum(-1, keepdim=True) + 1e-15)
        return y.unsqueeze(2).squeeze(2) + x.mean(1, keepdim=True)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``exported(opset, dynamo, external)``: the same module as such a file."""
    folder = tmp_path_factory.mktemp("onnx")
    torch.manual_seed(0)
    module, ids = Block().eval(), torch.randint(30, (2, 12))

    def export(opset: int, dynamo: bool, external: bool = False) -> Path:
        path = folder / f"{opset}-{dynamo}-{external}" / "m.onnx"
        path.parent.mkdir(exist_ok=True)
        options: dict[str, Any] = {"opset_version": opset, "input_names": ["ids"]}
        if dynamo:
            sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
            options |= {"dynamic_shapes": (sizes,), "external_data": external, "verbose": False}
        else:
            options |= {"dynamic_axes": {"ids": {0: "batch", 1: "seq"}}, "output_names": ["y"]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(module, (ids,), str(path), dynamo=dynamo, **options)
        return path

    return export


@pytest.fixture
def convert(tmp_path: Path) -> Callable[..., Manifest]:
    def run(source: Path, **options: Any) -> Manifest:
        settings = {"bench": False, "threads": 1, **options}
        return linexport.convert(source, tmp_path / "artifact", **settings)

    return run


@pytest.mark.parametrize(
    ("opset", "dynamo", "external"),
    [(13, False, False), (17, False, False), (18, True, True), (23, True, False)],
)
def test_files_of_every_exporter_and_operator_set(
    exported: Callable[..., Path],
    convert: Callable[..., Manifest],
    tmp_path: Path,
    opset: int,
    dynamo: bool,
    external: bool,
) -> None:
    path = exported(opset, dynamo, external)
    assert (path.parent / "m.onnx.data").exists() == external
    manifest = convert(path)
    assert manifest.status == "ok"
    assert manifest.source.kind == "onnx"
    assert list(manifest.dims) == ["batch", "seq"]
    assert manifest.parity.lengths == (1, 37, 100, 150, 4097)
    assert {c.reference for c in manifest.parity.cases} == {"float32"}
    assert any("float64" in warning for warning in manifest.warnings)
    model = onnx.load(str(tmp_path / "artifact/model.onnx"))
    assert model.opset_import[0].version == max(opset, 18)
    expected = load_model(path).module(torch.randint(30, (3, 5)))[0]
    assert expected.shape == (3, 5, 8)
    assert not any(
        p.key.startswith("pkg.") for node in model.graph.node for p in node.metadata_props
    )


def test_the_artifact_stands_on_its_own(
    exported: Callable[..., Path], convert: Callable[..., Manifest], tmp_path: Path
) -> None:
    """Weights beside the original are in the artifact."""
    path = exported(18, True, True)
    ids = np.arange(6).reshape(2, 3)
    expected = load_model(path).module(torch.from_numpy(ids))[0]
    moved = tmp_path / "source"
    path.parent.rename(moved)
    manifest = convert(moved / "m.onnx")
    moved.rename(path.parent)
    got = linexport.load(manifest.artifact).run(ids)
    np.testing.assert_allclose(*got.values(), expected.numpy(), rtol=1e-5, atol=1e-6)


def test_it_is_measured_beside_the_file_itself(
    exported: Callable[..., Path], convert: Callable[..., Manifest]
) -> None:
    manifest = convert(exported(17, False), bench="full", lengths=(8,))
    row = manifest.latency[0]
    assert row.artifact_ms > 0 and row.plain_export_ms > 0
    assert row.pytorch_ms is None
    assert "without a PyTorch module" in row.reasons["pytorch"]
    assert manifest.memory[0].plain_export_mb is not None
    assert "without a PyTorch module" in manifest.memory[0].reasons["pytorch"]
    again = linexport.validate(manifest.artifact)
    assert again.status == "ok"


def test_a_range_is_asked_for_by_the_name_the_file_has(
    exported: Callable[..., Path], convert: Callable[..., Manifest]
) -> None:
    manifest = convert(exported(17, False), dims=["seq=1:20:64"])
    assert manifest.dims["seq"].max == 64
    assert max(manifest.parity.lengths) == 64


def test_a_changed_original_is_noticed(
    exported: Callable[..., Path], convert: Callable[..., Manifest], tmp_path: Path
) -> None:
    manifest = convert(exported(17, False))
    with pytest.raises(linexport.errors.UsageError, match="not the model the artifact was made"):
        linexport.validate(manifest.artifact, source=exported(18, True, True))


def test_the_first_difference_is_named(
    exported: Callable[..., Path],
    convert: Callable[..., Manifest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the original graph and the artifact's, whose values have the same names."""
    from linexport.conversion import write_model

    right = write_model.lower

    def wrong(model: onnx.ModelProto, *options: Any) -> Any:
        lowered, choices = right(model, *options)
        node = next(n for n in lowered.graph.node if n.op_type == "Erf")
        node.op_type = "Tanh"
        return lowered, choices

    monkeypatch.setattr(write_model, "lower", wrong)
    manifest = convert(exported(17, False))
    assert manifest.status == "parity_failed"
    assert manifest.parity.first_divergence.op == "Tanh"


def test_sizes_are_seen_by_running(tmp_path: Path) -> None:
    """Whatever the file calls them."""
    signature = "(float[N, T] x, float[N, S] z) => (float[p] flat, float[q, r] y, float[2] c)"
    text = f"""<ir_version: 8, opset_import: ["" : 18]> g {signature} {{
        shape = Constant <value = int64[1] {{-1}}> ()
        flat = Reshape(x, shape)
        longer = Concat <axis = 1> (x, x, z)
        y = Transpose(z)
        pads = Constant <value = int64[4] {{0, 2, 0, 1}}> ()
        padded = Pad(z, pads)
        found = NonZero(x)
        c = Constant <value = float[2] {{1, 2}}> ()
    }}"""
    (tmp_path / "m.onnx").write_bytes(parser.parse_model(text).SerializeToString())
    shapes = known_shapes(trace.trace(load_model(tmp_path / "m.onnx")).model)
    assert shapes["flat"] == ("N*T",)
    assert shapes["y"] == ("S", "N")
    assert shapes["c"] == (2,)
    assert shapes["padded"] == ("N", "S + 3")
    assert shapes["longer"] == ("N", None)
    assert "found" not in shapes


def test_a_size_that_changes_in_steps_is_not_fixed(tmp_path: Path) -> None:
    """100 tokens and 101 are as many chunks of 64."""
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[N, T] x) => (float[n, c, k] y) {
        zero = Constant <value = int64[2] {0, 0}> ()
        size = Constant <value = int64[1] {64}> ()
        length = Shape <start = 1, end = 2> (x)
        negative = Neg(length)
        missing = Mod(negative, size)
        pads = Concat <axis = 0> (zero, zero, missing)
        behind = Constant <value = int64[4] {0, 1, 2, 4}> ()
        four = Gather(pads, behind)
        padded = Pad(x, four)
        chunks = Constant <value = int64[3] {0, -1, 64}> ()
        y = Reshape(padded, chunks)
    }"""
    (tmp_path / "m.onnx").write_bytes(parser.parse_model(text).SerializeToString())
    shapes = known_shapes(trace.trace(load_model(tmp_path / "m.onnx")).model)
    assert shapes["y"] == ("N", None, 64)
    assert shapes["padded"] == ("N", None)


def test_an_operator_set_that_cannot_be_raised_is_refused(
    exported: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
        raise RuntimeError("No Adapter From Version 17 for Erf")

    loaded = load_model(exported(17, False))
    monkeypatch.setattr("onnx.version_converter.convert_version", fail)
    with pytest.raises(UnsupportedModelError, match=r"opset 17.*cannot raise it to the 18.*Erf"):
        trace.trace(loaded)


def test_an_image_is_not_tried_at_sizes_nobody_has(
    convert: Callable[..., Manifest], tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 1, height, width] x) => (float[a, b, c, d] y) { y = Relu(x) }"""
    path.write_bytes(parser.parse_model(text).SerializeToString())
    manifest = convert(path)
    assert manifest.status == "ok"
    assert manifest.parity.lengths == (1, 37, 100, 150, 511)
    assert manifest.outputs[0].shape == ("n", 1, "height", "width")


def test_the_command_line_says_what_is_wrong(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"\x08\x08\x12\x05")
    result = cli("convert", tmp_path / "m.onnx", "-o", tmp_path / "out", "--json")
    assert result.code == 4
    assert "m.onnx" in result.json()["message"] and "Traceback" not in result.err
    assert not (tmp_path / "out").exists()
