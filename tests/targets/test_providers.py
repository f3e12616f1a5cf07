"""Execution providers: what is missing or falls back is an error, and what runs where is told.

No provider but the CPU's is part of the ONNX Runtime that these tests run with. Two of its own
stand in for others: ``host`` takes all nodes, and is the CPU's; ``idle`` starts and takes none.
"""

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
from onnx import TensorProto, helper

import linexport
from linexport import targets
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.manifest.placement import ORT_CPU
from linexport.targets.base import OrtSession
from linexport.targets.runtime import placement, providers
from linexport.targets.runtime.providers import Execution, Provider

pytestmark = pytest.mark.usefixtures("one_thread")

Cli = Callable[..., Any]

NOT_HERE = ("cuda", "tensorrt", "nv-tensorrt-rtx", "openvino", "webgpu")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    host, idle = Provider(ORT_CPU, "onnxruntime"), Provider("AzureExecutionProvider", "onnxruntime")
    monkeypatch.setattr(providers, "NAMES", (*providers.NAMES, "host", "idle"))
    for name, provider in (("host", host), ("idle", idle)):
        monkeypatch.setitem(providers.PROVIDERS, name, provider)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("generate", name) for name in NOT_HERE),
        *((c, "openvino") for c in ("validate", "bench", "serve")),
    ],
)
def test_a_provider_that_is_not_installed_is_named_with_its_package(
    cli: Cli, converted: Callable[..., Path], command: str, name: str
) -> None:
    prompt = ["--prompt", "a"] if command == "generate" else []
    source = ["--source", "small_models:language_model"] if command in ("validate", "bench") else []
    folder = converted("language_model")
    result = cli(command, folder, "--provider", name, *prompt, *source)
    said = " ".join(result.err.split())
    assert result.code == 5 and "Traceback" not in said
    assert f"The execution provider {name} is not installed" in said
    assert f"Install {providers.PROVIDERS[name].package}" in said
    assert onnxruntime.__version__ in said


def test_names_that_are_none_and_strictness_of_nothing_are_refused(
    cli: Cli, artifact: Path
) -> None:
    for given in (["--provider", "CUDA"], ["--strict"]):
        result = cli("validate", artifact, *given, "--json")
        assert result.code == 2
    assert "give --provider too" in result.json()["message"]
    with pytest.raises(UsageError, match="expected one of cpu, cuda"):
        linexport.load(artifact, provider="CUDAExecutionProvider")


def test_engines_are_not_opened_by_a_provider() -> None:
    target = targets.find_target("tensorrt-rtx")
    assert target.deploy is not None
    Execution().check_target(target.name, True)
    with pytest.raises(UsageError, match="whose engines run without it"):
        Execution("cuda").check_target(target.name, True)


@pytest.mark.usefixtures("stand_ins")
def test_a_provider_that_takes_no_node_is_an_error(cli: Cli, artifact: Path) -> None:
    """ONNX Runtime itself starts such a session without a word, and runs it on the CPU."""
    options = onnxruntime.SessionOptions()
    options.add_provider("AzureExecutionProvider", {})
    assert onnxruntime.InferenceSession(artifact / "model.onnx", options)
    with pytest.raises(EnvironmentProblemError, match=r"takes none of the \d+ nodes"):
        linexport.load(artifact, provider="idle")


