"""Kernels of fla in plain PyTorch, against loops in float64, in both of their roles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from linexport.errors import UnsupportedModelError
from linexport.patches import gpu_kernels
from linexport.patches.gpu_kernels import (
    activations,
    fla_delta,
    fla_linear,
    fla_rwkv,
    fla_slots,
    softmax,
)

pytestmark = pytest.mark.usefixtures("one_thread")

B, T, H, K, V, M = 2, 6, 2, 4, 3, 5
ROLES = {"original": nullcontext, "traced": gpu_kernels.traced}


@pytest.fixture(params=ROLES)
def role(request: pytest.FixtureRequest) -> Iterator[None]:
    with ROLES[request.param]():
        yield


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Q, KEY, VALUE = drawn(B, T, H, K), drawn(B, T, H, K, seed=1), drawn(B, T, H, V, seed=2)
HEAD, CHANNEL = -drawn(B, T, H, seed=3).abs(), -drawn(B, T, H, K, seed=4).abs()
BETA = drawn(B, T, H, seed=5).sigmoid()
SCALE = K**-0.5


def check(found: Tensor, expected: np.ndarray, limit: float = 3e-6) -> None:
    assert found.shape == expected.shape
    assert np.abs(found.double().numpy() - expected).max() <= limit * np.abs(expected).max()


def each_head(function: Callable[..., np.ndarray], *given: Tensor) -> np.ndarray:
    """Results (B, T, H, V) of a function of one sequence and one head, of its rows in float64."""
    rows = [x.double().numpy() for x in given]
    return np.stack(
        [
            np.stack([function(*(x[b, :, h] for x in rows)) for h in range(given[0].shape[2])], 1)
            for b in range(B)
        ]
    )


def gated(q, k, v, g, scale=SCALE):
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t."""
    S, out = np.zeros((k.shape[1], v.shape[1])), []
    for t in range(len(q)):
        S = np.exp(np.atleast_1d(g[t]))[:, None] * S + np.outer(k[t], v[t])
        out.append(scale * S.T @ q[t])
    return np.array(out)


def test_linear_attention_forgets_by_head_and_by_channel(role: None) -> None:
    check(fla_linear.simple_gla(Q, KEY, VALUE, HEAD)[0], each_head(gated, Q, KEY, VALUE, HEAD))
    check(fla_linear.gla(Q, KEY, VALUE, CHANNEL)[0], each_head(gated, Q, KEY, VALUE, CHANNEL))


def test_a_state_goes_on_whichever_axis_is_first(role: None) -> None:
    whole, last = fla_linear.gla(Q, KEY, VALUE, CHANNEL, output_final_state=True)
    parts = [[x[:, :4], x[:, 4:]] for x in (Q, KEY, VALUE, CHANNEL)]
    first, state = fla_linear.gla(
        *(x[0] for x in parts), output_final_state=True, state_v_first=True
    )
    rest, end = fla_linear.gla(
        *(x[1] for x in parts), initial_state=state, output_final_state=True, state_v_first=True
    )
    torch.testing.assert_close(torch.cat([first, rest], 1), whole)
    torch.testing.assert_close(end.mT, last)


def test_retention_and_lightning_attention_forget_by_the_number_of_the_head(role: None) -> None:
    gamma = np.log(1 - 2.0 ** (-5 - np.arange(H)))
    rates = torch.from_numpy(gamma).expand(B, T, H)
    check(fla_linear.retention(Q, KEY, VALUE)[0], each_head(gated, Q, KEY, VALUE, rates))
    rates = torch.from_numpy(-8 / H * (1 - 1 / 4) * np.arange(H)).expand(B, T, H)
    found, _ = fla_linear.lightning_attn(Q, KEY, VALUE, layer_idx=1, num_layers=4)
    check(found, each_head(gated, Q, KEY, VALUE, rates))


def test_normalised_linear_attention_goes_on_from_its_sums(role: None) -> None:
    q, k = Q.abs(), KEY.abs()

    def oracle(q, k, v):
        weights = np.tril(q @ k.T) * SCALE
        return weights @ v / (weights.sum(1, keepdims=True) + 1e-10)

    expected = each_head(oracle, q, k, VALUE)
    check(fla_linear.linear_attn(q, k, VALUE)[0], expected)
    first, state = fla_linear.linear_attn(q[:, :4], k[:, :4], VALUE[:, :4], output_final_state=True)
    rest, _ = fla_linear.linear_attn(q[:, 4:], k[:, 4:], VALUE[:, 4:], initial_state=state)
    check(torch.cat([first, rest], 1), expected)


