"""The operators under ThreadSanitizer, on threads that it sees.

ONNX Runtime's own pool is not built with it, and hands work over in ways that it does not know:
what threads of the pool write would be taken for races. So a small program runs the operators.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from linexport.models import feature_maps
from linexport.plugins.cpu import library
from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from linexport.plugins.ops.op import attribute_value
from linexport.plugins.ops.window_attention import WindowSpec
from linexport.targets.cpu_fusion import (
    OP,
    cached_attention,
    chains,
    convolutions,
    exponentials,
    with_programs,
)
from tests.support import cached_attention as cached
from tests.support.exponentials import four_nodes
from tests.support.layouts import Layout, mapped_model
from tests.support.mixers import mixer
from tests.support.native import build, one_node
from tests.support.windows import window_node

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "support/scripts/run_operators.cc"
THREADS = 4
LENGTHS = (1, 70, 1100)


def attention(rule: str, heads: int, width: int, **of_layout: Any) -> onnx.ModelProto:
    normalize, queries = not rule.endswith("delta"), of_layout.pop("queries", heads)
    spec = LinearAttentionSpec(queries, heads, rule, normalize=normalize, eps=0.25)
    return Layout(spec, heads, 32, width, past=True, **of_layout).model()


def both_ways() -> onnx.ModelProto:
    spec = LinearAttentionSpec(2, 2, causal=False, normalize=True, eps=0.25)
    return Layout(spec, 2, 32, 200, masked=True).model()


def polynomial(kind: str, heads: int) -> onnx.ModelProto:
    spec = LinearAttentionSpec(heads, heads, normalize=True, eps=0.25)
    phi = feature_maps.find_map(kind)(16)
    shapes: dict[str, Any] = dict.fromkeys(("query", "key"), ("B", "T", heads * 16))
    shapes["value"] = ("B", "T", heads * 64)
    shapes |= {"past_state": ("B", heads, phi.features, 64)}
    return mapped_model(spec, phi, shapes | {"past_normalizer": ("B", heads, phi.features)})


def scan() -> onnx.ModelProto:
    spec = LinearAttentionSpec(1, 300, "gated")
    return Layout(spec, 1, 16, 1, past=True, factored=True).model()


def numbers() -> onnx.ModelProto:
    spec = LinearAttentionSpec(1, 300, "gated", normalize=True, eps=0.25)
    return Layout(spec, 300, 1, 1, past=True, masked=True).model()


def delta_rule(heads: int) -> onnx.ModelProto:
    names = ("query", "key", "value", "decay", "a", "b")
    shapes: dict[str, Any] = dict.fromkeys(names, ("B", "T", heads * 64))
    shapes["past_state"] = ("B", heads, 64, 64)
    return one_node("GeneralizedDeltaRule", shapes, ("output", "present_state"), num_heads=heads)


def exponents(heads: int, features: int = 96) -> onnx.ModelProto:
    shapes: dict[str, Any] = dict.fromkeys(("query", "key"), ("B", "T", heads * features))
    shapes |= {"past_key_max": ("B", heads, features), "decay": ("B", "T", heads * features)}
    outputs = ("query_features", "key_features", "present_decay", "present_key_max")
    return one_node("StabilizedExp", shapes, outputs, q_num_heads=heads, k_num_heads=heads)


def experts(kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    shapes: dict[str, Any] = dict.fromkeys(("index", "weight"), ("T", 2)) | {"x": ("T", 96)}
    shapes |= {"up": (4, 320, 96), "down": (4, 96, 160)}
    return one_node("MixtureOfExperts", shapes, ("y",), kind)


def convolution() -> onnx.ModelProto:
    shapes = {"input": ("B", 99, "T"), "weight": (99, 1, 4), "past_state": ("B", 99, 3)}
    return one_node("CausalConvWithState", shapes, ("output", "present_state"), activation="silu")


def tokens_first() -> onnx.ModelProto:
    made = convolution()
    made.graph.node[0].op_type = convolutions.OP
    dims = made.graph.input[0].type.tensor_type.shape.dim
    dims[1].dim_param, dims[2].dim_value = "T", 99
    return made


def program() -> onnx.ModelProto:
    text = "s = Sigmoid(x) y = Mul(x, s) m = ReduceMean<keepdims: int = 1>(y, axes) z = Sub(y, m)"
    head = '<ir_version: 10, opset_import: ["": 20]>'
    shape = "float[B, T, 160]"
    graph = f"g ({shape} x) => ({shape} z) <int64[1] axes = {{-1}}> {{ {text} }}"
    return with_programs(parser.parse_model(f"{head} {graph}"))


def exponential(heads: int) -> onnx.ModelProto:
    return with_programs(four_nodes("favor+", ((heads, heads), 32, 200, 64), {"past", "mask"}))


def over_cache(queries: int, heads: int, seen: bool) -> onnx.ModelProto:
    return with_programs(cached.model(cached.Sizes(queries, heads, 64, 64, seen=seen), 1))


def window(heads: int, size: int) -> onnx.ModelProto:
    spec = WindowSpec(2 * heads, heads, size, 2, 0.1)
    return window_node(spec, (40, 64))


def models() -> list[onnx.ModelProto]:
    return [
        *(attention(rule, heads, 200) for rule in ("linear", "gated") for heads in (1, 8)),
        *(attention(rule, heads, 200) for rule in ("delta", "gated_delta") for heads in (1, 8)),
        attention("gated", 2, 200, per_channel=True, masked=True, queries=4),
        attention("linear", THREADS, 200, dtype="bfloat16"),  # too many heads for segments
        both_ways(),
        scan(),
        numbers(),
        *(polynomial(kind, heads) for kind in ("taylor2", "monomials") for heads in (1, 8)),
        *(delta_rule(heads) for heads in (1, 8)),
        *(exponents(heads) for heads in (1, 8)),
        exponents(300, features=2),
        *(exponential(heads) for heads in (1, 8)),
        *(window(heads, size) for heads in (1, 8) for size in (5, 150)),
        *(over_cache(*form) for form in ((1, 1, False), (4, 1, True), (16, 8, False))),
        experts(),
        experts(TensorProto.BFLOAT16),
        convolution(),
        tokens_first(),
        program(),
        chains.with_chains(with_programs(mixer())),
    ]


def case(model: onnx.ModelProto, length: int) -> Iterator[bytes]:
    """The model's one node of the library on random inputs; states are written where they were."""
    node = next(n for n in model.graph.node if n.domain)
    casts = {n.output[0]: n for n in model.graph.node if n.op_type == "Cast"}
    shapes = {v.name: v.type.tensor_type for v in model.graph.input}
    arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    narrow = {attribute_value(casts[n].attribute[0]) for n in node.input if n in casts}
    activation = max(narrow, default=TensorProto.FLOAT)
    rng, sizes = np.random.default_rng(length), {"B": 1, "T": length, **cached.lengths(length)}
    yield f"case {node.op_type} {activation} {THREADS}\n".encode()
    for attribute in node.attribute:
        kind = {int: "i", float: "f", str: "s"}[type(attribute_value(attribute))]
        yield f"{kind} {attribute.name} {attribute_value(attribute)}\n".encode()
    for name in node.input:
        source = casts[name].input[0] if name in casts else name
        type_ = activation if name in casts else TensorProto.FLOAT
        if source in shapes:
            dims = (d.dim_value or sizes[d.dim_param] for d in shapes[source].shape.dim)
            x = rng.normal(size=[*dims])
            if shapes[source].elem_type == TensorProto.BOOL:
                arrays[source], type_ = x > -0.5, TensorProto.BOOL
            elif shapes[source].elem_type == TensorProto.INT64:  # two of four experts
                arrays[source], type_ = np.argsort(x, 1), TensorProto.INT64
            else:  # decays fall, and normalisers are positive
                x = -np.abs(x) / 100 if "decay" in source else np.abs(x) if positive(source) else x
                arrays[source] = x.astype(helper.tensor_dtype_to_np_dtype(type_))
        elif source:
            type_ = helper.np_dtype_to_tensor_dtype(arrays[source].dtype)
        yield _written(arrays[source], type_) if source else b"x 0\n"
    pasts = [name.replace("present", "past").removeprefix("own_") for name in node.output]
    inputs = [*node.input]
    for past in pasts:
        yield f"y {inputs.index(past) if past in inputs else -1}\n".encode()
    yield b"run\n"


def positive(source: str) -> bool:
    return source in ("query", "key") or "norm" in source


def _written(x: np.ndarray, type_: int) -> bytes:
    numbers = [type_, x.ndim, *x.shape, x.nbytes]
    return f"x {' '.join(map(str, numbers))}\n".encode() + x.tobytes() + b"\n"


def test_thread_sanitizer_finds_nothing(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    made = build(tmp_path, "-fsanitize=thread", more=[PROGRAM], name="run_operators")
    written = tmp_path / "cases"
    written.write_bytes(b"".join(b"".join(case(m, n)) for m in models() for n in LENGTHS))
    done = subprocess.run([made, written], capture_output=True, text=True, timeout=3000)
    assert (done.returncode, done.stderr) == (0, "")
    ran = done.stdout.split()
    assert len(ran) == len(models()) * len(LENGTHS)
    assert {*ran} == library.OPS | {
        OP,
        cached_attention.OP,
        chains.OP,
        convolutions.OP,
        exponentials.OP,
    }
