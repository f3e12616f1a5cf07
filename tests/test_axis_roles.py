"""Which axis is the batch and which the tokens, where the order or the names do not say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import linexport
from linexport.graph.dims import batch_dims
from linexport.loaders import load_model
from linexport.parity.cases import Case, draw_inputs
from tests.support.factories import small_models

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.services
@pytest.mark.parametrize(
    ("name", "tokens", "rows"),
    [("time_first", "seq", "batch"), ("time_first_named", "time", "rows")],
)
def test_models_with_the_time_first_are_checked_at_lengths_and_stream(
    converted: Callable[..., Path], factories: Any, name: str, tokens: str, rows: str
) -> None:
    artifact = linexport.load(converted(name), threads=1)
    manifest = artifact.manifest
    assert manifest.status == "ok" and manifest.fused["LinearAttention"] == 1
    assert manifest.inputs[0].shape == (tokens, rows, 8)
    assert manifest.outputs[0].shape == (tokens, rows, 8)
    assert {n for n, limits in manifest.dims.items() if limits.batch} == {rows}
    assert {case.sizes[rows] for case in manifest.parity.cases} == {1, 3}
    assert {1, 37, 150, 4097} <= {case.sizes[tokens] for case in manifest.parity.cases}
    x = torch.randn(33, 2, 8)
    expected = load_model(factories.source(name)).module(x).detach().numpy()
    stream = artifact.stream()
    pieces = [stream.step(x[i : i + n].numpy())["output"] for i, n in ((0, 20), (20, 1), (21, 12))]
    np.testing.assert_allclose(np.concatenate(pieces), expected, rtol=2e-4, atol=1e-5)


@pytest.mark.services
@pytest.mark.parametrize(
    ("name", "tokens", "rows"),
    [
        ("time_first_both_ways", "seq", "batch"),
        ("time_first_both_ways_named", "time", "rows"),
    ],
)
def test_without_states_the_tokens_are_those_of_the_fused_op(
    converted: Callable[..., Path], factories: Any, name: str, tokens: str, rows: str
) -> None:
    artifact = linexport.load(converted(name), threads=1)
    manifest = artifact.manifest
    assert manifest.status == "ok" and manifest.fused == {"LinearAttention": 1}
    assert manifest.inputs[0].shape == manifest.outputs[0].shape == (tokens, rows, 8)
    assert {n for n, limits in manifest.dims.items() if limits.batch} == {rows}
    assert {case.sizes[rows] for case in manifest.parity.cases} == {1, 3}
    assert {1, 37, 150, 4097} <= {case.sizes[tokens] for case in manifest.parity.cases}
    x = torch.randn(33, 2, 8)
    expected = load_model(factories.source(name)).module(x).detach().numpy()
    found = artifact.run(x.numpy())["output"]
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)


@pytest.mark.services
def test_where_ops_go_along_both_dimensions_the_batch_is_the_first(
    converted: Callable[..., Path],
) -> None:
    manifest = linexport.load(converted("rows_and_tokens"), threads=1).manifest
    assert manifest.status == "ok" and manifest.fused == {"LinearAttention": 2}
    assert manifest.inputs[0].shape == ("batch", "seq", 8)
    assert manifest.dims["batch"].batch and not manifest.dims["seq"].batch


@pytest.mark.services
def test_ranges_of_such_a_model_are_those_of_its_names(converted: Callable[..., Path]) -> None:
    place = converted("time_first", dims=("seq=1:64:128", "batch=1:2:4"))
    dims = linexport.load(place, threads=1).manifest.dims
    assert (dims["seq"].max, dims["seq"].batch) == (128, False)
    assert (dims["batch"].max, dims["batch"].batch) == (4, True)


@pytest.mark.parametrize(
    ("axes", "batch"),
    [
        ({"n": {0}, "l": {0, 1}}, {"n"}),  # a mask (l, l) beside (n, l, c)
        ({"n": {0}, "l": {1}}, {"n"}),
        ({"l": {0, 1}}, set()),
        ({"l": {0}}, set()),
        ({"a": {0}, "b": {0}}, set()),
        ({"batch_size": {0, 1}, "l": {0}}, {"batch_size"}),
    ],
)
def test_the_batch_leads_and_is_nowhere_else(axes: Any, batch: set[str]) -> None:
    assert batch_dims(axes) == batch


def exported(path: Path, names: bool) -> Path:
    """A mask (L, L) beside (N, L, C), with a name for every size of each input, or none at all."""
    torch.onnx.export(
        *small_models.square_mask(),
        path,
        dynamo=False,
        input_names=["x", "mask"],
        dynamic_axes={"x": [0, 1], "mask": [0, 1]},
    )
    if not names:
        model = onnx.load(path)
        for value in model.graph.input:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.ClearField("dim_param")
        onnx.save(model, path)
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("names", "shapes"),
    [
        (False, [("batch", "seq", 8), ("seq", "seq")]),
        (
            True,
            [
                ("x_dynamic_axes_1", "x_dynamic_axes_2", 8),
                ("x_dynamic_axes_2", "x_dynamic_axes_2"),
            ],
        ),
    ],
    ids=["no names", "a name each"],
)
def test_a_square_mask_has_the_length_twice(tmp_path: Path, names: bool, shapes: Any) -> None:
    loaded = load_model(exported(tmp_path / "masked.onnx", names))
    assert loaded.graph is not None
    assert [tuple(shape) for shape in loaded.graph.shapes] == shapes
    batch, length = shapes[0][:2]
    dims = loaded.graph.dims
    assert (dims[batch].batch, dims[length].batch) == (True, False)
    for seed in (2, 3):  # as a mask: zeros, and each token sees itself
        case = Case("random", {batch: 3, length: 40}, seed)
        mask = draw_inputs(loaded, loaded.graph.shapes, case)[0][1]
        assert isinstance(mask, torch.Tensor)
        assert mask.shape == (40, 40) and bool((mask.diagonal() > 0).all())
        assert 0.1 < float((mask == 0).float().mean()) < 0.3 and float(mask.min()) == 0


def test_equal_sizes_are_found_for_other_inputs_too(tmp_path: Path) -> None:
    """Tokens and their mask, (B, T) each, with a name for every size."""
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, sizes)
        for name, sizes in (("x", ["a", "b"]), ("m", ["c", "d"]), ("y", ["a", "d"]))
    ]
    node = onnx.helper.make_node("MatMul", ["x", "m"], ["y"])
    graph = onnx.helper.make_graph([node], "g", values[:2], values[2:])
    opsets = [onnx.helper.make_opsetid("", 20)]
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "m.onnx"
    )
    found = load_model(tmp_path / "m.onnx").graph
    assert found is not None and [tuple(s) for s in found.shapes] == [("a", "b"), ("b", "d")]