def test_based_and_rebased_are_series_of_the_product(role: None) -> None:
    def series(power: Callable[[np.ndarray], np.ndarray], eps: float) -> Callable[..., Any]:
        def oracle(q, k, v):
            weights = np.tril(power(SCALE * q @ k.T))
            return weights @ v / (weights.sum(1, keepdims=True) + eps)

        return oracle

    check(
        fla_linear.based(Q, KEY, VALUE),
        each_head(series(lambda x: 1 + x + x**2 / 2, 1e-6), Q, KEY, VALUE),
    )
    expected = each_head(series(lambda x: x**2, 1e-5), Q, KEY, VALUE)
    check(fla_linear.rebased(Q, KEY, VALUE), expected, 1e-5)


def test_hgrn_is_a_recurrence_of_each_channel(role: None) -> None:
    x, g = drawn(B, T, 5), -drawn(B, T, 5, seed=1).abs()
    h, out = np.zeros((B, 5)), []
    for t in range(T):
        h = np.exp(g[:, t].double().numpy()) * h + x[:, t].double().numpy()
        out.append(h)
    found, last = fla_linear.hgrn(x, g, output_final_state=True)
    check(found, np.stack(out, 1))
    check(last, h)


def test_the_newest_token_of_rwkv_6_has_a_weight_of_its_own(role: None) -> None:
    bonus = drawn(H, K)
    u = bonus.expand(B, T, H, K)

    def oracle(r, k, v, w, u):
        S, out = np.zeros((K, V)), []
        for t in range(T):
            out.append(SCALE * (S + np.outer(u[t] * k[t], v[t])).T @ r[t])
            S = np.exp(w[t])[:, None] * S + np.outer(k[t], v[t])
        return np.array(out)

    found, _ = fla_rwkv.rwkv6(Q, KEY, VALUE, CHANNEL, bonus)
    check(found, each_head(oracle, Q, KEY, VALUE, CHANNEL, u))


def generalised(r, w, k, v, a, b, scale=1.0):
    S, out = np.zeros((K, v.shape[1])), []
    for t in range(T):
        S = np.diag(np.exp(w[t])) @ S + np.outer(b[t], a[t] @ S) + np.outer(k[t], v[t])
        out.append(scale * S.T @ r[t])
    return np.array(out)


def test_the_generalised_delta_rule_is_its_formula_under_all_names(role: None) -> None:
    kk = KEY / KEY.norm(dim=-1, keepdim=True)
    rate = drawn(B, T, H, K, seed=7).sigmoid()
    expected = each_head(generalised, Q, CHANNEL, KEY, VALUE, -kk, kk * rate)
    check(fla_rwkv.rwkv7(Q, CHANNEL, KEY, VALUE, -kk, kk * rate)[0], expected)
    check(fla_rwkv.fused_mul_rwkv7(Q, CHANNEL, KEY, VALUE, kk, rate)[0], expected)
    found, _ = fla_rwkv.dplr(Q, KEY, VALUE, -kk, kk * rate, CHANNEL, scale=1.0)
    check(found, expected)


def test_comba_erases_at_another_key(role: None) -> None:
    other = drawn(B, T, H, K, seed=8) / 2

    def oracle(q, k, v, p, g, beta):
        S, out = np.zeros((K, V)), []
        for t in range(T):
            S = np.exp(g[t]) * S
            S = S + beta[t] * np.outer(k[t], v[t] - S.T @ p[t])
            out.append(SCALE * S.T @ q[t])
        return np.array(out)

    found, _ = fla_delta.comba(Q, KEY, VALUE, other, HEAD, BETA)
    check(found, each_head(oracle, Q, KEY, VALUE, other, HEAD, BETA))


def test_gdn2_erases_and_writes_by_channel(role: None) -> None:
    erase, write = drawn(B, T, H, K, seed=9).sigmoid(), drawn(B, T, H, V, seed=9).sigmoid()
    unit = KEY / KEY.norm(dim=-1, keepdim=True)

    def oracle(q, k, v, g, b, w):
        S, out = np.zeros((K, V)), []
        for t in range(T):
            S = np.exp(g[t])[:, None] * S
            S = S + np.outer(k[t], w[t] * v[t] - S.T @ (b[t] * k[t]))
            out.append(SCALE * S.T @ q[t])
        return np.array(out)

    found, _ = fla_delta.gdn2(Q, unit, VALUE, CHANNEL, erase, write)
    check(found, each_head(oracle, Q, unit, VALUE, CHANNEL, erase, write))


