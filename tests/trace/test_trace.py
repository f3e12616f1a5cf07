"""Tracing: dynamic dimensions stay so or are refused, epsilons survive, no local path leaks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import linexport
from linexport import trace
from linexport.errors import BuildError, UnsupportedModelError
from linexport.plugins.ops.registry import known_shapes
from linexport.sources import load_model
from linexport.sources.factory import load_module

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def traced(factories: SimpleNamespace) -> Callable[[str], trace.Traced]:
    return lambda name: trace.trace(load_model(factories.source(name)))


def test_batch_and_length_are_dynamic_without_being_asked(
    traced: Callable[[str], trace.Traced],
) -> None:
    found = traced("small")
    assert list(found.dims) == ["batch", "seq"]
    assert [d.batch for d in found.dims.values()] == [True, False]
    assert all((d.min, d.max) == (1, None) for d in found.dims.values())
    assert found.example_sizes == {"batch": 2, "seq": 16}
    shapes = known_shapes(found.model)
    assert shapes["x"] == shapes["output"] == ("batch", "seq", 8)


@pytest.mark.parametrize(("name", "line"), [("table", "doubled + self.table")])
def test_a_frozen_length_is_refused_with_the_line_that_freezes_it(
    factories: SimpleNamespace, traced: Callable[[str], trace.Traced], name: str, line: str
) -> None:
    source = factories.path.read_text().splitlines()
    number = next(i for i, text in enumerate(source, 1) if line in text)
    with pytest.raises(UnsupportedModelError) as error:
        traced(name)
    assert f"{factories.path}:{number}: {source[number - 1].strip()}" in str(error.value)
    assert "constant (16)" in str(error.value)


def test_what_torch_cannot_trace_is_a_build_error_at_its_line(
    factories: SimpleNamespace, traced: Callable[[str], trace.Traced]
) -> None:
    with pytest.raises(BuildError, match=r"if x\.sum\(\) > 0:") as error:
        traced("branch")
    assert str(factories.path) in str(error.value)


def test_a_tiny_epsilon_survives(converted: Callable[..., Path]) -> None:
    artifact = linexport.load(converted("epsilon"), threads=1)
    zeros = np.zeros((2, 5, 8), np.float32)
    assert np.array_equal(artifact.run(zeros)["output"], zeros)
    negative = np.full((2, 5, 8), -1e-18, np.float32)
    expected = (torch.from_numpy(negative) / 1e-15).numpy()
    assert np.allclose(artifact.run(negative)["output"], expected, rtol=1e-5)


def test_the_users_names_and_limits_are_kept(
    converted: Callable[..., Path], manifest_of: Callable[[Path], dict]
) -> None:
    manifest = manifest_of(converted("named"))
    assert list(manifest.dims) == ["items", "steps"]
    assert manifest.dims["steps"].max == 512
    assert max(manifest.parity.lengths) == 512
    assert {c.sizes["items"] for c in manifest.parity.cases} == {1, 3}
    assert manifest.inputs[0].shape == ("items", "steps", 8)
    graph = onnx.load_model(converted("named") / "model.onnx").graph
    dims = [d.dim_param or d.dim_value for d in graph.output[0].type.tensor_type.shape.dim]
    assert dims == ["items", "steps", 8]
    artifact = linexport.load(converted("named"), threads=1)
    with pytest.raises(linexport.errors.UsageError, match="at most 512"):
        artifact.run(np.zeros((1, 513, 8), np.float32))


def test_two_lengths_get_two_names(tmp_path: Path) -> None:
    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.sum(1) + y.sum(1)

    loaded = load_model_of(Two(), (torch.randn(2, 4, 8), torch.randn(2, 6, 8)))
    assert trace.trace(loaded).example_sizes == {"batch": 2, "seq": 4, "seq_2": 6}


def test_an_unbatched_sequence_is_no_batch() -> None:
    dim = torch.export.Dim("steps")
    loaded = load_model_of(torch.nn.Linear(8, 8), (torch.randn(5, 8),), ({0: dim},))
    assert not trace.trace(loaded).dims["steps"].batch


def test_no_local_path_is_left_in_the_model(
    factories: SimpleNamespace,
    converted: Callable[..., Path],
    traced: Callable[[str], trace.Traced],
) -> None:
    written = (converted("language_model") / "model.onnx").read_bytes()
    for data in (written, traced("language_model").model.SerializeToString()):
        for secret in (str(factories.folder), "small_models", "site-packages", "models/attention"):
            assert secret.encode() not in data


def test_nodes_are_named_after_their_submodules(traced: Callable[[str], trace.Traced]) -> None:
    nodes = [n.name for n in traced("language_model").model.graph.node if n.domain == "linexport"]
    assert "blocks.0.attention/LinearAttention" in nodes
    assert "blocks.1.conv/CausalConvWithState" in nodes
    assert len(nodes) == len(set(nodes)) == 8


class Clashing(torch.nn.Module):
    """Parameters called like torch's own names of values, and like linexport's outputs."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("linear", "val_0", "output_0", "weight"):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(8, 8)))

    def forward(self, output_1: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.nn.functional.linear(output_1, self.weight) @ self.linear @ self.val_0
        y = y @ self.output_0
        return y, y.relu(), y, output_1, self.output_0


def test_every_value_has_a_name_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Clashing(), torch.randn(2, 4, 8)
    model = trace.trace(load_model_of(module, (x,))).model
    onnx.checker.check_model(model, full_check=True)
    # Inputs keep their names first, then outputs in their order.
    assert [i.name for i in model.graph.input] == ["output_1"]
    outputs = [o.name for o in model.graph.output]
    assert outputs == ["output_0", "output_1_1", "output_2", "output_1", "output_4"]
    inner = [name for node in model.graph.node for name in node.output]
    stored = [i.name for i in model.graph.initializer]
    names = ["output_1", *inner, *stored]
    assert len(names) == len(set(names))
    # Values keep the names of the program's nodes; initializers make room.
    assert "linear" in inner and "linear" not in stored
    found = onnxruntime.InferenceSession(model.SerializeToString()).run(
        None, {"output_1": x.numpy()}
    )
    for got, want in zip(found, module(x), strict=True):
        assert np.allclose(got, want.detach().numpy(), rtol=1e-4, atol=1e-4)


class Variadic(torch.nn.Module):
    """Parameters before, within and after ``*args``."""

    def forward(self, first, *others, scale=2.0):
        return first * scale + others[0]


class Passing(Variadic):
    """Nothing but ``*args``."""

    def forward(self, *args):
        return super().forward(*args)


DYNAMIC = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}


