"""Engines, really built: their plugin layers, their scratch memory, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from onnx import TensorProto

from linexport.errors import BuildError
from linexport.plugins.tensorrt.flavour import RTX
from tests.support import ROOT, SCRIPTS, tensorrt_models

pytestmark = pytest.mark.services

MEGABYTE = 1e6


@pytest.mark.parametrize("sm", [89, 120])
def test_the_elu_layer_is_one_plugin_and_needs_little_scratch(
    engines: SimpleNamespace, sm: int
) -> None:
    """H = 8, d = 64, T <= 1024, batch 1, float32: beside the cumulative sum of outer products."""
    fused = engines.engine(tensorrt_models.node(), sm)
    assert fused.plugins == ("attention",)
    custom = [layer["name"] for layer in fused.layers if layer["type"] == "custom_layer"]
    assert len(custom) == 1 and custom[0].startswith("attention")
    assert fused.scratch < 5 * MEGABYTE
    spelled = engines.engine(tensorrt_models.cumsum(), sm, plugins=False)
    assert spelled.plugins == ()
    assert spelled.scratch > 50 * fused.scratch


def test_with_a_profile_for_single_tokens_it_is_one_plugin_too(engines: SimpleNamespace) -> None:
    made = engines.engine(tensorrt_models.node(), decode=True)
    assert made.plugins == ("attention",)
    assert [x["type"] for x in made.layers].count("custom_layer") >= 1


def test_an_engine_carries_its_kernels_and_only_those_of_its_gpu(
    engines: SimpleNamespace, description: Callable[..., Any]
) -> None:
    made = engines.engine(tensorrt_models.node(), 89)
    for text in description().only(89).attributes().values():
        assert text.encode() in made.plan
    for text in description().only(120).attributes().values():
        assert text.encode() not in made.plan


def test_only_what_the_kernels_allow_is_updated_in_place(
    engines: SimpleNamespace, description: Callable[..., Any]
) -> None:
    from linexport.targets.trt.parser_form import in_place

    low, _ = engines.lowered(tensorrt_models.node())
    allowed = {name for plan in description().plans.values() for name in plan.in_place}
    names = {"present_state": "present_state_0", "present_normalizer": "present_normalizer_0"}
    assert set(in_place(low)) == {names[name] for name in allowed}


RULES: dict[str, dict[str, Any]] = {
    "gated": {"rule": "gated"},
    "delta": {"rule": "delta", "normalize": False},
    "gated delta": {"rule": "gated_delta", "normalize": False},
    "gated delta per channel": {"rule": "gated_delta", "normalize": False, "per_channel": True},
    "bidirectional": {"causal": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_one_plugin(engines: SimpleNamespace, rule: str, precision: str) -> None:
    made = engines.engine(tensorrt_models.node(**RULES[rule]), 89, precision=precision)
    assert made.plugins == ("attention",)


def test_the_gated_delta_rule_is_one_plugin(engines: SimpleNamespace) -> None:
    """Its past normaliser is absent and its decay is not: TensorRT takes no empty input between."""
    model = tensorrt_models.node(**RULES["gated delta"])
    low, _ = engines.lowered(model)
    node = next(n for n in low.graph.node if n.op_type == "LinearAttention")
    assert [list(a.ints) for a in node.attribute if a.name == "absent_inputs"] == [[4]]
    assert node.input[4] == node.input[0]
    onnx.checker.check_model(low)
    assert engines.engine(model).plugins == ("attention",)


def test_an_empty_input_before_another_is_refused_by_tensorrt_itself(
    rtx: Any, engines: SimpleNamespace
) -> None:
    """The trap that ``absent_inputs`` is for; the parser says so, and nothing aborts."""
    from linexport.targets.trt import parser_form
    from linexport.targets.trt.build import register
    from linexport.targets.trt.log import Log

    low = parser_form.parsable(engines.lowered(tensorrt_models.node(**RULES["gated delta"]))[0])
    node = next(n for n in low.graph.node if n.op_type == "LinearAttention")
    node.input[4] = ""
    register(RTX)
    log = Log()
    sink = log.sink(rtx)
    builder = rtx.Builder(sink)
    network = builder.create_network(0)
    parser = rtx.OnnxParser(network, sink)
    assert not parser.parse(low.SerializeToString())
    assert parser.get_error(0).node_name() == "attention"
    node.input[4] = node.input[0]
    assert rtx.OnnxParser(builder.create_network(0), sink).parse(low.SerializeToString())


def test_without_plugins_the_chunk_form_is_built_and_chunks_have_one_size(
    engines: SimpleNamespace,
) -> None:
    made = engines.engine(tensorrt_models.node(), plugins=False)
    assert made.plugins == ()
    assert made.scratch < 20 * MEGABYTE
    _, choices = engines.lowered(tensorrt_models.node(), plugins=False)
    assert {c.op: c.lowering for c in choices} == {
        "LinearAttention": "fixed_chunks",
    }


def test_a_transition_is_built_by_chunks_and_by_tokens(engines: SimpleNamespace) -> None:
    """All chunks are computed in one go: TensorRT-RTX 1.7 builds no Scan in a Scan."""
    made = engines.engine(tensorrt_models.transition(), decode=True)
    assert made.scratch < 100 * MEGABYTE
    _, choices = engines.lowered(tensorrt_models.transition())
    assert [c.lowering for c in choices] == ["portable"]


def test_building_twice_gives_the_same_engine_but_for_its_identity(
    engines: SimpleNamespace,
) -> None:
    first, second = (engines.engine(tensorrt_models.node(), again=again) for again in (False, True))
    assert first.layers == second.layers
    assert first.plugins == second.plugins
    assert (first.scratch, first.activations) == (second.scratch, second.activations)
    assert abs(len(first.plan) - len(second.plan)) <= 4096


def test_an_input_of_another_type_than_the_plugin_was_made_for_is_refused(
    engines: SimpleNamespace,
) -> None:
    low, _ = engines.lowered(tensorrt_models.node())
    for value in low.graph.input:
        if value.name == "past_state_0":
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    with pytest.raises(BuildError, match=r"TensorRT-RTX .* cannot (parse|build)"):
        rebuilt(low)


def test_an_input_of_another_shape_than_the_plugin_was_made_for_is_refused(
    engines: SimpleNamespace,
) -> None:
    low, _ = engines.lowered(tensorrt_models.node())
    for value in low.graph.input:
        if value.name == "past_state_0":
            value.type.tensor_type.shape.dim[2].dim_value = 32
    with pytest.raises(BuildError):
        rebuilt(low)


def test_a_node_without_a_description_is_refused_with_the_reason(engines: SimpleNamespace) -> None:
    low, _ = engines.lowered(tensorrt_models.node())
    node = next(n for n in low.graph.node if n.op_type == "LinearAttention")
    for attribute in node.attribute:
        if attribute.name == "launch":
            attribute.s = b"{}"
    with pytest.raises(BuildError, match="Convert the model again"):
        rebuilt(low)


def rebuilt(low: onnx.ModelProto) -> object:
    from pathlib import Path

    from linexport.graph.dims import DimRange
    from linexport.targets.trt import parser_form
    from linexport.targets.trt.build import build_engine
    from linexport.targets.trt.profiles import profiles

    dims = {"batch": DimRange(1, 1, 1, batch=True), "seq": DimRange(1, 64, 64)}
    form = parser_form.parsable(low)
    return build_engine(RTX, form, Path("model.onnx"), profiles(dims, True), 89)


@pytest.mark.parametrize("how", ["raw", "provided"])
def test_the_library_name_that_ends_the_process_is_provided(
    how: str, rtx: Any, engines: SimpleNamespace, tmp_path: Any
) -> None:
    """Parsing a plugin's node ends the process by a signal where libtensorrt_rtx.so is missing."""
    from linexport.targets.trt import parser_form

    low = parser_form.parsable(engines.lowered(tensorrt_models.node())[0])
    path = tmp_path / "model.onnx"
    onnx.save_model(low, str(path))
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "parse_plugin_node.py"), str(path), how],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    if how == "raw":
        assert done.returncode < 0, "the trap is gone: flavour.py need not provide the name"
    else:
        assert (done.returncode, done.stdout) == (0, "parsed True\n"), done.stderr