@pytest.mark.parametrize("decays", [True, False])
def test_the_delta_product_writes_several_times_for_each_token(role: None, decays: bool) -> None:
    n = 3
    k = torch.nn.functional.normalize(drawn(B, T * n, H, K, seed=1), dim=-1)
    v, beta = drawn(B, T * n, H, V, seed=2), drawn(B, T * n, H, seed=3).sigmoid()
    q, keys, values, rate, g = (x.double().numpy() for x in (Q, k, v, beta, HEAD))
    expected = np.zeros((B, T, H, V))
    for b in range(B):
        for h in range(H):
            S = np.zeros((K, V))
            for t in range(T):
                S = S * (np.exp(g[b, t, h]) if decays else 1.0)
                for i in range(t * n, (t + 1) * n):
                    new = values[b, i, h] - S.T @ keys[b, i, h]
                    S = S + rate[b, i, h] * np.outer(keys[b, i, h], new)
                expected[b, t, h] = SCALE * S.T @ q[b, t, h]
    found, _ = fla_delta.gated_delta_product(Q, k, v, HEAD if decays else None, beta, n)
    check(found, expected)


def attend_to_slots(q, k, v, writes, decays):
    first, second, out = np.zeros((K, M)), np.zeros((M, V)), []
    for t in range(T):
        first = first * np.exp(decays[t]) + np.outer(k[t], writes[t])
        second = second * np.exp(decays[t])[:, None] + np.outer(writes[t], v[t])
        scores = np.exp(SCALE * first.T @ q[t])
        out.append(second.T @ scores / scores.sum())
    return np.array(out)


def test_slots_decay_or_are_a_softmax_over_earlier_tokens(role: None) -> None:
    s, g = drawn(B, T, H, M, seed=1) * 3, -drawn(B, T, H, M, seed=2).abs()
    found, _ = fla_slots.gsa(Q, KEY, VALUE, s, g)
    check(found, each_head(attend_to_slots, Q, KEY, VALUE, s, g), 2e-5)
    logs = torch.from_numpy(np.logaddexp.accumulate(s.double().numpy(), 1))
    before = torch.cat([torch.full_like(logs[:, :1], -1e3), logs[:, :-1]], 1)
    expected = each_head(attend_to_slots, Q, KEY, VALUE, (s - logs).exp(), before - logs)
    check(fla_slots.abc(Q, KEY, VALUE, s)[0], expected, 2e-5)


def test_keys_of_lightnet_are_a_softmax_over_earlier_tokens(role: None) -> None:
    logits = KEY * 3
    logs = torch.from_numpy(np.logaddexp.accumulate(logits.double().numpy(), 1))
    before = torch.cat([torch.full_like(logs[:, :1], -1e3), logs[:, :-1]], 1)
    expected = each_head(gated, Q, (logits - logs).exp(), VALUE, before - logs)
    check(fla_slots.lightnet(Q, logits, VALUE)[0], expected)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_softmax_attention_sees_a_window_forgets_and_has_a_sink(
    window: int | None, forgets: bool, sink: bool
) -> None:
    g = HEAD if forgets else torch.zeros(B, T, H)
    bias = drawn(H) if sink else torch.full((H,), -torch.inf)

    def oracle(q, k, v, g, bias):
        sums, out = np.cumsum(g), []
        for t in range(T):
            first = 0 if window is None else max(0, t - window + 1)
            at = slice(first, t + 1)
            weights = np.exp(SCALE * k[at] @ q[t] + sums[t] - sums[at])
            out.append(weights @ v[at] / (weights.sum() + np.exp(bias[t])))
        return np.array(out)

    found = softmax.attention(
        Q, KEY, VALUE, g if forgets else None, None, window, None, bias if sink else None
    )
    check(found, each_head(oracle, Q, KEY, VALUE, g, bias.expand(B, T, H)))


