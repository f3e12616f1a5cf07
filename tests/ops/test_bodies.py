"""The portable bodies on ONNX Runtime and in onnx's own evaluator, against the oracle.

Every model is built once with a dynamic length and runs at all lengths tried. Errors are compared
with the sum of absolute values of the terms (``Layout.magnitude``), element by element, so that a
small value next to a large one is checked as strictly as the large one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from linexport.errors import OpError
from linexport.plugins.ops.causal_conv import OP, causal_conv
from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from linexport.plugins.ops.registry import attach_functions
from linexport.targets.lowering import convolution
from tests.support import runtimes
from tests.support.comparison import assert_close
from tests.support.layouts import ELEMENT, Layout, layouts, one_op_model

RULES = ("linear", "gated", "delta", "gated_delta")
RTOL = {"linear": 1e-6, "gated": 3e-6, "delta": 5e-6, "gated_delta": 5e-6}
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Rounding of the output only: states stay float32 for half-precision activations."""
SMALLEST = {"float32": 1e-37, "float16": 2.0**-25, "bfloat16": 1e-37}
"""Error that rounding adds however small the value: float16 has few exponents."""


def fixed(examples: int) -> settings:
    """The same examples in every run, however slow the machine."""
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None)


def lengths(chunk: int) -> list[int]:
    """Around the boundaries of chunks of that size, and of the per-channel chunk of 16."""
    near = {0, 1, 2, chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk + 2, 15, 16, 17, 33}
    return sorted(near - {-1})


def check(layout: Any, run: Any, x: dict[str, np.ndarray], rtol: float) -> None:
    """One run against the oracle, the output allowed the rounding of its dtype on top."""
    got, want, magnitude = run(x), layout.reference(x), layout.magnitude(x)
    rounding = ROUNDING[layout.dtype] * np.abs(want[0])
    assert_close(got[:1], want[:1], [magnitude[0] + rounding / rtol], rtol, SMALLEST[layout.dtype])
    assert_close(got[1:], want[1:], magnitude[1:], rtol)


