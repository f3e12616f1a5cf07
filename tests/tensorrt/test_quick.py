"""Quickly deployable plugins, ahead of time: described, registered and launched as TensorRT would.

Full TensorRT is not installed where these tests run. Its Python package ``tensorrt.plugin`` is, in
the wheels of the lean runtime; the classes it stands on are TensorRT-RTX's, save for three that it
lacks, and expressions of shapes are made by a real builder, inside a plugin's callback. Whether
TensorRT then accepts and runs the kernel, only a GPU tells.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx
import pytest

from linexport.errors import BuildError, UnsupportedModelError
from linexport.plugins.kernels.compile import compile_kernels
from linexport.plugins.kernels.description import Description
from linexport.plugins.ops.registry import all_ops, linexport_nodes
from linexport.plugins.tensorrt import fields, quick, quick_plugin
from linexport.targets.lowering.choice import Candidate
from linexport.targets.trt.convolutions import tokens_first
from tests.support import tensorrt_models

LEAN = "tensorrt_lean_bindings"


@pytest.fixture(scope="module")
def package(rtx: Any) -> Iterator[ModuleType]:
    """``tensorrt.plugin`` of the lean wheel, on the classes of TensorRT-RTX."""
    found = importlib.util.find_spec(LEAN)
    if found is None or found.origin is None:
        pytest.skip(f"{LEAN} is not installed: pip install tensorrt-lean-cu13-bindings")
    folder = Path(found.origin).parent / "plugin"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tensorrt", tensorrt(rtx))
        spec = importlib.util.spec_from_file_location(
            "tensorrt.plugin", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "tensorrt.plugin", module)
        spec.loader.exec_module(module)
        quick_plugin.define(rtx, module, lazy=True)
        yield module
        for name in [n for n in sys.modules if n.startswith("tensorrt.plugin.")]:
            del sys.modules[name]


def tensorrt(rtx: Any) -> ModuleType:
    """Return TensorRT-RTX's classes, with stand-ins for those that only TensorRT has.

    These are a base class of plugins, one of expressions, and how a plugin is asked for.
    """

    class Request(Enum):
        STRICT_AOT, STRICT_JIT, PREFER_AOT, PREFER_JIT, UNKNOWN = range(5)

    module = ModuleType("tensorrt")
    module.__dict__.update(vars(rtx))
    module.QuickPluginCreationRequest = Request  # type: ignore[attr-defined]
    module.IPluginV3QuickAOTBuild = type("IPluginV3QuickAOTBuild", (), {})  # type: ignore[attr-defined]
    module.ISymExpr = type("ISymExpr", (), {})  # type: ignore[attr-defined]
    return module


def attention(rule: str, length: int | None = None) -> onnx.ModelProto:
    """A model of one LinearAttention with heads of 64, its sequence fixed where ``length`` is."""
    model = tensorrt_models.node(rule=rule, heads=2, normalize=rule == "linear")
    for value in [*model.graph.input, *model.graph.output, *model.graph.value_info]:
        for size in value.type.tensor_type.shape.dim:
            if length is not None and size.dim_param == "seq":
                size.dim_value = length
    return model


def described(model: onnx.ModelProto, sm: int = 89) -> Description:
    """The quick description of a model's last node."""
    *_, (_, op, view) = linexport_nodes(model)
    return quick.describe_plugin(op, view, "float32", [sm])


CASES: dict[str, Callable[[SimpleNamespace], onnx.ModelProto]] = {
    "prefill": lambda: attention("linear"),
    "decode": lambda: attention("linear", 1),
    "decode gated delta": lambda: attention("gated_delta", 1),
    "convolution": lambda: tokens_first(tensorrt_models.convolution()),
    "feature map": lambda: tensorrt_models.feature_map(),
}


def declared(ptx: str) -> list[str]:
    """Types of the parameters of a kernel, in order."""
    found = quick.ENTRY.search(ptx)
    assert found
    return re.findall(r"\.param \.(\w+)", found[3])


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_takes_inputs_then_numbers_then_outputs(case: str) -> None:
    """And the assembler makes of it what it made of the original."""
    made = described(CASES[case]())
    (plan,), (binaries,) = made.plans.values(), made.binaries.values()
    ((name, binary),) = binaries.items()
    kernel = quick.launch_of(plan).kernel
    ptx = binary.code.decode()
    count = len(all_ops()[made.op_type].schema.inputs)
    numbers = quick.numbers(kernel)
    assert len(made.inputs) == count
    wanted = ["u64"] * count + ["u32"] * len(numbers) + ["u64"] * len(made.outputs)
    assert declared(ptx) == wanted
    original = compile_kernels([kernel], 89)[name]
    assert assembled(ptx) == assembled(original.ptx)
    assert binary.shared <= quick.SHARED