@pytest.mark.parametrize(
    ("module", "shapes"),
    [
        (Variadic(), None),
        (Passing(), None),
        (Variadic(), (DYNAMIC, (DYNAMIC,))),
        (Passing(), ((DYNAMIC, DYNAMIC),)),
    ],
    ids=["some", "all", "some in torch's notation", "all in torch's notation"],
)
def test_parameters_that_forward_does_not_name_are_dynamic_too(
    module: torch.nn.Module, shapes: tuple | None
) -> None:
    args = (torch.randn(2, 4, 8), torch.randn(2, 4, 8))
    traced = trace.trace(load_model_of(module, args, shapes))
    shapes = [
        [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim]
        for i in traced.model.graph.input
    ]
    assert shapes == [["batch", "seq", 8]] * 2


def load_model_of(
    module: torch.nn.Module, args: tuple, shapes: tuple | None = None
) -> linexport.sources.LoadedModel:
    from linexport.sources import LoadedModel, Source
    from linexport.sources.default_dims import default_dims

    source = Source("factory", "here", None, "a module")
    return LoadedModel(module.eval(), args, {}, shapes or default_dims(args).dynamic_shapes, source)


def test_torch_has_no_log_of_events_but_its_own() -> None:
    """A handler has it work out all events, and pytest gives it one."""

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            events.append(record)

    events: list[logging.LogRecord] = []
    log, handler = logging.getLogger("torch.__trace"), Kept()
    log.addHandler(handler)
    try:
        trace.trace(load_module((torch.nn.Linear(4, 4), (torch.ones(2, 4),)), "linear"))
        assert not events and handler in log.handlers
        torch.export.export(torch.nn.Linear(4, 4), (torch.ones(2, 4),))
        assert events
    finally:
        log.removeHandler(handler)


def test_a_plain_export_of_a_reference_model_is_ordinary_onnx(
    factories: SimpleNamespace, tmp_path: Path
) -> None:
    """What the artifact is measured beside: the model as torch alone would export it."""
    loaded = load_model(factories.source("language_model"))
    path, nodes = trace.plain_export(loaded, tmp_path)
    model = onnx.load_model(path)
    assert len(model.graph.node) == nodes
    onnx.checker.check_model(model, full_check=True)
    assert {n.domain for n in model.graph.node} == {""}
    assert not model.functions


# PyTorch's table of translations


