"""The PyTorch functions against the oracle in float64; their gradients; how they are exported."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import profile

from linexport.errors import OpError
from linexport.models import functional
from linexport.models.feature_maps import find_map, kinds
from linexport.plugins.ops.causal_conv import causal_conv
from linexport.plugins.ops.linear_attention import INPUTS, LinearAttentionSpec
from tests.support.comparison import assert_close
from tests.support.layouts import Layout, layouts

RULES = ("linear", "gated", "delta", "gated_delta")
RTOL = 1e-11

Tensors = dict[str, torch.Tensor]


def fixed(examples: int) -> settings:
    """The same examples in every run, however slow the machine."""
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None)


def tensors(arrays: dict[str, np.ndarray], dtype: torch.dtype = torch.float64) -> Tensors:
    """As PyTorch tensors, the mask left bool."""
    wide = {n: x if x.dtype == bool else x.astype(np.float64) for n, x in arrays.items()}
    found = {n: torch.from_numpy(x.copy()) for n, x in wide.items()}
    return {n: x if x.dtype == torch.bool else x.to(dtype) for n, x in found.items()}


@pytest.mark.parametrize("rule", RULES)
@fixed(80)
@given(data=st.data())
def test_linear_attention_equals_oracle(rule: str, data: st.DataObject) -> None:
    layout = data.draw(layouts(rule))
    chunk = layout.spec.chunk_size
    near = [0, 1, 2, chunk - 1, chunk, chunk + 1, 2 * chunk + 1, 16, 17, 50]
    length = data.draw(st.sampled_from(near))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = layout.inputs(rng, data.draw(st.integers(1, 3)), length)
    got = functional.linear_attention(**tensors(x), **layout.spec.attributes())
    assert_close(
        [g.numpy() for g in got], layout.reference(x), layout.magnitude(x), RTOL, atol=1e-300
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [-np.inf, -1e4, -50.0, 0.0])
@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_decay_of_any_size(decay: float, rule: str, per_channel: bool, dtype: torch.dtype) -> None:
    """No digits lost to a strong decay: differences of sums would lose them in float32."""
    spec = LinearAttentionSpec(2, 2, rule, normalize=rule == "gated")
    layout = Layout(spec, 2, past=True, per_channel=per_channel)
    for place in (slice(None), slice(20, 21)):
        x = layout.inputs(np.random.default_rng(3), 2, 90)
        x["decay"][:, place] = decay
        got = [
            g.numpy() for g in functional.linear_attention(**tensors(x, dtype), **spec.attributes())
        ]
        rtol, atol = (RTOL, 1e-300) if dtype == torch.float64 else (5e-6, 1e-37)
        assert_close(got, layout.reference(x), layout.magnitude(x), rtol, atol)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_half_precision_is_computed_in_float32(rule: str, dtype: torch.dtype) -> None:
    layout = Layout(LinearAttentionSpec(2, 2, rule, chunk_size=8), 2)
    x = tensors(layout.inputs(np.random.default_rng(0), 2, 30), dtype)
    output, state, normalizer = functional.linear_attention(**x, **layout.spec.attributes())
    assert output.dtype == dtype
    assert state.dtype == normalizer.dtype == torch.float32
    exact = {n: t.double().numpy() for n, t in x.items()}
    want, magnitude = layout.reference(exact), layout.magnitude(exact)
    got = [state.numpy(), normalizer.numpy()]
    assert_close(got, want[1:], magnitude[1:], 5e-6)
    rounding = torch.finfo(dtype).eps
    assert_close([output.double().numpy()], want[:1], magnitude[:1], rounding)


@fixed(40)
@given(
    size=st.integers(1, 5),
    length=st.integers(1, 20),
    activation=st.sampled_from(["none", "silu", "swish"]),
    bias=st.booleans(),
    past=st.booleans(),
)
def test_causal_conv_equals_oracle(
    size: int, length: int, activation: str, bias: bool, past: bool
) -> None:
    rng = np.random.default_rng(length)
    x = [rng.normal(size=(2, 3, length)), rng.normal(size=(3, 1, size))]
    x += [rng.normal(size=3) if bias else None, rng.normal(size=(2, 3, size - 1)) if past else None]
    got = functional.causal_conv(
        *(None if a is None else torch.from_numpy(a) for a in x), activation=activation
    )
    for g, want in zip(got, causal_conv(activation, *x), strict=True):
        np.testing.assert_allclose(g.numpy(), want, rtol=RTOL, atol=1e-14)


def test_wrong_calls_are_refused_as_by_the_op() -> None:
    q = torch.ones(1, 2, 4)
    with pytest.raises(OpError, match="key has batch 2; expected 1"):
        functional.linear_attention(q, torch.ones(2, 2, 4), q, q_num_heads=2, kv_num_heads=2)
    with pytest.raises(OpError, match="activation is 'relu'"):
        functional.causal_conv(q, torch.ones(2, 1, 3), activation="relu")
    with pytest.raises(OpError, match="weight has channels 5; expected 2"):
        functional.causal_conv(q, torch.ones(5, 1, 3))


# Operators ---------------------------------------------------------------------------------------


def operator_cases() -> list[Any]:
    """One call of each operator per kind of input, as (operator, arguments, keywords)."""
    x, w = torch.randn(2, 4, 9), torch.randn(4, 1, 3)
    half, past = torch.randn(2, 5, 8).half(), torch.randn(2, 4, 2)
    conv, maps = torch.ops.linexport.causal_conv.default, torch.ops.linexport.feature_map.default
    sides = [(kind, side) for kind in kinds() for side in ((), ("key", False))]
    sides += [(kind, ("key", True)) for kind in kinds() if find_map(kind).exponential]
    exponents = torch.ops.linexport.stabilized_exp.default
    return [
        (conv, (x, w, None, None, "none"), {}),
        (conv, (x, w, torch.randn(4), past, "silu"), {}),
        (conv, (x, torch.randn(4, 1, 1), None, None, "none"), {}),
        *((maps, (half, _parameters(kind), kind, 2, *rest), {}) for kind, rest in sides),
        *((exponents, (a, *rest, 4, 2, causal), {}) for a, rest, causal in _exponents()),
    ]


def _parameters(kind: str) -> list[torch.Tensor]:
    return list(find_map(kind)(4).frozen())


def _exponents() -> list[Any]:
    """Query, the tensors after it and causal, for StabilizedExp with 4 and 2 heads."""
    a, k, past = torch.randn(2, 5, 12), torch.randn(2, 5, 6), torch.randn(2, 2, 3)
    mask, decay = torch.rand(2, 5) > 0.3, -torch.rand(2, 5, 2)
    return [(a, (k, past, mask, decay), 1), (a, (k, None, None, None), 1), (a, (k, *[None] * 3), 0)]


CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
"""Without two checks of opcheck: the gradient's, as gradients go through the functions, and the
dynamic one, which makes a symbol of every size, of widths and kernel sizes too. Dynamic batch and
length are tested by export."""


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize(
    ("rule", "heads", "dtype"),
    [
        *((rule, (4, 2, 1), torch.float32) for rule in RULES),
        ("gated", (2, 4, 4), torch.float16),
        ("bidirectional", (2, 2, 2), torch.float64),
    ],
)
def test_linear_attention_operator(
    rule: str, heads: tuple[int, int, int], dtype: torch.dtype, past: bool
) -> None:
    causal = rule != "bidirectional"
    spec = LinearAttentionSpec(*heads[:2], rule if causal else "linear", causal=causal)
    layout = Layout(spec, heads[2], past=past and causal, masked=True)
    x = tensors(layout.inputs(np.random.default_rng(0), 2, 20), dtype)
    if "past_state" in x and dtype == torch.float16:
        x["past_state"] = x["past_state"].float()
    call = torch.ops.linexport.linear_attention.default
    arguments = tuple(x.get(name) for name in INPUTS)
    torch.library.opcheck(call, arguments, spec.attributes(), test_utils=CHECKS)
    want = functional.linear_attention(**x, **spec.attributes())
    for got, expected in zip(call(*arguments, **spec.attributes()), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("case", range(len(operator_cases())))
def test_operators(case: int) -> None:
    call, arguments, keywords = operator_cases()[case]
    torch.library.opcheck(call, arguments, keywords, test_utils=CHECKS)


def test_fake_tensors_are_refused_as_real_ones() -> None:
    with torch._subclasses.FakeTensorMode(), pytest.raises(OpError, match="weight has channels 5"):
        torch.ops.linexport.causal_conv(
            torch.ones(1, 4, 6), torch.ones(5, 1, 3), None, None, "none"
        )


# Gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "per_channel", "normalize"),
    [
        ("linear", False, False),
        ("linear", False, True),
        ("bidirectional", False, True),
        ("gated", False, False),
        ("gated", True, True),
        ("delta", False, False),
        ("gated_delta", False, False),
        ("gated_delta", True, False),
    ],
)
def test_gradients(rule: str, per_channel: bool, normalize: bool) -> None:
    causal = rule != "bidirectional"
    spec = LinearAttentionSpec(
        2,
        1,
        rule if causal else "linear",
        causal=causal,
        normalize=normalize,
        scale=0.7,
        eps=0.1,
        chunk_size=2,
    )
    layout = Layout(spec, 1, 2, 2, past=causal, per_channel=per_channel, masked=True)
    x = tensors(layout.inputs(np.random.default_rng(1), 1, 4))
    x["key_mask"][:, 1] = False
    names = [n for n in x if n != "key_mask"]

    def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given_ = dict(zip(names, values, strict=True))
        return functional.linear_attention(**given_, key_mask=x["key_mask"], **spec.attributes())

    assert torch.autograd.gradcheck(run, [x[n].requires_grad_() for n in names])


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_causal_conv_gradients(activation: str) -> None:
    shapes = ((1, 2, 4), (2, 1, 3), (2,), (1, 2, 2))
    values = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(
        lambda *v: functional.causal_conv(*v, activation=activation), values
    )


# Export ------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Two feature maps, a convolution and one linear attention of each rule."""

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule = rule
        self.phi = find_map("elu1")(4)
        self.weight = torch.nn.Parameter(torch.randn(8, 1, 3))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, _ = functional.causal_conv(x.transpose(1, 2), self.weight, activation="silu")
        q, k = (self.phi(t, num_heads=2) for t in (x, y.transpose(1, 2)))
        # A delta rule diverges for keys much longer than 1.
        k = torch.nn.functional.normalize(k, dim=-1)
        gates = {
            "decay": -gate.exp() if "gated" in self.rule else None,
            "beta": gate.sigmoid() if "delta" in self.rule else None,
        }
        return functional.linear_attention(
            q, k, x, **gates, q_num_heads=2, kv_num_heads=2, update_rule=self.rule
        )