@pytest.mark.parametrize("rule", [*RULES[:-1], pytest.param(RULES[-1], marks=pytest.mark.smoke)])
@fixed(40)
@given(data=st.data())
def test_equals_oracle(rule: str, data: st.DataObject) -> None:
    layout = data.draw(layouts(rule))
    model = layout.model()
    onnx.checker.check_model(model, full_check=True)
    run = runtimes.on_onnxruntime(model)
    few = st.lists(
        st.sampled_from(lengths(layout.spec.chunk_size)), min_size=3, max_size=4, unique=True
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    for length in data.draw(few):
        x = layout.inputs(rng, data.draw(st.integers(1, 3)), length)
        check(layout, run, x, RTOL[rule])


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_every_length_around_chunks(rule: str, per_channel: bool) -> None:
    """All lengths to past three chunks, then several hundred tokens, on one model."""
    spec = LinearAttentionSpec(4, 2, rule, scale=0.5, chunk_size=16 if per_channel else 5)
    layout = Layout(spec, 1, past=True, masked=True, per_channel=per_channel)
    run = runtimes.on_onnxruntime(layout.model())
    rng = np.random.default_rng(0)
    for length in [*range(0, 52 if per_channel else 18), 400, 0, 1]:
        check(layout, run, layout.inputs(rng, 2, length), RTOL[rule])


@pytest.mark.parametrize("normalize", [False, True])
def test_every_length_both_ways(normalize: bool) -> None:
    spec = LinearAttentionSpec(2, 4, causal=False, normalize=normalize, scale=0.5, eps=1e-6)
    layout = Layout(spec, 2, masked=True)
    run = runtimes.on_onnxruntime(layout.model())
    rng = np.random.default_rng(0)
    for length in [*range(0, 9), 63, 64, 65, 500, 0, 1]:
        check(layout, run, layout.inputs(rng, 2, length), RTOL["linear"])


@pytest.mark.parametrize("normalize", [False, True])
def test_queries_and_keys_of_different_lengths(normalize: bool) -> None:
    spec = LinearAttentionSpec(4, 2, causal=False, normalize=normalize, scale=0.5, eps=1e-6)
    layout = Layout(spec, 1, masked=True)
    model = layout.model()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "S"
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "S"
    run = runtimes.on_onnxruntime(model)
    rng = np.random.default_rng(0)
    for queries, keys in ((5, 9), (70, 1), (1, 64), (0, 3)):
        x = layout.inputs(rng, 2, keys) | {"query": layout.inputs(rng, 2, queries)["query"]}
        check(layout, run, x, RTOL["linear"])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chunk", [16, 64, 100, 256])
def test_typical_widths(rule: str, chunk: int) -> None:
    spec = LinearAttentionSpec(4, 2, rule, normalize="delta" not in rule, chunk_size=chunk)
    layout = Layout(spec, 2, d_k=32, d_v=48, past=True)
    run = runtimes.on_onnxruntime(layout.model())
    for length in (1, 300):
        x = layout.inputs(np.random.default_rng(length), 2, length)
        check(layout, run, x, RTOL[rule])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
@fixed(8)
@given(data=st.data())
def test_half_precision(rule: str, dtype: str, data: st.DataObject) -> None:
    """Only the output is rounded to half precision: states are as accurate as in float32."""
    layout = data.draw(layouts(rule, dtype))
    model = layout.model()
    onnx.checker.check_model(model, full_check=True)
    run = runtimes.on_onnxruntime(model)
    for length in (1, layout.spec.chunk_size + 1, 70):
        x = layout.inputs(np.random.default_rng(length), 2, length)
        check(layout, run, x, RTOL[rule])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", [*RULES, "bidirectional"])
def test_equals_oracle_in_a_second_runtime(rule: str, dtype: str) -> None:
    causal = rule != "bidirectional"
    spec = LinearAttentionSpec(
        4,
        2,
        rule if causal else "linear",
        causal=causal,
        normalize="delta" not in rule,
        scale=0.7,
        eps=1e-6,
        chunk_size=4,
    )
    for per_channel in (False, True):
        layout = Layout(spec, 1, past=causal, masked=True, dtype=dtype, per_channel=per_channel)
        run = runtimes.on_reference(layout.model())
        for length in (0, 1, 4, 11, 37):
            x = layout.inputs(np.random.default_rng(length), 2, length)
            check(layout, run, x, 5e-6)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
@pytest.mark.parametrize("decay", [-np.inf, -1e4, -50.0, -5.0, -1e-6, 0.0])
def test_decay_of_any_size(decay: float, rule: str, per_channel: bool) -> None:
    """The same decay at every token, and at one token among ordinary ones."""
    spec = LinearAttentionSpec(2, 2, rule, normalize=rule == "gated")
    layout = Layout(spec, 2, past=True, per_channel=per_channel)
    run = runtimes.on_onnxruntime(layout.model())
    rng = np.random.default_rng(3)
    for length, place in ((150, slice(None)), (150, slice(20, 21)), (1, slice(None))):
        x = layout.inputs(rng, 2, length)
        x["decay"][:, place] = decay
        check(layout, run, x, 1e-5)


@pytest.mark.parametrize("rule", ["delta", "gated_delta"])
@pytest.mark.parametrize("chunk", [64, 128])
def test_delta_rule_with_one_key_repeated(rule: str, chunk: int) -> None:
    """The least well-conditioned chunk: every token overwrites the same direction, beta up to 2."""
    layout = Layout(LinearAttentionSpec(1, 1, rule, chunk_size=chunk), 1, d_k=8, past=True)
    run = runtimes.on_onnxruntime(layout.model())
    for beta in (0.0, 0.5, 1.0, 1.9, 2.0):
        x = layout.inputs(np.random.default_rng(4), 1, 200)
        x["key"][:] = x["key"][:, :1]
        x["beta"][:] = beta
        # Above 1 the entries of the inverse do not die out; PyTorch's solver loses 1.5e-5 too.
        check(layout, run, x, 5e-6 if beta <= 1 else 2e-4)


@pytest.mark.parametrize("rule", ["linear", "gated", "bidirectional"])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_zero_denominators(rule: str, eps: float) -> None:
    """relu'd queries and keys without positive components: zeros with eps, NaN without."""
    causal = rule != "bidirectional"
    spec = LinearAttentionSpec(
        2, 2, rule if causal else "linear", causal=causal, normalize=True, eps=eps, chunk_size=8
    )
    layout = Layout(spec, 2)
    run = runtimes.on_onnxruntime(layout.model())
    for name in ("query", "key"):
        x = layout.inputs(np.random.default_rng(5), 2, 20)
        x[name][:, :11] = 0.0
        got, want = run(x)[0], layout.reference(x)[0]
        assert np.isnan(want).any() == (eps == 0 and (causal or name == "query"))
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        if eps:
            assert (got == 0).any() == (causal or name == "query")
        check(layout, run, x, 1e-5)


@pytest.mark.parametrize("scale", [1e4, 1e-4, 1e-9])
@pytest.mark.parametrize("rule", [*RULES, "bidirectional"])
def test_large_and_tiny_values(rule: str, scale: float) -> None:
    causal, delta = rule != "bidirectional", "delta" in rule
    spec = LinearAttentionSpec(
        4, 2, rule if causal else "linear", causal=causal, normalize=not delta, scale=0.1
    )
    layout = Layout(spec, 2, past=causal)
    run = runtimes.on_onnxruntime(layout.model())
    x = layout.inputs(np.random.default_rng(6), 2, 90)
    for name in ("query", "value", *([] if delta else ["key", "past_normalizer"])):
        if name in x:
            x[name] *= np.float32(scale)
    if causal:
        x["past_state"] *= np.float32(scale if delta else scale**2)
    check(layout, run, x, 1e-5)


def test_shapes_may_be_static() -> None:
    """Fixed batch and length in the file, as other exporters write them."""
    layout = Layout(LinearAttentionSpec(2, 2, "gated_delta"), 2, past=True, masked=True)
    model = layout.model()
    for info in [*model.graph.input, *model.graph.output]:
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = {"B": 2, "T": 70}[dim.dim_param]
    attach_functions(model)
    onnx.checker.check_model(model, full_check=True)
    x = layout.inputs(np.random.default_rng(7), 2, 70)
    check(layout, runtimes.on_onnxruntime(model), x, 5e-6)


@pytest.mark.parametrize("opset", range(18, 27))
def test_bodies_mean_the_same_at_every_opset(opset: int) -> None:
    """A body is declared at the opset of its model."""
    for rule in RULES:
        spec = LinearAttentionSpec(2, 4, rule, normalize="delta" not in rule, eps=1e-6)
        layout = Layout(spec, 2, past=True, masked=True, per_channel=True)
        model = layout.model()
        model.opset_import[0].version = opset
        attach_functions(model)
        assert {o.version for o in model.functions[0].opset_import if not o.domain} == {opset}
        onnx.checker.check_model(model, full_check=True)
        x = layout.inputs(np.random.default_rng(12), 2, 40)
        check(layout, runtimes.on_onnxruntime(model), x, RTOL[rule])


def test_a_lower_opset_is_refused() -> None:
    model = Layout(LinearAttentionSpec(2, 2), 2).model()
    model.opset_import[0].version = 17
    with pytest.raises(OpError, match="opset 17; linexport ops need at least 18"):
        attach_functions(model)


def test_attaching_twice_changes_nothing() -> None:
    layout = Layout(LinearAttentionSpec(2, 2, "gated"), 2)
    model = layout.model()
    once = model.SerializeToString(deterministic=True)
    attach_functions(model)
    assert model.SerializeToString(deterministic=True) == once


@pytest.mark.parametrize("runtime", ["on_onnxruntime", "on_reference"])
def test_nodes_of_one_kind_share_a_function(runtime: str) -> None:
    """Two equal nodes and one of another scale: two functions, told apart by their overload."""
    layout = Layout(LinearAttentionSpec(2, 2, "gated"), 2)
    model = layout.model()
    for name, scale in (("second", 1.0), ("third", 2.0)):
        node = onnx.NodeProto.FromString(model.graph.node[0].SerializeToString())
        node.output[:] = [name]
        next(a for a in node.attribute if a.name == "scale").f = scale
        model.graph.node.append(node)
        info = onnx.ValueInfoProto.FromString(model.graph.output[0].SerializeToString())
        info.name = name
        model.graph.output.append(info)
    attach_functions(model)
    assert len(model.functions) == 2
    overloads = [n.overload for n in model.graph.node if n.domain == "linexport"]
    assert overloads[0] == overloads[1] != overloads[2]
    onnx.checker.check_model(model, full_check=True)
    x = layout.inputs(np.random.default_rng(8), 1, 9)
    output, _, _, second, third = getattr(runtimes, runtime)(model)(x)
    np.testing.assert_array_equal(second, output)
    np.testing.assert_allclose(third, 2 * output, rtol=1e-6)


@pytest.mark.parametrize("outputs", [["y"], ["y", "", ""], ["y", "s"], ["y", "", "z"]])
def test_outputs_may_be_left_out(outputs: list[str]) -> None:
    layout = Layout(LinearAttentionSpec(2, 2, "gated", normalize=True), 2, past=True)
    model = layout.model()
    node = next(n for n in model.graph.node if n.op_type == "LinearAttention")
    node.output[:] = outputs
    del model.graph.node[1:], model.graph.output[:]
    model.graph.output.extend(
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * (4 if n == "s" else 3))
        for n in outputs
        if n
    )
    attach_functions(model)
    onnx.checker.check_model(model, full_check=True)
    x = layout.inputs(np.random.default_rng(11), 1, 9)
    want = [r for r, n in zip(layout.reference(x), outputs, strict=False) if n]
    assert_close(runtimes.on_onnxruntime(model)(x), want, rtol=1e-4)