@pytest.mark.usefixtures("stand_ins")
def test_a_model_that_a_provider_does_not_open_is_not_run_elsewhere(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor with buffers that serve again, which are planned for one device.

    So the `ort` artifact of a small kimi_linear failed on an H100: a shape had another batch.
    """
    opened = []

    def fail(source: object, options: Any, **keywords: object) -> None:
        opened.append(keywords | {"reuse": options.enable_mem_reuse})
        raise RuntimeError("no memory on the device")

    monkeypatch.setattr(onnxruntime, "InferenceSession", fail)
    with pytest.raises(EnvironmentProblemError, match="does not open the model: no memory"):
        linexport.load(artifact, provider="host")
    assert opened == [{"enable_fallback": 0, "reuse": False}]


def test_a_library_without_a_device_or_that_does_not_load_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, artifact: Path
) -> None:
    (tmp_path / "some_provider.py").write_text("def get_library_path(): return 'nothing.so'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(
        providers.PROVIDERS, "webgpu", Provider("SomeProvider", "onnxruntime", "some_provider")
    )
    with pytest.raises(
        EnvironmentProblemError, match="some_provider does not load in ONNX Runtime"
    ):
        linexport.load(artifact, provider="webgpu")
    monkeypatch.setattr(providers, "_register", lambda module: None)
    with pytest.raises(EnvironmentProblemError, match="finds no device that it runs on"):
        linexport.load(artifact, provider="webgpu")


def test_what_a_registered_library_offers_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime lists it as its own from then on, though it has no code of it."""
    taken: list[Any] = []
    device = SimpleNamespace(ep_name="SomeProvider", ep_metadata={"library_path": "some.so"})
    monkeypatch.setitem(
        providers.PROVIDERS, "webgpu", Provider("SomeProvider", "onnxruntime", "nothing")
    )
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: [device])
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["SomeProvider", ORT_CPU])
    options = SimpleNamespace(add_provider_for_devices=lambda devices, more: taken.extend(devices))
    assert providers.add_provider(options, "webgpu", 1).startswith("onnxruntime ")
    assert taken == [device]


@pytest.mark.parametrize("name", ["cuda", "tensorrt"])
def test_libraries_that_a_provider_lacks_are_named_with_what_installs_them(
    name: str, monkeypatch: pytest.MonkeyPatch, cli: Cli, artifact: Path
) -> None:
    """With the wheel of onnxruntime-gpu ONNX Runtime says that the configuration is not supported.

    CUDA's libraries that pip installed are looked for, and what that prints is no output.
    """
    loaded = []

    def preload() -> None:
        loaded.append(name)
        print("Failed to load libcurand.so.10: libcurand.so.10: cannot open shared object file")

    available = [providers.PROVIDERS[name].ort_name, ORT_CPU]
    monkeypatch.setattr(onnxruntime, "preload_dlls", preload)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: available)
    providers.preload.cache_clear()
    result = cli("generate", artifact, "--prompt", "a", "--provider", name)
    providers.preload.cache_clear()
    said = " ".join(result.err.split())
    assert result.code == 5 and loaded == [name] and not result.out
    assert f"The execution provider {name} (onnxruntime {onnxruntime.__version__})" in said
    library = f"libonnxruntime_providers_{name}.so"
    assert f"does not start: libcurand.so.10, {library} not found" in said
    assert "pip install 'onnxruntime-gpu[cuda,cudnn]'" in said


def test_a_provider_that_finds_its_libraries_and_does_not_start_says_why(
    monkeypatch: pytest.MonkeyPatch, artifact: Path
) -> None:
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["OpenVINOExecutionProvider"]
    )
    with pytest.raises(EnvironmentProblemError, match=r"openvino .* does not start: .*"):
        linexport.load(artifact, provider="openvino")


@pytest.mark.usefixtures("stand_ins")
def test_what_runs_on_the_cpu_is_counted_in_ops(
    converted: Callable[..., Path], cli: Cli, tmp_path: Path
) -> None:
    """Every part of both ops is in ONNX Runtime's record, by the ops it is of."""
    folder = converted("language_model", target="onnx")
    model = linexport.load(folder, provider="host", threads=1)
    found = model.placement
    assert found is not None and found.provider == "host" and found.nodes.keys() == {ORT_CPU}
    assert found.package == f"onnxruntime {onnxruntime.__version__}"
    assert found.on_cpu["LinearAttention"]["Scan"] == 2
    assert found.on_cpu["CausalConvWithState"]["Conv"] == 2
    assert found.on_cpu.keys() <= {"LinearAttention", "CausalConvWithState", placement.UNKNOWN}
    inside = sum(sum(ops.values()) for ops in found.on_cpu.values())
    assert inside < found.nodes[ORT_CPU]
    tokens = np.arange(7)[None]
    plain = linexport.load(folder, threads=1)
    assert plain.placement is None
    (name, *_) = (o.name for o in plain.manifest.outputs)
    np.testing.assert_allclose(
        model.run(tokens)[name], plain.run(tokens)[name], rtol=1e-4, atol=1e-5
    )
    result = cli("generate", folder, "--prompt", "a", "--provider", "host", "--strict")
    assert result.code == 5 and "LinearAttention (" in result.err and "2 Scan" in result.err