def test_a_t4_is_refused_by_tensorrt_rtx_in_float32(engines: SimpleNamespace) -> None:
    """Standard operators keep states in float32, whose products the builder lacks for 7.5."""
    with pytest.raises(BuildError, match=r"Turing \(SM75\): FP32 GEMM is not supported"):
        engines.engine(tensorrt_models.node(), sm=75, sms=(75,), plugins=False)


@pytest.mark.parametrize(
    ("mode", "builds"), [("plain", True), ("preview", True), ("aliased", False)]
)
def test_the_builder_dies_still_of_a_plugin_whose_state_is_written_over_its_past(
    rtx: Any, converted: Callable[..., Path], mode: str, builds: bool
) -> None:
    """TensorRT-RTX 1.7.1 ends with signal 11 where an aliased output is declared and allowed.

    Where it builds, declare the states of plugins so: until then one address is bound twice.
    """
    options = {"target": "tensorrt-rtx", "sms": (89,), "dims": ("seq=1:16:64", "batch=1:1:4")}
    model = converted("language_model", **options) / "model.onnx"
    command = [sys.executable, str(SCRIPTS / "aliased_io.py"), str(model), mode]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if builds:
        assert done.returncode == 0 and done.stdout == "built 4\n", done.stderr
    else:
        assert done.returncode == -signal.SIGSEGV, f"{RTX.version()}: {done.stdout}{done.stderr}"