@pytest.mark.parametrize("rule", RULES)
def test_export_keeps_one_node_per_call(rule: str) -> None:
    torch.manual_seed(0)
    block = Block(rule)
    example = torch.randn(2, 10, 8), torch.randn(2, 10, 2)
    length, batch = torch.export.Dim("length", max=4096), torch.export.Dim("batch", max=64)
    dims = {0: batch, 1: length}
    program = torch.export.export(block, example, dynamic_shapes=(dims, dims))
    calls = [str(n.target) for n in program.graph.nodes if "linexport" in str(n.target)]
    assert sorted(calls) == [
        "linexport.causal_conv.default",
        "linexport.feature_map.default",
        "linexport.feature_map.default",
        "linexport.linear_attention.default",
    ]
    for batch_size, size in itertools.product((1, 3), (1, 7, 10, 130)):
        x = torch.randn(batch_size, size, 8), torch.randn(batch_size, size, 2)
        for got, want in zip(program.module()(*x), block(*x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_outside_export_calls_are_ordinary_pytorch() -> None:
    """Not the operator, so that gradients need no formula of their own."""
    x = torch.randn(1, 4, 8, requires_grad=True)
    output, *_ = functional.linear_attention(x, x, x, q_num_heads=2, kv_num_heads=2)
    output.sum().backward()
    assert x.grad is not None
    with profile() as calls:
        functional.linear_attention(x, x, x, q_num_heads=2, kv_num_heads=2)
    assert calls.key_averages() and not [c for c in calls.key_averages() if "linexport" in c.key]