@pytest.mark.usefixtures("stand_ins")
def test_the_manifest_says_on_what_it_was_compared(
    cli: Cli, artifact: Path, manifest_of: Callable[[Path], Any], factories: SimpleNamespace
) -> None:
    given = (artifact, "--source", factories.source("small"), "--threads", 1)
    assert cli("validate", *given, "--provider", "host", "--record").code == 0
    manifest = manifest_of(artifact)
    assert manifest.parity.passed and manifest.placement.provider == "host"
    assert manifest.placement == linexport.load(artifact, provider="host", threads=1).placement
    assert "Provider" in cli("validate", *given, "--provider", "host").out
    assert manifest.placement.described() in " ".join(cli("inspect", artifact).out.split())
    assert cli("validate", *given, "--record").code == 0
    assert manifest_of(artifact).placement is None
    refused = cli("validate", *given, "--provider", "host", "--write-baseline", artifact / "b.json")
    assert refused.code == 2 and "figures on the CPU" in refused.err


def _model() -> onnx.ModelProto:
    """A row that grows by one: present_key_0 = [past_key_0; 2 x]."""
    x, past, present = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [None])
        for n in ("x", "past_key_0", "present_key_0")
    )
    nodes = [
        helper.make_node("Add", ["x", "x"], ["y"], name="double"),
        helper.make_node("Concat", ["past_key_0", "y"], ["present_key_0"], name="row", axis=0),
    ]
    graph = helper.make_graph(nodes, "rows", [x, past], [present])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.usefixtures("stand_ins")
def test_states_count_and_so_does_all_of_a_graph_without_ops() -> None:
    """Where no node says that it is of an op, any may be."""
    session = OrtSession(_model().SerializeToString(), execution=Execution("host"))
    assert session.placement is not None
    assert session.placement.on_cpu == {
        "present_key_0": {"Concat": 1},
        placement.UNKNOWN: {"Add": 1},
    }
    with pytest.raises(EnvironmentProblemError, match=r"present_key_0 \(1 Concat\)"):
        OrtSession(_model().SerializeToString(), execution=Execution("host", strict=True))


def test_nodes_of_the_domain_are_those_that_the_cuda_library_runs() -> None:
    node = SimpleNamespace(name="attention", op_type="LinearAttention", domain="linexport")
    assigned = [SimpleNamespace(ep_name="CUDAExecutionProvider", get_nodes=lambda: [node, node])]
    found = placement._placement(assigned, _model(), "cuda", "onnxruntime-gpu 1")
    assert found.kernels == 2
    assert found.described() == (
        "2 of 2 nodes run on cuda (onnxruntime-gpu 1), 2 of them by linexport's kernels, 0 on the "
        "CPU"
    )