def assembled(ptx: str) -> tuple[str, ...]:
    """Registers and spills that ptxas reports."""
    from triton.backends import nvidia

    program = Path(str(nvidia.__file__)).parent / "bin" / "ptxas"
    command = [str(program), "-v", "-arch", "sm_89", "-o", "/dev/null", "/dev/stdin"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tuple(re.findall(r"Used \d+ registers|\d+ bytes spill \w+", done.stderr))


def test_a_parameter_that_is_read_cannot_be_left_out() -> None:
    made = described(tensorrt_models.feature_map())
    kernel = quick.launch_of(made.plans[89]).kernel
    original = compile_kernels([kernel], 89)[kernel.name].ptx
    names = [a.name for a in kernel.arguments]
    with pytest.raises(BuildError, match="which a quick plugin is not given"):
        quick.with_parameters(original, names, names[1:])
    with pytest.raises(BuildError, match="parameters; expected"):
        quick.with_parameters(original, names[1:], names)


def test_what_takes_several_kernels_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="takes 2 kernels"):
        described(attention("gated_delta"))


class Launch:
    """What TensorRT reads of a launch: expressions, here of fixed sizes."""

    nbSymExprs = 0  # noqa: N815

    def __init__(self) -> None:
        self.numbers: dict[int, Any] = {}

    def __setitem__(self, position: int, value: Any) -> None:
        self.numbers[position] = value


@pytest.mark.parametrize("case", CASES)
def test_tensorrts_own_package_takes_the_plugin(case: str, rtx: Any, package: ModuleType) -> None:
    """Its template plugin is asked what TensorRT asks; sizes are batch 2 and 1 or 50 tokens."""
    made = described(CASES[case]())
    plan = made.plans[89]
    sizes = {"batch": 2, "length": 1 if case.startswith("decode") else 50}
    plugin = template(rtx, package, made)
    first = next(x for x in made.inputs if x)
    tensors = [x or first for x in made.inputs]
    kinds = [quick_plugin.data_type(rtx, x.type) for x in tensors]
    outputs = [quick_plugin.data_type(rtx, x.type) for x in made.outputs]
    assert plugin.get_output_data_types(kinds, [len(x.shape) for x in tensors]) == outputs

    def concrete(tensor: Any) -> tuple[int, ...]:
        return tuple(sizes[n] if isinstance(n, str) else n for n in tensor.shape)

    found = SimpleNamespace(launch=Launch())

    def ask(builder: Any) -> None:
        expressions = [dims(rtx, builder, concrete(x)) for x in tensors]
        shapes = plugin.get_output_shapes(expressions, [], builder)
        found.shapes = [tuple(e[i].get_constant_value() for i in range(len(e))) for e in shapes]
        io = [dynamic(rtx, concrete(x), kind) for x, kind in zip(tensors, kinds, strict=True)]
        io += [
            dynamic(rtx, concrete(x), kind) for x, kind in zip(made.outputs, outputs, strict=True)
        ]
        combination = plugin.get_supported_format_combinations(io, len(tensors))
        assert [x.type for x in combination] == [*kinds, *outputs]
        plugin.configure_plugin(io[: len(tensors)], io[len(tensors) :])
        assert plugin.get_valid_tactics() == []
        plugin.set_tactic(0)
        plugin.get_launch_params(expressions, io, len(tensors), found.launch, found.launch, builder)
        found.grid = [
            getattr(found.launch, f"grid_{axis}").expr.get_constant_value() for axis in "xyz"
        ]
        found.block = found.launch.block_x.expr.get_constant_value()
        found.shared = found.launch.shared_mem.expr.get_constant_value()
        found.numbers = [x.expr.get_constant_value() for x in found.launch.numbers.values()]
        found.kernel = plugin.get_kernel([x.desc for x in io[: len(tensors)]], [
            x.desc for x in io[len(tensors) :]
        ])  # fmt: skip

    inside_a_builder(rtx, ask)
    values = plan.symbols(sizes["batch"], sizes["length"], 1)
    chosen = quick.launch_of(plan)
    binary = made.binaries[89][chosen.kernel.name]
    assert found.shapes == [concrete(x) for x in made.outputs]
    assert found.grid == [extent.of(values) for extent in chosen.grid]
    assert found.block == 32 * chosen.kernel.warps and found.shared == binary.shared
    assert found.launch.nbSymExprs == len(found.numbers)
    assert found.numbers == [values[name] for name in quick.numbers(chosen.kernel)]
    assert found.kernel == (binary.entry, binary.code)


