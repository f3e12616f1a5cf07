"""The float64 oracle against closed forms that share none of its code.

Sums over pairs of tokens for the linear and gated rules, products of matrices for the delta rules,
and one case worked out by hand.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from linexport.plugins.ops.causal_conv import causal_conv
from linexport.plugins.ops.linear_attention import LinearAttentionSpec, linear_attention
from tests.support.comparison import assert_close
from tests.support.layouts import Layout

RTOL = 1e-12


def _head(x: np.ndarray, batch: int, head: int, heads: int) -> np.ndarray:
    """Rows of one head of a packed (B, T, heads*d) array."""
    width = x.shape[2] // heads
    return x[batch, :, head * width : (head + 1) * width].astype(np.float64)


def pair_sums(layout: Any, x: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Linear and gated rules as sums over all pairs of tokens, by index."""
    spec = layout.spec
    B, T = x["query"].shape[:2]
    keep = x.get("key_mask", np.ones((B, T), bool))
    H, shared = spec.kv_num_heads, spec.output_heads
    output = np.zeros((B, T, shared, layout.d_v))
    state = np.zeros((B, H, layout.d_k, layout.d_v))
    normalizer = np.zeros((B, H, layout.d_k))
    for b in range(B):
        for o in range(shared):
            h = o // (shared // H)
            q = _head(x["query"], b, o // (shared // spec.q_num_heads), spec.q_num_heads)
            k = _head(x["key"], b, h // (H // layout.key_heads), layout.key_heads)
            v = _head(x["value"], b, h, H)
            g = _head(x["decay"], b, h, H) if spec.has_decay else np.zeros((T, 1))
            g = np.broadcast_to(np.where(keep[b][:, None], g, 0), (T, layout.d_k))
            S0 = x["past_state"][b, h] if layout.past else np.zeros((layout.d_k, layout.d_v))
            z0 = np.zeros(layout.d_k)
            if "past_normalizer" in x:
                z0 = x["past_normalizer"][b, h]
            for t in range(T):
                last = t if spec.causal else T - 1
                start = q[t] * np.exp(g[: last + 1].sum(0))
                numerator, denominator = start @ S0, start @ z0
                for s in range(last + 1):
                    score = q[t] @ (k[s] * np.exp(g[s + 1 : last + 1].sum(0))) * keep[b, s]
                    numerator, denominator = numerator + score * v[s], denominator + score
                output[b, t, o] = numerator * spec.scale
                if spec.normalize:
                    output[b, t, o] /= denominator * spec.scale + spec.eps
            state[b, h] = np.exp(g.sum(0))[:, None] * S0
            normalizer[b, h] = np.exp(g.sum(0)) * z0
            for s in range(T):
                key = keep[b, s] * k[s] * np.exp(g[s + 1 :].sum(0))
                state[b, h] += np.outer(key, v[s])
                normalizer[b, h] += key
    return output.reshape(B, T, -1), state, normalizer


def transition_matrices(layout: Any, x: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Delta rules as S_t = (I - beta k k^T) diag(alpha) S_{t-1} + beta k v^T, matrix by matrix."""
    spec = layout.spec
    B, T = x["query"].shape[:2]
    H, shared, eye = spec.kv_num_heads, spec.output_heads, np.eye(layout.d_k)
    output = np.zeros((B, T, shared, layout.d_v))
    state = np.zeros((B, H, layout.d_k, layout.d_v))
    for b, h in np.ndindex(B, H):
        k = _head(x["key"], b, h // (H // layout.key_heads), layout.key_heads)
        v = _head(x["value"], b, h, H)
        g = _head(x["decay"], b, h, H) if spec.has_decay else np.zeros((T, 1))
        beta = x["beta"][b, :, h if x["beta"].shape[2] == H else 0]
        transitions, additions = [], []
        for t in range(T):
            kept = "key_mask" not in x or x["key_mask"][b, t]
            erase = eye - beta[t] * np.outer(k[t], k[t])
            transitions.append(erase @ np.diag(np.exp(g[t]) * np.ones(layout.d_k)) if kept else eye)
            additions.append(kept * beta[t] * np.outer(k[t], v[t]))
        S = np.zeros((T + 1, layout.d_k, layout.d_v))
        S[0] = x["past_state"][b, h] if layout.past else 0
        for t in range(T):
            # Every term carried to t by the product of the transitions after it.
            carried = eye
            for s in range(t, -1, -1):
                S[t + 1] += carried @ additions[s]
                carried = carried @ transitions[s]
            S[t + 1] += carried @ S[0]
        state[b, h] = S[T]
        for o in range(shared):
            if o // (shared // H) == h:
                q = _head(x["query"], b, o // (shared // spec.q_num_heads), spec.q_num_heads)
                output[b, :, o] = [spec.scale * q[t] @ S[t + 1] for t in range(T)]
    return output.reshape(B, T, -1), state


@pytest.mark.parametrize("heads", [(2, 2, 2), (4, 2, 1), (2, 4, 2), (1, 3, 1)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("rule", "past"),
    [
        ("bidirectional", False),
        *itertools.product(["linear", "gated", "gated per channel"], [False, True]),
    ],
)
def test_equals_sums_over_pairs(
    rule: str, normalize: bool, masked: bool, past: bool, heads: tuple[int, int, int]
) -> None:
    spec = LinearAttentionSpec(
        heads[0],
        heads[1],
        "gated" if "gated" in rule else "linear",
        causal=rule != "bidirectional",
        normalize=normalize,
        scale=0.6,
        eps=1e-3,
    )
    layout = Layout(spec, heads[2], past=past, masked=masked, per_channel="per" in rule)
    x = layout.inputs(np.random.default_rng(1), 2, 6)
    assert_close(layout.reference(x), pair_sums(layout, x), layout.magnitude(x), RTOL)


@pytest.mark.parametrize("heads", [(2, 2, 2), (4, 2, 1), (2, 4, 2), (1, 3, 1)])
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shared_beta", [False, True])
@pytest.mark.parametrize(
    ("rule", "per_channel"), [("delta", False), ("gated_delta", False), ("gated_delta", True)]
)
def test_equals_products_of_transitions(
    rule: str,
    shared_beta: bool,
    per_channel: bool,
    masked: bool,
    past: bool,
    heads: tuple[int, int, int],
) -> None:
    spec = LinearAttentionSpec(*heads[:2], rule, scale=0.6)
    layout = Layout(
        spec,
        heads[2],
        past=past,
        masked=masked,
        per_channel=per_channel,
        shared_beta=shared_beta,
    )
    x = layout.inputs(np.random.default_rng(2), 2, 7)
    want = transition_matrices(layout, x)
    assert_close(layout.reference(x)[:2], want, layout.magnitude(x)[:2], RTOL)


@pytest.mark.smoke
def test_two_tokens_by_hand() -> None:
    # d_k = 2, d_v = 1, two tokens: k = e1, e2 + e1; v = 2, 3; q = (1, 1) twice.
    q = np.array([[[1.0, 1.0], [1.0, 1.0]]])
    k = np.array([[[1.0, 0.0], [1.0, 1.0]]])
    v = np.array([[[2.0], [3.0]]])
    half = np.full((1, 2, 1), np.log(0.5))
    beta = np.array([[[1.0], [0.5]]])

    def run(rule: str, **inputs: np.ndarray) -> list[list[float]]:
        spec = LinearAttentionSpec(1, 1, rule, scale=2.0)
        output, state, normalizer = linear_attention(spec, q, k, v, **inputs)
        return [x.ravel().tolist() for x in (output, state, normalizer)]

    # S_1 = (2, 0); S_2 = (2 + 3, 3).
    assert run("linear") == [[4.0, 16.0], [5.0, 3.0], [2.0, 1.0]]
    # S_2 = 0.5 * (2, 0) + (3, 3).
    assert run("gated", decay=half) == [[4.0, 14.0], [4.0, 3.0], [1.5, 1.0]]
    # S_1 = (2, 0); k_2 reads 2; adds 0.5 * (3 - 2) * (1, 1).
    assert run("delta", beta=beta)[:2] == [[4.0, 6.0], [2.5, 0.5]]
    # 0.5 * (2, 0) = (1, 0); k_2 reads 1; adds 0.5 * (3 - 1) * (1, 1).
    assert run("gated_delta", decay=half, beta=beta)[:2] == [[4.0, 6.0], [2.0, 1.0]]


def test_normalised_output_is_a_weighted_mean_of_values() -> None:
    spec = LinearAttentionSpec(2, 2, normalize=True, scale=0.3)
    layout = Layout(spec, 2)
    x = layout.inputs(np.random.default_rng(3), 1, 9)
    x["value"] = np.full_like(x["value"], 4.0)
    np.testing.assert_allclose(layout.reference(x)[0], 4.0, rtol=1e-12)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_masked_tokens_leave_no_trace(rule: str) -> None:
    """Taking masked tokens out of the sequence changes no state and no other output."""
    layout = Layout(LinearAttentionSpec(4, 2, rule), 2, past=True, masked=True)
    x = layout.inputs(np.random.default_rng(4), 1, 12)
    keep = x["key_mask"][0]
    assert 0 < keep.sum() < 12
    short = {n: a if "past" in n else a[:, keep] for n, a in x.items()}
    output, *states = layout.reference(x)
    short_output, *short_states = layout.reference(short)
    np.testing.assert_allclose(output[:, keep], short_output, rtol=1e-13)
    for state, short_state in zip(states, short_states, strict=True):
        np.testing.assert_allclose(state, short_state, rtol=1e-13)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_state_continues_a_sequence(rule: str) -> None:
    spec = LinearAttentionSpec(2, 2, rule, normalize="delta" not in rule, eps=0.1)
    layout = Layout(spec, 2, past=True, per_channel=True)
    x = layout.inputs(np.random.default_rng(5), 2, 11)
    whole = layout.reference(x)
    past = {n: a for n, a in x.items() if "past" in n}
    sequence = {n: a for n, a in x.items() if "past" not in n}
    pieces = []
    for part in (slice(0, 4), slice(4, 4), slice(4, 5), slice(5, 11)):
        output, *states = layout.reference({**past, **{n: a[:, part] for n, a in sequence.items()}})
        past = dict(zip(past, states, strict=False))
        pieces.append(output)
    np.testing.assert_allclose(np.concatenate(pieces, 1), whole[0], rtol=1e-12)
    # Without normalize no normaliser goes in, so the one coming out is of the last piece alone.
    for state, want in list(zip(states, whole[1:], strict=True))[: len(past)]:
        np.testing.assert_allclose(state, want, rtol=1e-12)


@pytest.mark.parametrize("past", [False, True])
def test_no_tokens_leave_the_past(past: bool) -> None:
    layout = Layout(LinearAttentionSpec(4, 2, "gated", normalize=True), 2, past=past)
    x = layout.inputs(np.random.default_rng(6), 3, 0)
    output, state, normalizer = layout.reference(x)
    assert output.shape == (3, 0, 4 * layout.d_v)
    np.testing.assert_array_equal(state, x["past_state"] if past else np.zeros_like(state))
    np.testing.assert_array_equal(
        normalizer, x["past_normalizer"] if past else np.zeros_like(normalizer)
    )


def test_decay_of_minus_infinity_forgets() -> None:
    layout = Layout(LinearAttentionSpec(1, 1, "gated"), 1, past=True)
    x = layout.inputs(np.random.default_rng(7), 1, 5)
    x["decay"][:, 2] = -np.inf
    fresh = {n: a[:, 2:] for n, a in x.items() if "past" not in n}
    fresh["past_state"] = np.zeros_like(x["past_state"])
    want = layout.reference(fresh)
    got = layout.reference(x)
    np.testing.assert_allclose(got[0][:, 2:], want[0], rtol=1e-13)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-13)


@pytest.mark.smoke
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_causal_conv_equals_numpy_convolve(size: int, bias: bool, past: bool) -> None:
    rng = np.random.default_rng(8)
    x, w = rng.normal(size=(2, 3, 6)), rng.normal(size=(3, 1, size))
    p = rng.normal(size=(2, 3, size - 1)) if past else None
    c = rng.normal(size=3) if bias else None
    before = np.zeros((2, 3, size - 1)) if p is None else p
    want = np.empty_like(x)
    for b, channel in np.ndindex(2, 3):
        seen = np.concatenate([before[b, channel], x[b, channel]])
        want[b, channel] = np.convolve(seen, w[channel, 0, ::-1], "valid")
        want[b, channel] += 0 if c is None else c[channel]
    output, state = causal_conv("none", x, w, c, p)
    np.testing.assert_allclose(output, want, rtol=1e-12)
    np.testing.assert_array_equal(state, np.concatenate([before, x], 2)[:, :, 6:])
    for name in ("silu", "swish"):
        np.testing.assert_allclose(
            causal_conv(name, x, w, c, p)[0], want / (1 + np.exp(-want)), rtol=1e-12
        )
