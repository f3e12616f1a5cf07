"""A decode step allocates nothing in the library, once it has run."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, parser

from linexport.models import feature_maps
from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from linexport.plugins.ops.window_attention import WindowSpec
from linexport.targets.cpu_fusion import with_programs
from linexport.targets.cpu_fusion.chains import with_chains
from tests.support import cached_attention as cached
from tests.support.exponentials import four_nodes
from tests.support.layouts import Layout, mapped_model
from tests.support.mixers import mixer
from tests.support.native import build, one_node, session
from tests.support.windows import window_node

pytestmark = pytest.mark.slow

COUNTER = Path(__file__).parents[1] / "support/scripts/count_allocations.cc"
STATES = {
    "past_state": "present_state",
    "past_normalizer": "present_normalizer",
    "past_key_max": "present_key_max",
    "past_conv": "present_conv",
    "past_key": "present_key",
    "past_value": "present_value",
    "past_seen": "present_seen",
    "past_sink_key": "present_sink_key",
    "past_sink_value": "present_sink_value",
    "past_left": "present_left",
}


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library with a counter of its own allocations, those of libstdc++'s code among them."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    flags = ("-static-libstdc++", "-Wl,-Bsymbolic", "-Wl,--wrap=malloc")
    return build(tmp_path_factory.mktemp("counted"), *flags, more=[COUNTER])


def attention(rule: str, heads: int, width: int, **of_layout: Any) -> onnx.ModelProto:
    spec = LinearAttentionSpec(heads, heads, rule, normalize=not rule.endswith("delta"), eps=0.25)
    return Layout(spec, heads, width, width, past=True, masked=True, **of_layout).model()


def mapped(kind: str) -> onnx.ModelProto:
    spec = LinearAttentionSpec(2, 2, normalize=True, eps=0.25)
    phi = feature_maps.find_map(kind)(8)
    shapes: dict[str, Any] = dict.fromkeys(("query", "key", "value"), ("B", "T", 16))
    shapes |= {"past_state": ("B", 2, phi.features, 8), "past_normalizer": ("B", 2, phi.features)}
    return mapped_model(spec, phi, shapes)


def convolution(kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    shapes = {"input": ("B", 3, "T"), "weight": (3, 1, 4), "bias": (3,), "past_state": ("B", 3, 3)}
    outputs = ("output", "present_state")
    return one_node("CausalConvWithState", shapes, outputs, kind, activation="silu")


def delta_rule() -> onnx.ModelProto:
    names = ("query", "key", "value", "decay", "a", "b")
    shapes = dict.fromkeys(names, ("B", "T", 16)) | {"past_state": ("B", 2, 8, 8)}
    return one_node("GeneralizedDeltaRule", shapes, ("output", "present_state"), num_heads=2)


def experts(kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    shapes: dict[str, Any] = dict.fromkeys(("index", "weight"), ("T", 2)) | {"x": ("T", 16)}
    shapes |= {"up": (4, 24, 16), "down": (4, 16, 12)}
    return one_node("MixtureOfExperts", shapes, ("y",), kind)


def exponents() -> onnx.ModelProto:
    names = ("query", "key", "decay")
    shapes = dict.fromkeys(names, ("B", "T", 16)) | {"past_key_max": ("B", 2, 8)}
    outputs = ("query_features", "key_features", "present_decay", "present_key_max")
    return one_node("StabilizedExp", shapes, outputs, q_num_heads=2, k_num_heads=2)


def exponential_attention() -> onnx.ModelProto:
    return with_programs(four_nodes("favor+", ((2, 2), 8, 8, 12), {"past", "mask"}))


def window() -> onnx.ModelProto:
    spec = WindowSpec(4, 2, 6, 2, 0.5)
    return window_node(spec, (8, 8))


def over_cache(seen: bool) -> onnx.ModelProto:
    return with_programs(cached.model(cached.Sizes(8, 2, seen=seen), 1))


def program() -> onnx.ModelProto:
    text = "s = Sigmoid(x) y = Mul(x, s) z = Add(y, x)"
    head = '<ir_version: 10, opset_import: ["": 20]>'
    shape = "float[B, T, 16]"
    return with_programs(parser.parse_model(f"{head} g ({shape} x) => ({shape} z) {{ {text} }}"))


MODELS = {
    "linear": lambda: attention("linear", 2, 8),
    "gated": lambda: attention("gated", 2, 8),
    "delta": lambda: attention("delta", 2, 8),
    "gated delta": lambda: attention("gated_delta", 2, 8),
    "a state that threads share": lambda: attention("linear", 1, 512),
    "bfloat16": lambda: attention("linear", 2, 8, dtype="bfloat16"),
    "elu1": lambda: mapped("elu1"),
    "taylor2": lambda: mapped("taylor2"),
    "convolution": convolution,
    "convolution, float16": lambda: convolution(TensorProto.FLOAT16),
    "generalised delta rule": delta_rule,
    "experts": experts,
    "experts, bfloat16": lambda: experts(TensorProto.BFLOAT16),
    "stabilised exponentials": exponents,
    "exponential attention": exponential_attention,
    "window": window,
    "attention over a cache": lambda: over_cache(False),
    "attention over a cache, keys that are seen": lambda: over_cache(True),
    "program": program,
    "chain": lambda: with_chains(with_programs(mixer())),
}


def bind(opened: ort.InferenceSession) -> ort.IOBinding:
    """Random inputs of one token, each state in the memory of its past."""
    rng, binding = np.random.default_rng(0), opened.io_binding()
    kept = {}
    for x in opened.get_inputs():
        free = cached.lengths(1)
        drawn = rng.normal(size=[free.get(n, 1) if isinstance(n, str) else n for n in x.shape])
        forms = {"tensor(bool)": drawn > 0, "tensor(int64)": np.zeros(drawn.shape, np.int64)}
        value = forms.get(x.type, drawn.astype(np.float32))
        kept[x.name] = ort.OrtValue.ortvalue_from_numpy(value)
        binding.bind_ortvalue_input(x.name, kept[x.name])
    present = {STATES[n]: value for n, value in kept.items() if n in STATES}
    for y in opened.get_outputs():
        if y.name in present:
            binding.bind_ortvalue_output(y.name, present[y.name])
        else:
            binding.bind_output(y.name)
    return binding


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_decode_step_allocates_nothing(
    name: str, threads: int, counted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINEXPORT_TEST_LIBRARY", str(counted))
    opened = session(MODELS[name](), threads)
    binding, count = bind(opened), ctypes.CDLL(str(counted)).linexport_allocations
    found: list[int] = []
    while len(found) < 50 and 0 not in found:  # a thread allocates when it has its first part
        before = count()
        for _ in range(20):
            opened.run_with_iobinding(binding)
        found.append(count() - before)
    assert count() > 0
    assert found[-1] == 0
