"""StabilizedExp: PyTorch and ONNX against the oracle, and the oracle against what it is for."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from linexport.errors import OpError
from linexport.models.functional import stabilized_exp as twin
from linexport.plugins.ops.linear_attention import LinearAttentionSpec, linear_attention
from linexport.plugins.ops.registry import attach_functions
from linexport.plugins.ops.stabilized_exp import INPUTS, LOWEST, check, stabilized_exp
from tests.support import runtimes

HEADS = ((2, 2), (4, 2), (2, 4), (1, 1), (6, 3))
M = 3
OUTPUTS = ("query_features", "key_features", "present_decay", "present_key_max")

Arrays = dict[str, np.ndarray]


def fixed(examples: int) -> settings:
    """The same examples in every run, however slow the machine."""
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None)


def shapes(heads: tuple[int, int], given_: set[str], per_channel: bool) -> dict[str, Any]:
    width = heads[1] * M
    known = {"query": ("B", "T", heads[0] * M), "key": ("B", "T", width)}
    optional = {
        "past_key_max": ("B", heads[1], M),
        "key_mask": ("B", "T"),
        "decay": ("B", "T", width if per_channel else heads[1]),
    }
    return {**known, **{n: s for n, s in optional.items() if n in given_}}


def draw(wanted: dict[str, Any], batch: int, length: int, scale: float, seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in wanted.items():
        x = rng.normal(size=[{"B": batch, "T": length}.get(d, d) for d in shape])
        found[name] = x > -0.5 if name == "key_mask" else np.float32(scale * x)
    if "decay" in found:
        found["decay"] = -np.abs(found["decay"])
    return found


def model(heads: tuple[int, int], causal: int, wanted: dict[str, Any]) -> onnx.ModelProto:
    names = [n if n in wanted else "" for n in INPUTS]
    settings_ = {"q_num_heads": heads[0], "k_num_heads": heads[1], "causal": causal}
    node = helper.make_node("StabilizedExp", names, OUTPUTS, domain="linexport", **settings_)
    served = max(heads) * M
    ends = (("B", "T", served), *[("B", "T", heads[1] * M)] * 2, ("B", heads[1], M))
    kind = {"key_mask": TensorProto.BOOL}
    graph = helper.make_graph(
        [node],
        "test",
        [helper.make_tensor_value_info(n, kind.get(n, 1), s) for n, s in wanted.items()],
        [helper.make_tensor_value_info(n, 1, s) for n, s in zip(OUTPUTS, ends, strict=True)],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("linexport", 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    attach_functions(made)
    onnx.checker.check_model(made, full_check=True)
    return made


def reference(heads: tuple[int, int], causal: int, x: Arrays) -> tuple[np.ndarray, ...]:
    return stabilized_exp(*heads, bool(causal), **x)


@pytest.mark.smoke
@fixed(60)
@given(
    heads=st.sampled_from(HEADS),
    causal=st.booleans(),
    optional=st.sets(st.sampled_from(["past_key_max", "key_mask", "decay"])),
    per_channel=st.booleans(),
    batch=st.integers(1, 3),
    lengths=st.lists(st.sampled_from([0, 1, 2, 5, 17, 64, 65]), min_size=1, max_size=3),
    scale=st.sampled_from([1e-3, 1.0, 30.0, 1e4]),
)
def test_pytorch_and_onnx_equal_the_oracle(
    heads: tuple[int, int],
    causal: bool,
    optional: set[str],
    per_channel: bool,
    batch: int,
    lengths: list[int],
    scale: float,
) -> None:
    wanted = shapes(heads, optional if causal else optional & {"key_mask"}, per_channel)
    run = runtimes.on_onnxruntime(model(heads, int(causal), wanted))
    for length in lengths:
        x = draw(wanted, batch, length, scale, length)
        want = reference(heads, causal, x)
        tensors = {n: torch.from_numpy(a) for n, a in x.items()}
        wide = {n: t if t.dtype == torch.bool else t.double() for n, t in tensors.items()}
        sizes = {"q_num_heads": heads[0], "k_num_heads": heads[1], "causal": causal}
        for got, expected in zip(twin(**wide, **sizes), want, strict=True):
            np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9, atol=1e-12)
        # Sums of up to T decays, and exponents of this size, carry a rounding of their own.
        rounding = 1e-6 + 4 * 2.0**-24 * scale * (1 + length * ("decay" in wanted))
        for got in (run(x), [t.numpy() for t in twin(**tensors, **sizes)]):
            for one, expected in zip(got, want, strict=True):
                assert one.shape == expected.shape
                assert one.dtype == np.float32
                np.testing.assert_allclose(one, expected, rtol=1e-6, atol=4 * rounding)


@pytest.mark.parametrize("runtime", ["on_onnxruntime", "on_reference"])
@pytest.mark.parametrize("causal", [0, 1])
def test_other_runtimes(runtime: str, causal: int) -> None:
    optional = {"past_key_max", "key_mask", "decay"} if causal else {"key_mask"}
    wanted = shapes((4, 2), optional, False)
    run = getattr(runtimes, runtime)(model((4, 2), causal, wanted))
    x = draw(wanted, 2, 9, 1.0, 0)
    for got, want in zip(run(x), reference((4, 2), causal, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def ratio(
    heads: tuple[int, int], causal: bool, x: Arrays, value: np.ndarray, **state: Any
) -> tuple[np.ndarray, ...]:
    """Attention on the stabilised features, by the oracles."""
    q, k, decay, key_max = reference(heads, causal, {**x, **state.pop("start", {})})
    spec = LinearAttentionSpec(
        max(heads), heads[1], "gated" if causal else "linear", causal=causal, normalize=True
    )
    extra = {"decay": decay} if causal else {}
    mask = {"key_mask": x["key_mask"]} if "key_mask" in x else {}
    return (*linear_attention(spec, q, k, value, **state, **extra, **mask), key_max)


@pytest.mark.parametrize("decayed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_the_ratio_is_that_of_plain_exponentials(
    heads: tuple[int, int], causal: bool, decayed: bool
) -> None:
    if decayed and not causal:
        pytest.skip("only causal attention decays")
    wanted = shapes(heads, {"key_mask", *(["decay"] if decayed else [])}, False)
    x = draw(wanted, 2, 20, 1.0, 3)
    x["key_mask"][:, 0] = True
    value = np.random.default_rng(1).normal(size=(2, 20, heads[1] * 5))
    got = ratio(heads, causal, x, value)[0]
    rule = "gated" if decayed else "linear"
    spec = LinearAttentionSpec(*heads, rule, causal=causal, normalize=True)
    phi = [np.exp(np.float64(x[n])) for n in ("query", "key")]
    extra = {"decay": x["decay"]} if decayed else {}
    want = linear_attention(spec, *phi, value, key_mask=x["key_mask"], **extra)[0]
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4, 1e8])
def test_no_denominator_is_below_one(scale: float) -> None:
    wanted = shapes((4, 2), set(), False)
    x = draw(wanted, 2, 50, scale, 5)
    q, k, decay, _ = reference((4, 2), True, x)
    for array in (q, k):
        assert array.max() == 1
        assert array.min() >= 0
    assert decay.max() <= 0
    spec = LinearAttentionSpec(4, 2, "gated")
    ones = np.ones((2, 50, 2))
    denominator = linear_attention(spec, q, k, ones, decay=decay)[0]
    assert denominator.min() >= 1
    single = LinearAttentionSpec(4, 2, normalize=True)
    # One maximum for all features, as it is often done: 0 / 0.
    b, a = np.float64(x["query"]), np.float64(x["key"])
    b = b - b.reshape(2, 50, 4, M).max(-1).repeat(M, -1)
    a = a - np.maximum.accumulate(a.reshape(2, 50, 2, M).max(-1), 1).repeat(M, -1)
    naive = linear_attention(single, *(np.exp(e).astype(np.float32) for e in (b, a)), ones)[0]
    assert np.isfinite(naive).all() == (scale == 1.0)


def test_any_split_gives_the_same() -> None:
    heads, wanted = (4, 2), shapes((4, 2), {"decay"}, True)
    x = draw(wanted, 2, 30, 20.0, 6)
    value = np.random.default_rng(1).normal(size=(2, 30, 2 * 5))
    whole = ratio(heads, True, x, value)
    state: dict[str, Any] = {}
    outputs = []
    for part in (slice(0, 1), slice(1, 13), slice(13, 13), slice(13, 30)):
        piece = {n: a[:, part] for n, a in x.items()}
        output, S, z, key_max = ratio(heads, True, piece, value[:, part], **state)
        state = {"past_state": S, "past_normalizer": z, "start": {"past_key_max": key_max}}
        outputs.append(output)
    np.testing.assert_allclose(np.concatenate(outputs, 1), whole[0], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(S, whole[1], rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(key_max, whole[3])


def test_before_the_first_key_nothing_is_not_a_number() -> None:
    wanted = shapes((2, 2), {"key_mask", "past_key_max"}, False)
    x = draw(wanted, 1, 4, 1e4, 7)
    x["key_mask"][:] = False
    x["past_key_max"][:] = LOWEST
    for array in reference((2, 2), True, x):
        assert np.isfinite(array).all()
    np.testing.assert_allclose(reference((2, 2), True, x)[3], LOWEST)


def test_gradients_do_not_see_the_maximum() -> None:
    """Of the ratio, not of the features: attention does not depend on the maximum."""
    query, key = (torch.randn(1, 6, 4, dtype=torch.float64, requires_grad=True) for _ in "qk")

    def attend(phi_q: torch.Tensor, phi_k: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        S = z = torch.zeros(())
        for t in range(6):
            S = decay[0, t].exp() * S + phi_k[0, t] * t
            z = decay[0, t].exp() * z + phi_k[0, t]
        return (phi_q[0, -1] @ S) / (phi_q[0, -1] @ z)

    plain = attend(query.exp(), key.exp(), torch.zeros(1, 6, 4, dtype=torch.float64))
    want = torch.autograd.grad(plain, [query, key])
    q, k, decay, _ = twin(query, key, q_num_heads=1, k_num_heads=1)
    got = torch.autograd.grad(attend(q, k, decay), [query, key])
    for one, expected in zip(got, want, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("arguments", "changes", "words"),
    [
        ((0, 2, 1), {}, "q_num_heads 0; expected at least 1"),
        ((8, 2, 1), {}, "query has width 12; expected a multiple of its 8"),
        ((3, 2, 1), {}, "3 heads do not share 2"),
        ((4, 2, 1), {"key": (1, 5, 7)}, "key has width 7; expected 2 heads of 3"),
        ((4, 2, 1), {"key": (1, 6, 6)}, "key has length 6; expected 5"),
        ((4, 2, 0), {"past_key_max": (1, 2, 3)}, "causal=0"),
        ((4, 2, 1), {"past_key_max": (1, 2, 4)}, "past_key_max has features 4; expected 3"),
        ((4, 2, 1), {"decay": (1, 5, 5)}, "decay has width 5; expected 2 or 6"),
        ((4, 2, 1), {"key_mask": (2, 5)}, "key_mask has batch 2; expected 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    arguments: tuple[int, int, int], changes: dict[str, Any], words: str
) -> None:
    given_ = {"query": (1, 5, 12), "key": (1, 5, 6), **changes}
    with pytest.raises(OpError, match=words):
        check(*arguments, **given_)


def test_the_oracle_is_the_definition() -> None:
    """By hand, for two tokens of one feature."""
    query, key = np.zeros((1, 2, 1)), np.array([[[3.0], [5.0]]])
    q, k, decay, last = stabilized_exp(1, 1, True, query, key)
    assert q.ravel().tolist() == [1, 1]
    assert k.ravel().tolist() == [1, 1]
    assert decay.ravel().tolist() == [LOWEST - 3, -2]
    assert last.ravel().tolist() == [5]