def test_nodes_of_other_providers_are_not_the_cpus() -> None:
    def part(ep_name: str, *nodes: tuple[str, str]) -> SimpleNamespace:
        found = [SimpleNamespace(name=name, op_type=op, domain="") for name, op in nodes]
        return SimpleNamespace(ep_name=ep_name, get_nodes=lambda: found)

    assigned = [
        part("Other", ("double", "Add"), ("_inlfunc_LinearAttention_token_3___7", "Scan")),
        part(ORT_CPU, ("_inlfunc_Linear_Attention_token_3___7", "Scan")),
        part(ORT_CPU, ("", "Cast")),
    ]
    found = placement._placement(assigned, _model(), "other", "other 1")
    assert found.nodes == {"Other": 2, ORT_CPU: 2}
    assert found.on_cpu == {"Linear_Attention": {"Scan": 1}, placement.UNKNOWN: {"Cast": 1}}
    assert found.described() == (
        "2 of 4 nodes run on other (other 1), 2 on the CPU, among them parts of Linear_Attention "
        "(1 Scan), no known op (1 Cast)"
    )


RECORDED = {
    "onnx": {"Concat": 9, "Add": 2, "Sub": 3, "Div": 5, "Max": 2, "Mul": 1},
    "ort-cuda": {"Concat": 1},
    "ort": {"Concat": 1, "LessOrEqual": 1, "Squeeze": 1},
}
"""What ONNX Runtime's CUDA provider left to the CPU of each causal layer of such a language model,
by the target, as ONNX Runtime 1.31.1 recorded it on an H100 (of ort-cuda, an H200)."""


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("target", RECORDED)
def test_what_cuda_left_to_the_cpu_is_arithmetic_of_shapes_and_no_more_may_be(
    converted: Callable[..., Path], target: str
) -> None:
    folder = converted("language_model", target=target)
    session = OrtSession(folder / "model.onnx", threads=1, execution=Execution("host"))
    nodes = [n for p in session.inner.get_provider_graph_assignment_info() for n in p.get_nodes()]
    of_shapes = [n for n in nodes if n.name.startswith("_inlfunc_LinearAttention_")]
    of_shapes = [n for n in of_shapes if placement.SHAPES in n.name and n.op_type != "Shape"]
    counts = Counter(n.op_type for n in of_shapes)
    assert counts >= Counter({op: 2 * n for op, n in RECORDED[target].items()})

    moved = SimpleNamespace(name="Gather_token_13", op_type="Gather", domain="")
    graph = onnx.load(folder / "model.onnx", load_external_data=False)

    def left(*to_the_cpu: Any) -> dict[str, dict[str, int]]:
        parts = [SimpleNamespace(ep_name=ORT_CPU, get_nodes=lambda: to_the_cpu)]
        return placement._placement(parts, graph, "cuda", "some").on_cpu

    assert left(*of_shapes, moved) == {}
    others = [n for n in nodes if n not in of_shapes and n.name.startswith("_inlfunc_LinearAtt")]
    for node in others:
        expected = {} if node.op_type == "Shape" else {"LinearAttention": {node.op_type: 1}}
        assert left(*of_shapes, node) == expected
    wrong = {"onnx": {"Scan", "MatMul"}, "ort-cuda": {"Transpose"}, "ort": {"If"}}
    assert wrong[target] <= {n.op_type for n in others}


def test_a_clip_without_a_largest_value_is_a_max_for_openvino() -> None:
    """In functions too; others stay."""
    named = {"a": ["x", "least"], "b": ["x", "", "most"], "c": ["x", "least", "most"]}
    nodes = [helper.make_node("Clip", inputs, [name]) for name, inputs in named.items()]
    graph = helper.make_graph(nodes, "clips", [], [])
    opsets = [helper.make_opsetid("", 20)]
    model = helper.make_model(graph, opset_imports=opsets)
    model.functions.append(helper.make_function("f", "F", ["x", "least"], ["a"], nodes[:1], opsets))
    found = placement.adapted(model, "openvino")
    assert [n.op_type for n in found.graph.node] == ["Max", "Clip", "Clip"]
    assert [n.op_type for n in found.functions[0].node] == ["Max"]
    assert [*found.graph.node[0].input] == ["x", "least"]
    assert "Max" not in {n.op_type for n in placement.adapted(model, "cuda").graph.node}
    assert {n.op_type for n in model.graph.node} == {"Clip"}
