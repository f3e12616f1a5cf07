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
from linexport.parity.cases import Case, draw_inputs
from linexport.sources import load_model
from linexport.sources.factory import load_module
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


class AddedMask(torch.nn.Module):
    """Softmax attention under a mask that is added to its scores."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT + mask).softmax(-1) @ x


ADDED = {
    "-inf": torch.full((12, 12), -torch.inf).triu(1),
    "large": torch.full((12, 12), -1e9).triu(1),
    "no key is hidden": torch.zeros(12, 12),
    "keys": torch.full((3, 1, 12), -1e9) * (torch.arange(12) > 9),
}


@pytest.mark.parametrize("kind", ADDED)
def test_a_mask_that_is_added_is_drawn_of_zeros_and_what_excludes(kind: str) -> None:
    example = ADDED[kind]
    loaded = load_module((AddedMask(), (torch.randn(3, 12, 8), example)), "added:mask")
    shape = ["batch", 1, "seq"] if kind == "keys" else ["seq", "seq"]
    found = {}
    for seed in (2, 3):
        case = Case("random", {"batch": 3, "seq": 40}, seed)
        x, mask = draw_inputs(loaded, [["batch", "seq", 8], shape], case)[0]
        assert isinstance(mask, torch.Tensor)
        found[seed] = mask
        assert 0.1 < float((mask <= -1e4).float().mean()) < 0.3 and float(mask.max()) <= 0
        assert float(mask.min()) == (float(example.min()) or -1e4)
        assert loaded.module(x, mask).isfinite().all()
    kept = {seed: mask[mask > -1e4] for seed, mask in found.items()}
    assert not kept[2].any() and 0.1 < float(-kept[3].mean()) < 0.5, "and one with weights"


HELD = {
    "signs": torch.ones(12, 12).triu(1) * 2 - 1,
    "excluded above a bias": torch.full((12, 12), -torch.inf).triu(1) + 0.5,
    "weights above one": torch.ones(12, 12).tril() * 2,
    "decays": 0.5 ** (torch.arange(12.0)[:, None] - torch.arange(12)).clamp(min=0),
}


@pytest.mark.parametrize("kind", HELD)
def test_a_mask_of_other_values_than_zero_and_one_is_drawn_of_its_example(kind: str) -> None:
    """They were drawn 0 and 1, of which a rewrite for masks that select is right."""
    example = HELD[kind]
    loaded = load_module((AddedMask(), (torch.randn(3, 12, 8), example)), "held:mask")
    for seed in (2, 3):
        case = Case("random", {"batch": 3, "seq": 40}, seed)
        x, mask = draw_inputs(loaded, [["batch", "seq", 8], ["seq", "seq"]], case)[0]
        assert isinstance(mask, torch.Tensor) and mask.shape == (40, 40)
        assert set(mask.unique().tolist()) == set(example.unique().tolist())
        assert set(mask.diagonal().tolist()) == set(example.diagonal().tolist())
        assert loaded.module(x, mask).isfinite().all()


@pytest.mark.parametrize(
    "function", [lambda x, m: (x @ x.transpose(1, 2) + m).softmax(-1) @ x, lambda x, m: m @ x + x]
)
def test_a_mask_that_a_file_adds_before_a_softmax_is_drawn_so(
    tmp_path: Path, function: Any
) -> None:
    class Masked(torch.nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return function(x, mask)

    axes = {"x": {0: "n", 1: "l"}, "mask": {0: "l", 1: "l"}}
    given = torch.randn(3, 12, 8), ADDED["-inf"]
    path = tmp_path / "added.onnx"
    torch.onnx.export(
        Masked(), given, path, dynamo=False, input_names=list(axes), dynamic_axes=axes
    )
    loaded = load_model(path)
    assert loaded.graph is not None
    case = Case("random", {"n": 3, "l": 40}, 2)
    mask = draw_inputs(loaded, loaded.graph.shapes, case)[0][1]
    assert isinstance(mask, torch.Tensor)
    softmax = "Softmax" in {node.op_type for node in onnx.load(path).graph.node}
    assert float(mask.min()) == (-1e4 if softmax else 0) and float(mask.max()) == (1 - softmax)


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