CONVOLUTIONS = {"portable": OP.portable, "channels_last": convolution.channels_last}


def conv_model(
    size: int,
    activation: str,
    bias: bool,
    past: bool,
    kind: int,
    opset: int = 18,
    channels: int = 4,
    lowering: str = "portable",
) -> Any:
    """One CausalConvWithState node with dynamic batch and length, float32 outside."""
    shapes: dict[str, tuple[Any, ...]] = {"input": ("B", channels, "T")}
    shapes |= {"weight": (channels, 1, size)}
    shapes |= {"bias": (channels,)} if bias else {}
    shapes |= {"past_state": ("B", channels, size - 1)} if past else {}
    names = [f"{n}_cast" if n in shapes else "" for n in ("input", "weight", "bias", "past_state")]
    while not names[-1]:
        names.pop()
    casts = [helper.make_node("Cast", [n], [f"{n}_cast"], to=kind) for n in shapes]
    node = helper.make_node(
        "CausalConvWithState", names, ["y", "s"], domain="linexport", activation=activation
    )
    back = [
        helper.make_node("Cast", [a], [b], to=TensorProto.FLOAT)
        for a, b in (("y", "output"), ("s", "present_state"))
    ]
    wide = TensorProto.FLOAT
    model = one_op_model(
        [*casts, node, *back],
        [helper.make_tensor_value_info(n, wide, s) for n, s in shapes.items()],
        [
            helper.make_tensor_value_info("output", wide, ("B", channels, "T")),
            helper.make_tensor_value_info("present_state", wide, ("B", channels, size - 1)),
        ],
        [helper.make_tensor_value_info(f"{n}_cast", kind, s) for n, s in shapes.items()],
    )
    model.opset_import[0].version = opset
    attach_functions(model, lambda *_: CONVOLUTIONS[lowering])
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("runtime", "lowering"),
    [
        ("on_onnxruntime", "portable"),
        ("on_reference", "portable"),
        ("on_onnxruntime", "channels_last"),
    ],
)
@fixed(12)
@given(
    size=st.integers(1, 5),
    activation=st.sampled_from(["none", "silu", "swish"]),
    bias=st.booleans(),
    past=st.booleans(),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    opset=st.sampled_from([18, 22, 26]),
    channels=st.sampled_from([4, 32]),  # 32: blocks of ONNX Runtime's depthwise kernel
)
def test_causal_conv(
    runtime: str,
    lowering: str,
    dtype: str,
    size: int,
    activation: str,
    bias: bool,
    past: bool,
    lengths: list[int],
    opset: int,
    channels: int,
) -> None:
    narrow, kind = ELEMENT[dtype]
    model = conv_model(size, activation, bias, past, kind, opset, channels, lowering)
    run = getattr(runtimes, runtime)(model)
    rng = np.random.default_rng(size)
    for length in lengths:
        x = {"input": rng.normal(size=(2, channels, length))}
        x |= {"weight": rng.normal(size=(channels, 1, size))}
        x |= {"bias": rng.normal(size=channels)} if bias else {}
        x |= {"past_state": rng.normal(size=(2, channels, size - 1))} if past else {}
        x = {n: a.astype(narrow) for n, a in x.items()}
        wide = {n: a.astype(np.float64) for n, a in x.items()}
        want = causal_conv(activation, **wide)
        terms = causal_conv("none", **{n: np.abs(a) for n, a in wide.items()})
        rtol = 2e-6 + ROUNDING[dtype]
        assert_close(run(x)[:1], want[:1], terms[:1], rtol, SMALLEST[dtype])
        np.testing.assert_array_equal(run(x)[1], want[1].astype(np.float32))