def test_the_table_of_translations_is_read_once_and_given_back() -> None:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    from linexport.system.torch_internals.exports import translations_read_once

    original = vars(ONNXRegistry)["from_torchlib"]
    relu = torch.ops.aten.relu.default
    with translations_read_once():
        first = ONNXRegistry().from_torchlib(opset_version=20)
        first.register_op(relu, lambda x: x)
        second = ONNXRegistry.from_torchlib(opset_version=20)
    assert vars(ONNXRegistry)["from_torchlib"] is original
    own, *kept = first.get_decomps(relu)
    assert own.is_custom and not any(d.is_custom for d in second.get_decomps(relu))
    assert all(a is b for a, b in zip(kept, second.get_decomps(relu), strict=True))
    plain = ONNXRegistry.from_torchlib(opset_version=20)
    assert translations(second) == translations(plain)


def translations(table: Any) -> dict[Any, list[Any]]:
    return {k: [d.onnx_function for d in found] for k, found in table.functions.items() if found}


class Picked(torch.nn.Module):
    """Tokens by numbers of int32, which ONNX's GatherND does not take."""

    def forward(self, x):
        return x[..., torch.arange(x.shape[1], dtype=torch.int32), :]


def test_indices_of_int32_are_widened() -> None:
    dims = (dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC),)
    model = trace.trace(load_module((Picked(), (torch.randn(2, 16, 4),), dims), "picked")).model
    session = onnxruntime.InferenceSession(model.SerializeToString())
    x = np.random.default_rng(0).standard_normal((3, 5, 4)).astype(np.float32)
    (found,) = session.run(None, {session.get_inputs()[0].name: x})
    np.testing.assert_array_equal(found, x)


class Products(torch.nn.Module):
    """Cumulative products of gates, and of numbers of both signs."""

    def forward(self, x):
        return (
            x.cumprod(1),
            torch.cumprod(torch.sigmoid(x), dim=-1),
            x.cumprod(1, dtype=torch.double),
        )


def test_products_of_gates_with_a_lower_bound_have_no_signs() -> None:
    """Of others, the numbers that are negative are counted."""

    class Bounded(torch.nn.Module):
        def __init__(self, least: float) -> None:
            super().__init__()
            self.least, self.stored = least, torch.nn.Parameter(torch.rand(4))

        def forward(self, x):
            gates, bound = x.sigmoid(), self.stored.sigmoid()
            gates = (self.least + 0.5 * gates, bound + (1 - bound) * gates, 1 - gates)
            return [gate.cumprod(1) for gate in gates]

    for least, signs in ((0.5, 0), (-0.5, 1)):
        loaded = load_module((Bounded(least), (torch.randn(2, 16, 4),)), "bounded:gates")
        kinds = [n.op_type for n in trace.trace(loaded).graph.graph.node]
        assert kinds.count("Mod") == signs and kinds.count("CumSum") == 3 + signs


class Extremes(torch.nn.Module):
    """Running maxima and minima, and where they are: of equal values the last."""

    def forward(self, x):
        x = torch.round(2 * x)
        least = x.mT.to(torch.int64).cummin(-2)
        return (*x.cummax(1), *least, x.double().cummin(0).values)


class Subtracted(torch.nn.Module):
    """Numbers minus integers, and bounds of both types."""

    def forward(self, x):
        n = torch.arange(x.shape[1])
        x = x.clamp(min=-1, max=0.5) + torch.clamp(x, -0.5, 1)
        return x + (-5.0 - n) + torch.rsub(n, 1.5, alpha=2) + (2 - n)


class Between(torch.nn.Module):
    """Values between others, and a recurrence of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rate", torch.linspace(0, 1, 9)[:, None])

    def forward(self, x):
        far = x.flip(0)
        here = torch.lerp(x, 1e6 * far, 1.0) + torch.lerp(x, far, torch.tensor(0.3))
        return here, torch.lerp(x[..., None], far[..., None], self.rate.mT)


@pytest.mark.parametrize(
    "kind", [Products, Extremes, Subtracted, Between], ids=lambda kind: kind.__name__
)
def test_what_the_exporter_does_not_translate_is_written(kind: type[torch.nn.Module]) -> None:
    dims, module = (dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC),), kind()
    model = trace.trace(load_module((module, (torch.randn(2, 16),), dims), "a:module")).model
    session = onnxruntime.InferenceSession(model.SerializeToString())
    x = np.random.default_rng(0).standard_normal((3, 9)).astype(np.float32)
    x[0, 5] = 0
    got = session.run(None, {session.get_inputs()[0].name: x})
    expected = module(torch.from_numpy(x))
    for a, b in zip(got, expected if isinstance(expected, tuple) else (expected,), strict=True):
        np.testing.assert_allclose(a, b.numpy(), rtol=1e-5, atol=1e-7)