def template(rtx: Any, package: ModuleType, made: Description) -> Any:
    """The plugin TensorRT's creator makes of the attributes, which gain a zero byte on the way."""
    texts = {name: f"{text}\0" for name, text in made.attributes().items()}
    library = sys.modules["tensorrt.plugin._lib"]
    kinds = dict.fromkeys(fields.NAMES, (True, str))
    creator = library._TemplatePluginCreator(made.op_type, quick.NAMESPACE, kinds)
    kept = fields.encode(rtx, texts)
    request = sys.modules["tensorrt"].QuickPluginCreationRequest.STRICT_AOT
    phase = rtx.TensorRTPhase.BUILD
    return creator.create_plugin(made.op_type, quick.NAMESPACE, kept.collection, phase, request)


def dims(rtx: Any, builder: Any, sizes: tuple[int, ...]) -> Any:
    made = rtx.DimsExprs(len(sizes))
    for axis, size in enumerate(sizes):
        made[axis] = builder.constant(size)
    return made


def dynamic(rtx: Any, sizes: tuple[int, ...], kind: Any) -> Any:
    made = rtx.DynamicPluginTensorDesc()
    inner = rtx.PluginTensorDesc()
    inner.dims, inner.type, inner.format = sizes, kind, rtx.TensorFormat.LINEAR
    made.desc, made.min, made.opt, made.max = inner, sizes, sizes, sizes
    return made


def inside_a_builder(rtx: Any, ask: Callable[[Any], None]) -> None:
    """Call ``ask`` with the builder of expressions that TensorRT gives to a plugin."""
    from linexport.plugins.tensorrt import plugin as module

    failures: list[BaseException] = []
    asked: list[bool] = []
    original = module.output_shapes

    def output_shapes(trt: Any, description: Any, inputs: Any, builder: Any) -> Any:
        if not asked:
            asked.append(True)
            try:
                ask(builder)
            except BaseException as error:
                failures.append(error)
        return original(trt, description, inputs, builder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "output_shapes", output_shapes)
        parse_something(rtx)
    assert asked
    if failures:
        raise failures[0]


def parse_something(rtx: Any) -> None:
    """A network of one plugin: its shapes are asked for while it is parsed."""
    from linexport.plugins.kernels import contract
    from linexport.plugins.tensorrt.flavour import RTX
    from linexport.plugins.tensorrt.plugin import register
    from linexport.targets.trt import parser_form

    marked = parser_form.mark_plugins(
        tensorrt_models.feature_map(),
        lambda op, node: contract.describe_plugin(op, node, "float32", [89]),
    )
    register(RTX)
    log = rtx.Logger(rtx.Logger.ERROR)
    network = rtx.Builder(log).create_network(0)
    parser = rtx.OnnxParser(network, log)
    assert parser.parse(marked.SerializeToString())


def test_a_marked_node_runs_by_its_body_elsewhere() -> None:
    """One file for all: every input of the op is there, and those without meaning are named."""
    import numpy as np

    from linexport.targets import Options
    from linexport.targets.base import OrtSession
    from linexport.targets.lowering.choice import lower
    from linexport.targets.trt import parser_form, target

    options = Options(sms=(89, 120), quick=True)
    plain = attention("linear")
    low, choices = lower(target.prepare(options, plain), lambda *a: target.candidates(options, *a))
    onnx.checker.check_model(low)
    assert {c.op: c.reason for c in choices}["LinearAttention"].endswith("launched by TensorRT")
    assert parser_form.namespaces(low) == {quick.NAMESPACE}
    node = next(n for n in low.graph.node if n.op_type == "LinearAttention")
    assert len(node.input) == len(all_ops()["LinearAttention"].schema.inputs)
    assert [a.i for a in node.attribute if a.name == "aot"] == [1]
    portable, _ = lower(plain, lambda op, view: [Candidate("portable", "", op.portable)])
    feeds = {
        i.name: np.ones([d.dim_value or 3 for d in i.type.tensor_type.shape.dim], np.float32)
        for i in low.graph.input
    }
    one, other = (OrtSession(m.SerializeToString()).run(feeds) for m in (low, portable))
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name])


def test_what_one_kernel_cannot_run_keeps_the_plugin_of_the_library() -> None:
    from linexport.plugins.kernels import contract
    from linexport.targets import Options
    from linexport.targets.trt import parser_form, target

    options = Options(sms=(89,), quick=True)
    made = target.prepare(options, attention("gated_delta"))
    assert parser_form.namespaces(made) == {contract.NAMESPACE}