@pytest.mark.parametrize("lowering", CONVOLUTIONS)
def test_causal_conv_carries_its_state(lowering: str) -> None:
    """Splitting a sequence anywhere, pieces shorter than the kernel included, changes nothing."""
    model = conv_model(4, "silu", True, True, TensorProto.FLOAT, lowering=lowering)
    run = runtimes.on_onnxruntime(model)
    rng = np.random.default_rng(9)
    shapes = {"input": (2, 4, 13), "weight": (4, 1, 4), "bias": (4,), "past_state": (2, 4, 3)}
    x = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    whole, state = run(x)
    pieces, past = [], x["past_state"]
    for part in (slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 13)):
        piece, past = run({**x, "input": x["input"][:, :, part], "past_state": past})
        pieces.append(piece)
    np.testing.assert_allclose(np.concatenate(pieces, 2), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(past, state)


@pytest.mark.parametrize("rule", RULES)
def test_state_carries_on(rule: str) -> None:
    """Prefill and decode in pieces on one model give what one long run gives."""
    spec = LinearAttentionSpec(2, 2, rule, normalize="delta" not in rule, eps=1e-6, chunk_size=8)
    layout = replace(Layout(spec, 2, past=True), per_channel=True)
    run = runtimes.on_onnxruntime(layout.model())
    x = layout.inputs(np.random.default_rng(10), 2, 45)
    whole = run(x)
    past = {n: a for n, a in x.items() if n.startswith("past")}
    pieces = []
    for part in (slice(0, 21), slice(21, 21), slice(21, 22), slice(22, 23), slice(23, 45)):
        piece = {n: a[:, part] for n, a in x.items() if n not in past}
        output, *states = run({**piece, **past})
        past = dict(zip(past, states, strict=False))
        pieces.append(output)
    magnitude = layout.magnitude(x)
    assert_close([np.concatenate(pieces, 1)], whole[:1], magnitude[:1], 1e-5)
    assert_close(list(past.values()), whole[1 : 1 + len(past)], magnitude[1 : 1 + len(past)])