def test_other_attention_is_its_formula() -> None:
    other = drawn(B, T, H, K, seed=9)

    def wall(q, k, v, g):
        sums, out = np.cumsum(g, 0), []
        for t in range(T):
            scores = [SCALE * (q[t] * k[s] * np.exp(sums[t] - sums[s])).sum() for s in range(t + 1)]
            out.append(np.exp(scores) @ v[: t + 1] / np.exp(scores).sum())
        return np.array(out)

    def parallax(q, k, v, r):
        out = []
        for t in range(T):
            weights = np.exp(SCALE * k[: t + 1] @ q[t])
            weights, line = weights / weights.sum(), k[: t + 1] @ r[t]
            out.append(weights @ (v[: t + 1] * (1 + weights @ line - line)[:, None]))
        return np.array(out)

    def sticks(q, k, v):
        out = []
        for t in range(T):
            left, y = 1.0, np.zeros(V)
            for s in reversed(range(t)):
                share = 1 / (1 + np.exp(-SCALE * k[s] @ q[t]))
                y, left = y + left * share * v[s], left * (1 - share)
            out.append(y)
        return np.array(out)

    check(softmax.wall(Q, KEY, VALUE, CHANNEL), each_head(wall, Q, KEY, VALUE, CHANNEL))
    check(softmax.parallax(Q, other, KEY, VALUE), each_head(parallax, Q, KEY, VALUE, other), 1e-5)
    check(softmax.stick_breaking(Q, KEY, VALUE)[0], each_head(sticks, Q, KEY, VALUE))


def test_stick_breaking_keeps_its_digits_in_long_sequences() -> None:
    q, k, v = (drawn(1, 2000, 1, 8, seed=seed) for seed in range(3))
    query, key, value = (x[0, :, 0].double().numpy() for x in (q, k, v))
    z = np.tril(query @ key.T / 8**0.5, -1)
    share = np.tril(1 / (1 + np.exp(-z)), -1)
    left = np.cumprod((1 - share)[:, ::-1], 1)[:, ::-1]
    later = np.concatenate([left[:, 1:], np.ones((2000, 1))], 1)
    found, rest = softmax.stick_breaking(q, k, v)
    check(found[0, :, 0], (share * later) @ value)
    check(rest[0, :, 0], left[:, 0])


def test_flash_attention_is_causal_has_a_window_and_heads_in_groups() -> None:
    q = drawn(B, T, 2 * H, K)
    at = np.arange(T)
    for causal, window, seen in (
        (False, (-1, -1), at[None] >= 0),
        (True, (-1, -1), at[None] <= at[:, None]),
        (True, (2, 0), (at[None] <= at[:, None]) & (at[:, None] - at[None] <= 2)),
    ):

        def oracle(q, k, v, seen=seen):
            weights = np.exp(SCALE * q @ k.T) * seen
            return weights / weights.sum(1, keepdims=True) @ v

        found = softmax.flash_attn_func(q, KEY, VALUE, causal=causal, window_size=window)
        k, v = (x.repeat_interleave(2, 2) for x in (KEY, VALUE))
        check(found, each_head(oracle, q, k, v))
    with pytest.raises(UnsupportedModelError, match="window_size"):
        softmax.flash_attn_func(q, KEY, VALUE, window_size=(2, 2))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_positions_turn_pairs_of_channels(interleaved: bool) -> None:
    x, angles = drawn(B, T, H, 6), drawn(T + 2, 2)
    found = activations.rotary_embedding(
        x, angles.cos(), angles.sin(), interleaved, seqlen_offsets=2
    )
    expected, turn = x.double().numpy().copy(), angles[2:].double().numpy()
    for t in range(T):
        for i in range(2):
            one, other = (2 * i, 2 * i + 1) if interleaved else (i, i + 2)
            a, b = x[:, t, :, one].double().numpy(), x[:, t, :, other].double().numpy()
            expected[:, t, :, one] = a * np.cos(turn[t, i]) - b * np.sin(turn[t, i])
            expected[:, t, :, other] = b * np.cos(turn[t, i]) + a * np.sin(turn[t, i])
    check(found, expected)


def test_a_token_shift_is_the_difference_to_the_token_before(role: None) -> None:
    x = drawn(B, T, 4)
    expected = np.diff(np.concatenate([np.zeros((B, 1, 4)), x.double().numpy()], 1), axis=1)
    found, last = fla_rwkv.token_shift(x[:, :3], output_cache=True)
    rest = fla_rwkv.token_shift(x[:, 3:], cache=last)
    check(torch.cat([found, rest], 1), -expected)


def test_packed_sequences_are_refused() -> None:
    ends = torch.tensor([0, 3, T])
    with pytest.raises(UnsupportedModelError, match="cu_seqlens"):
        fla_linear.gla(Q, KEY, VALUE, CHANNEL, cu_seqlens=ends)


def test_what_has_no_form_is_refused_by_what_it_computes() -> None:
    refused = [kernel for kernel in gpu_kernels.kernels() if kernel.instead]
    assert refused
    for kernel in refused:
        with pytest.raises(UnsupportedModelError) as error:
            gpu_kernels.run(kernel, f"fla.ops.{kernel.names[0]}", None, (Q,), {})
        assert kernel.formula in str(error.value)
        assert kernel.instead in str(error.value)
