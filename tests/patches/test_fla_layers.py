"""Layers of fla whose own code in PyTorch or whose mask is written anew for a trace."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from linexport.errors import UnsupportedModelError
from linexport.patches import fla_mamba2, fla_shared_key

WIDTH, HEADS, GROUPS, STATES, TAPS = 12, 6, 2, 3, 4
CHANNELS = WIDTH + 2 * GROUPS * STATES


def second(activation: str, rmsnorm: bool) -> SimpleNamespace:
    """A layer with the attributes of ``fla.layers.Mamba2``."""
    torch.manual_seed(0)
    return SimpleNamespace(
        intermediate_size=WIDTH,
        num_heads=HEADS,
        n_groups=GROUPS,
        ssm_state_size=STATES,
        conv_dim=CHANNELS,
        activation=activation,
        act={"silu": nn.functional.silu, "relu": torch.relu}[activation],
        in_proj=nn.Linear(5, WIDTH + CHANNELS + HEADS),
        out_proj=nn.Linear(WIDTH, 5),
        conv1d=nn.Conv1d(CHANNELS, CHANNELS, TAPS, groups=CHANNELS),
        A_log=nn.Parameter(torch.rand(HEADS)),
        D=nn.Parameter(torch.randn(HEADS)),
        dt_bias=nn.Parameter(torch.randn(HEADS)),
        dt_limit=(0.0, float("inf")),
        rmsnorm=rmsnorm,
        norm=SimpleNamespace(weight=torch.rand(WIDTH), eps=1e-5),
        norm_before_gate=False,
    )


def array(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def oracle(layer: SimpleNamespace, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The layer in float64, token by token."""

    def linear(part: nn.Linear, y: np.ndarray) -> np.ndarray:
        return y @ array(part.weight).T + array(part.bias)

    def silu(y: np.ndarray) -> np.ndarray:
        return y / (1 + np.exp(-y))

    act = silu if layer.activation == "silu" else lambda y: np.maximum(y, 0)
    gate, xBC, dt = np.split(linear(layer.in_proj, x), [WIDTH, WIDTH + CHANNELS], -1)
    padded = np.pad(xBC * mask[..., None], ((0, 0), (TAPS - 1, 0), (0, 0)))
    taps = array(layer.conv1d.weight)[:, 0]
    tokens = x.shape[1]
    xBC = sum(padded[:, i : i + tokens] * taps[:, i] for i in range(TAPS))
    xBC = act(xBC + array(layer.conv1d.bias)) * mask[..., None]
    value, B, C = np.split(xBC, [WIDTH, WIDTH + GROUPS * STATES], -1)
    dt = np.log1p(np.exp(dt + array(layer.dt_bias)))
    y = np.zeros((*x.shape[:2], HEADS, WIDTH // HEADS))
    for b in range(len(x)):
        for h in range(HEADS):
            state = np.zeros((STATES, WIDTH // HEADS))
            for t in range(tokens):
                v = value[b, t].reshape(HEADS, -1)[h]
                key, query = (z[b, t].reshape(GROUPS, -1)[h * GROUPS // HEADS] for z in (B, C))
                step = dt[b, t, h]
                state = np.exp(-np.exp(array(layer.A_log))[h] * step) * state
                state = state + step * np.outer(key, v)
                y[b, t, h] = query @ state + array(layer.D)[h] * v
    y = y.reshape(*x.shape[:2], WIDTH)
    if not layer.rmsnorm:
        return linear(layer.out_proj, y * act(gate))
    groups = (y * silu(gate)).reshape(*x.shape[:2], GROUPS, -1)
    groups = groups / np.sqrt((groups**2).mean(-1, keepdims=True) + layer.norm.eps)
    return linear(layer.out_proj, groups.reshape(y.shape) * array(layer.norm.weight))


@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize("rmsnorm", [True, False])
@settings(max_examples=10, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(0, 2**16))
def test_a_masked_layer_of_mamba_2_is_its_formula(
    activation: str, rmsnorm: bool, batch: int, tokens: int, seed: int
) -> None:
    layer, drawn = second(activation, rmsnorm), np.random.default_rng(seed)
    x, mask = drawn.standard_normal((batch, tokens, 5)), drawn.integers(0, 2, (batch, tokens))
    given_mask, given_x = torch.from_numpy(mask), torch.from_numpy(x).float()
    found = fla_mamba2.forward(layer, given_x, given_mask)
    np.testing.assert_allclose(array(found), oracle(layer, x, mask), rtol=1e-4, atol=1e-5)
    found = fla_mamba2.forward(layer, given_x, None)
    expected = oracle(layer, x, np.ones_like(mask))
    np.testing.assert_allclose(array(found), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_of_several_heads_are_refused_for_what_the_library_computes(groups: int) -> None:
    """Its code without a GPU repeats the groups, its kernels each of them."""
    layer, x = second("silu", True), torch.zeros(1, 3, 5)
    layer.num_heads, layer.n_groups = 4, groups
    keys = 2 * groups * STATES
    layer.conv_dim = WIDTH + keys
    layer.in_proj = nn.Linear(5, WIDTH + layer.conv_dim + 4)
    layer.conv1d = nn.Conv1d(layer.conv_dim, layer.conv_dim, TAPS, groups=layer.conv_dim)
    layer.A_log, layer.D, layer.dt_bias = (nn.Parameter(torch.rand(4)) for _ in range(3))
    if groups != 2:
        assert fla_mamba2.torch_forward(layer, x)[0].shape == x.shape
        return
    with pytest.raises(UnsupportedModelError, match=r"2 groups for 4 heads .* type mamba2"):
        fla_mamba2.torch_forward(layer, x)


@pytest.mark.parametrize(
    ("forward", "given_state"),
    [
        (fla_mamba2.torch_forward, {"last_state": {}}),
        (fla_shared_key.forward, {"past_key_values": object()}),
    ],
)
def test_a_state_is_refused(forward: Callable[..., object], given_state: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModelError, match="is given a state"):
        forward(SimpleNamespace(), torch.zeros(1, 2, 5), **given_state)
