"""Kernels of GPU libraries in plain PyTorch, against loops in float64, in both of their roles."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import linexport
from linexport.cli import main
from linexport.errors import UnsupportedModelError, UsageError
from linexport.manifest.inspected import SourceInspection
from linexport.patches import gpu_kernels
from linexport.patches.gpu_kernels import absent, mamba
from linexport.patches.gpu_kernels.convolutions import causal_conv1d, causal_conv1d_update
from linexport.patches.gpu_kernels.fla_delta import gated_delta_rule
from linexport.patches.gpu_kernels.norms import (
    bit_linear,
    layer_norm_gated,
    layer_norm_linear_quant,
    layernorm_fn,
    rms_norm,
)
from linexport.sources import load_model
from linexport.sources.factory import load_factory, load_module
from linexport.sources.objects import load_object

pytestmark = pytest.mark.usefixtures("one_thread")

B, T, H, HV, K, V = 2, 7, 2, 4, 5, 3
ROLES = {"original": nullcontext, "traced": gpu_kernels.traced}


@pytest.fixture(params=ROLES)
def role(request: pytest.FixtureRequest) -> Iterator[None]:
    with ROLES[request.param]():
        yield


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def double(*values: Tensor | None) -> list[Any]:
    return [None if x is None else x.double().numpy() for x in values]


def check(found: Tensor, expected: np.ndarray, limit: float = 2e-6) -> None:
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert np.abs(found.double().numpy() - expected).max() <= limit * np.abs(expected).max()


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def delta_oracle(q, k, v, g, beta, scale, state):
    """One token, one head after the other: S (K, V)."""
    out = np.zeros((B, T, HV, V))
    last = np.zeros((B, HV, K, V))
    for b in range(B):
        for h in range(HV):
            S = np.zeros((K, V)) if state is None else state[b, h].copy()
            for t in range(T):
                key, query = k[b, t, h * H // HV], q[b, t, h * H // HV]
                decay = np.exp(g[b, t, h])
                S = S * (decay[:, None] if np.ndim(decay) else decay)
                S = S + beta[b, t, h] * np.outer(key, v[b, t, h] - S.T @ key)
                out[b, t, h] = scale * (S.T @ query)
            last[b, h] = S
    return out, last


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_the_gated_delta_rule_is_its_formula(
    role: None, per_channel: bool, with_state: bool
) -> None:
    q, k, v, beta = (
        drawn(B, T, H, K),
        drawn(B, T, H, K, seed=1),
        drawn(B, T, HV, V),
        drawn(B, T, HV),
    )
    g = -drawn(B, T, HV, K).abs() if per_channel else -drawn(B, T, HV).abs()
    state = drawn(B, HV, K, V) if with_state else None
    unit = [x / x.norm(dim=-1, keepdim=True) for x in (q, k)]
    expected, last = delta_oracle(*double(*unit, v, g, beta.sigmoid()), 0.3, *double(state))
    found, state = gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=0.3,
        initial_state=None if state is None else state.transpose(2, 3),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        state_v_first=True,
    )
    check(found, expected)
    check(state, last.transpose(0, 1, 3, 2))


def test_a_kernel_that_makes_its_gate_makes_that_of_the_formula(role: None) -> None:
    q, k, v, beta = (
        drawn(B, T, H, K),
        drawn(B, T, H, K, seed=1),
        drawn(B, T, HV, V),
        drawn(B, T, HV),
    )
    raw, rate, bias = drawn(B, T, HV, seed=3), drawn(HV), drawn(HV, seed=1)
    gate = -np.exp(rate.double().numpy()) * softplus((raw + bias).double().numpy())
    expected, _ = delta_oracle(*double(q, k, v), gate, 2 * sigmoid(*double(beta)), K**-0.5, None)
    found, state = gated_delta_rule(
        q,
        k,
        v,
        raw,
        beta,
        use_gate_in_kernel=True,
        A_log=rate,
        dt_bias=bias,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
    )
    check(found, expected, 1e-5)
    assert state is None


@pytest.mark.parametrize("groups", [None, 2])
def test_the_selective_scan_is_its_formula(role: None, groups: int | None) -> None:
    width, states = 6, 4
    u, dt, z = drawn(B, width, T), drawn(B, width, T, seed=1), drawn(B, width, T, seed=2)
    A, D, bias = -drawn(width, states).exp(), drawn(width), drawn(width, seed=1)
    shape = (B, states, T) if groups is None else (B, groups, states, T)
    keys, queries = drawn(*shape), drawn(*shape, seed=1)
    x, d, gate, rate, skip, k, q = double(u, dt + bias[:, None], z, A, D, keys, queries)
    expected, S = np.zeros((B, width, T)), np.zeros((B, width, states))
    for t in range(T):
        for c in range(width):
            key, query = (
                (k[..., t], q[..., t])
                if groups is None
                else (k[:, c * groups // width, :, t], q[:, c * groups // width, :, t])
            )
            step = softplus(d[:, c, t])[:, None]
            S[:, c] = np.exp(step * rate[c]) * S[:, c] + step * key * x[:, c, t, None]
            y = (S[:, c] * query).sum(-1) + skip[c] * x[:, c, t]
            expected[:, c, t] = y * gate[:, c, t] * sigmoid(gate[:, c, t])
    found, last = mamba.selective_scan_fn(u, dt, A, keys, queries, D, z, bias, True, True)
    check(found, expected)
    check(last, S)


@pytest.mark.parametrize("norm", [None, True, False], ids=["no norm", "norm first", "gate first"])
def test_the_block_of_mamba_2_is_its_formula(role: None, norm: bool | None) -> None:
    heads, width, states, groups, rest, taps = 4, 3, 5, 2, 2, 4
    inner, keys = heads * width, groups * states
    sizes = [2 * rest, inner, inner, keys, keys, heads]
    given = drawn(B, T, sum(sizes))
    weight, bias = drawn(inner + 2 * keys, taps), drawn(inner + 2 * keys)
    dt_bias, A, D = drawn(heads), -drawn(heads, seed=1).exp(), drawn(heads, seed=2)
    scale, last = drawn(inner), drawn(9, rest + inner)
    found = mamba.mamba_split_conv1d_scan_combined(
        given,
        weight,
        bias,
        dt_bias,
        A,
        D,
        chunk_size=4,
        rmsnorm_weight=None if norm is None else scale,
        rmsnorm_eps=1e-5,
        norm_before_gate=bool(norm),
        outproj_weight=last,
        headdim=width,
        ngroups=groups,
    )
    whole, w, b = double(given, weight, bias)
    m, z, mixed, dt = np.split(whole, np.cumsum([2 * rest, inner, inner + 2 * keys]), -1)
    padded = np.concatenate([np.zeros((B, taps - 1, mixed.shape[-1])), mixed], 1)
    mixed = sum(padded[:, i : i + T] * w[:, i] for i in range(taps)) + b
    x, k, q = np.split(mixed * sigmoid(mixed), np.cumsum([inner, keys]), -1)
    dt = softplus(dt + dt_bias.double().numpy())
    y, S = np.zeros((B, T, heads, width)), np.zeros((B, heads, states, width))
    for t in range(T):
        for h in range(heads):
            at = slice(h * groups // heads * states, (h * groups // heads + 1) * states)
            row, step = x[:, t, h * width : (h + 1) * width], dt[:, t, h, None, None]
            new = k[:, t, at, None] * row[:, None]
            S[:, h] = np.exp(step * float(A[h])) * S[:, h] + step * new
            y[:, t, h] = (S[:, h] * q[:, t, at, None]).sum(1) + float(D[h]) * row
    y, gate = y.reshape(B, T, inner), z * sigmoid(z)

    def normed(x):
        parts = x.reshape(B, T, groups, -1)
        parts = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + 1e-5)
        return parts.reshape(B, T, inner) * scale.double().numpy()

    y = y * gate if norm is None else normed(y) * gate if norm else normed(y * gate)
    first, second = np.split(m, 2, -1)
    expected = np.concatenate([first * sigmoid(first) * second, y], -1) @ last.double().numpy().T
    check(found, expected, 1e-5)


def test_short_convolutions_are_their_formula_and_go_on_from_their_state(role: None) -> None:
    x, weight, bias = drawn(B, T, 3), drawn(3, 4), drawn(3)
    padded = np.concatenate([np.zeros((B, 3, 3)), x.double().numpy()], 1)
    y = sum(padded[:, i : i + T] * weight[:, i].double().numpy() for i in range(4))
    y = y + bias.double().numpy()
    expected = y * sigmoid(y)
    whole, _ = causal_conv1d(x, weight, bias, activation="silu")
    check(whole, expected)
    first, state = causal_conv1d(x[:, :4], weight, bias, activation="silu", output_final_state=True)
    assert state is not None
    assert torch.equal(state, x[:, :4].transpose(1, 2))
    rest, _ = causal_conv1d(x[:, 4:], weight, bias, initial_state=state, activation="swish")
    check(torch.cat([first, rest], 1), expected)
    state = state[..., 1:].clone()
    steps = [causal_conv1d_update(x[:, t], state, weight, bias, "silu") for t in range(4, T)]
    check(torch.stack(steps, 1), expected[:, 4:])


def test_a_linear_layer_of_few_bits_is_its_formula() -> None:
    """Activations in 8 bits of a token's largest, weights of -1, 0 and 1 times their mean."""
    random = np.random.default_rng(0)
    x, weight, scale = (random.standard_normal(s) for s in ((2, 5, 12), (7, 12), (12,)))
    bias, residual = random.standard_normal(7), random.standard_normal((2, 5, 12))

    def formula(x: np.ndarray, centred: bool) -> np.ndarray:
        y = x - x.mean(-1, keepdims=True) if centred else x
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * scale
        most = np.abs(y).max(-1, keepdims=True)
        y = np.rint(127 * y / most) * most / 127
        mean = np.abs(weight).mean()
        return y @ (np.clip(np.rint(weight / mean), -1, 1) * mean).T + bias

    given = [torch.from_numpy(v) for v in (x, weight, bias, scale, residual)]
    found = bit_linear(given[0], given[1], given[2], given[3], eps=1e-6)
    np.testing.assert_allclose(found, formula(x, centred=False), atol=1e-12)
    y, sum_ = layer_norm_linear_quant(
        *(given[0], given[3], None, given[1], given[2], given[4], 1e-6), prenorm=True
    )
    np.testing.assert_allclose(y, formula(x + residual, centred=True), atol=1e-12)
    np.testing.assert_allclose(sum_, x + residual)


def test_norms_are_their_formulas() -> None:
    x, weight, bias, gate = drawn(B, T, 6), drawn(6), drawn(6, seed=1), drawn(B, T, 6, seed=1)
    residual = drawn(B, T, 6, seed=2)
    y, w, b, z, r = double(x, weight, bias, gate, residual)
    added = y + r
    found, kept = rms_norm(x, weight, bias, residual, 1e-3, prenorm=True)
    check(found, added / np.sqrt((added**2).mean(-1, keepdims=True) + 1e-3) * w + b)
    check(kept, added)
    centred = y - y.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3) * w + b
    check(layer_norm_gated(x, gate, weight, bias, "sigmoid", eps=1e-3), normed * sigmoid(z))
    parts = y.reshape(B, T, 2, 3)
    parts = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + 1e-3)
    expected = parts.reshape(B, T, 6) * w * (z * sigmoid(z))
    check(layernorm_fn(x, weight, None, gate, 1e-3, 3, True, True), expected)


KERNEL = """
import torch


def guarded(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    wrapper.__module__, wrapper.__name__ = function.__module__, function.__name__
    wrapper.__wrapped__ = function
    return wrapper


@guarded
def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None,
                           output_final_state=False, newer=None, chunk_size=64):
    raise RuntimeError("0 active drivers")


@guarded
def fused_recurrent_gated_delta_rule(q, k, v, g, beta, scale=None):
    raise RuntimeError("0 active drivers")


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        raise RuntimeError("0 active drivers")


swish = Swish.apply
TABLE = {"swish": swish}
"""
NAIVE = """
import torch


def naive_recurrent_gated_delta_rule(q, k, v, g, beta, scale=None):
    S, out = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        new = beta[:, t, :, None] * (v[:, t] - (S * k[:, t, :, :, None]).sum(2))
        S = S + k[:, t, :, :, None] * new[:, :, None]
        out.append((S * q[:, t, :, :, None]).sum(2) * scale)
    return torch.stack(out, 1), None
"""
LAYER = """
import torch
from torch import nn
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.gates = nn.Linear(8, 4)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, 4)) for y in self.qkv(x).chunk(3, -1))
        k = nn.functional.normalize(k, dim=-1)
        g, beta = self.gates(x).sigmoid().chunk(2, -1)
        if x.shape[1] <= 64:
            return fused_recurrent_gated_delta_rule(q, k, v, -g, beta)[0].flatten(2)
        return chunk_gated_delta_rule(q, k, v, -g, beta, chunk_size=32)[0].flatten(2)
"""


@pytest.fixture
def fla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of that name whose kernels fail as they do without a GPU."""
    rule = tmp_path / "fla" / "ops" / "gated_delta_rule"
    rule.mkdir(parents=True)
    for folder in (tmp_path / "fla", rule.parent):
        (folder / "__init__.py").write_text("")
    (rule / "__init__.py").write_text("from .chunk import *\n")
    (rule / "chunk.py").write_text(KERNEL)
    (rule / "naive.py").write_text(NAIVE)
    (tmp_path / "fla" / "layers.py").write_text(LAYER)
    forget(monkeypatch, "fla")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def forget(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Let packages be imported anew in a test, and be forgotten after it."""
    names = [n for n in sys.modules if n.partition(".")[0] in packages]
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
        monkeypatch.delitem(sys.modules, package)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in absent.KNOWN:
            del sys.modules[name]


def test_a_layer_of_a_library_without_a_gpu_converts_and_streams(fla: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = importlib.import_module("fla.layers").Layer().eval()
    x = torch.randn(2, 80, 8)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        layer(x)
    manifest = linexport.convert(layer, args=(x,), output=tmp_path / "out", bench=False)
    assert manifest.status == "ok"
    assert manifest.fused == {"LinearAttention": 1}
    assert manifest.streaming is not None
    assert manifest.dims["seq"].min == 1  # 64 tokens choose a kernel, not what is computed
    (kernel,) = manifest.kernels
    assert kernel.name == "fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule"
    assert kernel.reference == "fla.ops.gated_delta_rule.naive.naive_recurrent_gated_delta_rule"
    assert kernel.error is not None
    assert kernel.error < 1e-6
    page = (tmp_path / "out" / "report.html").read_text().replace("<wbr>", "")
    assert kernel.name in page
    assert kernel.reference in page


def test_a_stand_in_that_is_not_the_librarys_reference_says_by_how_much(fla: Path) -> None:
    naive = fla / "fla" / "ops" / "gated_delta_rule" / "naive.py"
    naive.write_text(NAIVE.replace("* scale)", "* scale * 1.5)"))
    layer = importlib.import_module("fla.layers").Layer().eval()
    (kernel,) = load_module((layer, (torch.randn(2, 80, 8),)), "layer").kernels
    assert kernel.error == pytest.approx(1 / 3, rel=1e-5)


def test_other_devices_have_the_librarys_kernel(fla: Path) -> None:
    rule = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    gpu_kernels.install(nn.Identity())
    names = ("q", "k", "v", "g", "beta")
    with FakeTensorMode(), pytest.raises(RuntimeError, match="0 active drivers"):
        rule.chunk_gated_delta_rule(**{n: torch.empty(1, 2, 1, 2, device="cuda") for n in names})


def test_an_argument_that_is_not_known_is_named(fla: Path) -> None:
    rule = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    gpu_kernels.install(nn.Identity())
    x, g = torch.ones(1, 2, 1, 2), torch.ones(1, 2, 1)
    assert rule.chunk_gated_delta_rule(x, x, x, g, g, newer=None)[0].shape == x.shape
    with pytest.raises(UnsupportedModelError, match="newer=3") as error:
        rule.chunk_gated_delta_rule(x, x, x, g, g, newer=3)
    assert "the delta rule on a state that decays" in str(error.value)


def test_methods_that_a_copy_of_a_layer_holds_are_stood_in_for(fla: Path) -> None:
    rule = importlib.import_module("fla.ops.gated_delta_rule.chunk")

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = rule.swish, rule.TABLE["swish"]

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + self.second(x)

    x = torch.randn(2, 5)
    loaded = load_object((Layer(), (x,)))
    torch.testing.assert_close(loaded.module(x), 2 * nn.functional.silu(x))
    assert rule.TABLE["swish"](x).equal(nn.functional.silu(x))
    assert [one.name for one in loaded.kernels] == ["fla.ops.gated_delta_rule.chunk.swish"]


def test_stand_ins_are_put_once(fla: Path) -> None:
    layers = importlib.import_module("fla.layers")
    gpu_kernels.install(nn.Identity())
    first = layers.chunk_gated_delta_rule
    gpu_kernels.install(nn.Identity())
    assert layers.chunk_gated_delta_rule is first


MUST_HAVE_A_GPU = """
import torch
from torch import nn


class StickBreakingAttention(nn.Module):
    def forward(self, x):
        raise NotImplementedError("Stick-breaking attention requires a CUDA/HIP or Intel GPU.")
"""


def test_a_layer_that_runs_on_gpus_alone_is_refused_by_what_it_computes(fla: Path) -> None:
    (fla / "fla" / "layers.py").write_text(MUST_HAVE_A_GPU)
    layer = importlib.import_module("fla.layers").StickBreakingAttention()
    with pytest.raises(UnsupportedModelError) as error:
        load_module((nn.Sequential(nn.Linear(4, 4), layer), (torch.randn(2, 4),)), "net")
    message = str(error.value)
    assert message.startswith("1 is a StickBreakingAttention of fla.layers: it computes stick-")
    assert "Call fla.ops.stickbreaking_attn.parallel_stickbreaking_attn" in message


USER = """
import torch
from torch import nn
{imported}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.x_proj = nn.Linear(8, 24)
        self.A_log = nn.Parameter(torch.zeros(8, 4))

    def forward(self, x):
        dt, B, C = self.x_proj(x).split([8, 8, 8], -1)
        y = selective_scan_fn(
            x.transpose(1, 2), dt.transpose(1, 2), -self.A_log.exp(), B[..., :4].transpose(1, 2),
            C[..., :4].transpose(1, 2), delta_softplus=True)
        return y.transpose(1, 2)


def build():
    return Net().eval(), (torch.randn(2, 6, 8),)
"""
DIRECT = "from mamba_ssm.ops.selective_scan_interface import selective_scan_fn"
GUARDED = """
try:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
except ImportError:
    selective_scan_fn = None
"""
LATE = """
import mamba_ssm


def selective_scan_fn(*args, **options):
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    return selective_scan_fn(*args, **options)
"""
EXTENSION = """
import selective_scan_cuda_oflex


def selective_scan_fn(u, delta, A, B, C, delta_softplus):
    return selective_scan_cuda_oflex.fwd(
        u, delta, A, B[:, None], C[:, None], None, None, delta_softplus, 1, True)[0]
"""


def written(folder: Path, imported: str) -> str:
    file = folder / f"net_{abs(hash(imported))}.py"
    file.write_text(USER.format(imported=imported))
    return f"{file}:build"


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, *absent.KNOWN)
    monkeypatch.setattr(absent, "needed", frozenset)

    class Hidden:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            """Fail as the import system does where nothing finds a module."""

    found = importlib.machinery.PathFinder.find_spec

    def without(name: str, *args: Any) -> Any:
        return None if name.partition(".")[0] in absent.KNOWN else found(name, *args)

    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", without)


def expected_scan(loaded: Any) -> Tensor:
    net, (x,) = loaded.module, loaded.args
    dt, keys, queries = net.x_proj(x).double().split([8, 8, 8], -1)
    S, out = torch.zeros(2, 8, 4, dtype=torch.float64), []
    for t in range(x.shape[1]):
        step = nn.functional.softplus(dt[:, t])[..., None]
        new = step * x[:, t, :, None] * keys[:, t, None, :4]
        S = torch.exp(-step * net.A_log.exp()) * S + new
        out.append((S * queries[:, t, None, :4]).sum(-1))
    return torch.stack(out, 1)


@pytest.mark.parametrize("imported", [DIRECT, GUARDED, LATE])
def test_a_package_that_is_not_installed_is_made_on_request(
    no_library: None, tmp_path: Path, imported: str
) -> None:
    source = written(tmp_path, imported)
    with pytest.raises((UsageError, UnsupportedModelError), match="stand_ins=True") as error:
        load_factory(source, seed=0)
    assert "mamba_ssm, which is not installed" in str(error.value)
    file = tmp_path / "again.py"
    file.write_text(USER.format(imported=imported))
    loaded = load_factory(f"{file}:build", seed=0, stand_ins=True)
    (kernel,) = loaded.kernels
    assert (kernel.name, kernel.package) == ("mamba_ssm.selective_scan_fn", "mamba_ssm")
    with torch.no_grad():
        torch.testing.assert_close(
            loaded.module(*loaded.args).double(), expected_scan(loaded), rtol=1e-5, atol=1e-6
        )


def test_references_of_a_package_are_made_beside_its_kernels(
    no_library: None, tmp_path: Path
) -> None:
    both = DIRECT.replace("selective_scan_fn", "selective_scan_fn, selective_scan_ref")
    loaded = load_factory(written(tmp_path, both), seed=0, stand_ins=True)
    (kernel,) = loaded.kernels
    assert kernel.error is None  # which a comparison with itself would make 0
    with absent.standing_in(absent.KNOWN):
        interface = importlib.import_module("mamba_ssm.ops.selective_scan_interface")
    u, dt, states = drawn(B, 6, T), drawn(B, 6, T, seed=1), drawn(B, 4, T)
    given = u, dt, -drawn(6, 4).abs(), states, drawn(B, 4, T, seed=2)
    torch.testing.assert_close(
        interface.selective_scan_ref(*given), interface.selective_scan_fn(*given)
    )


WEIGHTS = {
    "Mamba": "A_log D conv1d.bias conv1d.weight dt_proj.bias dt_proj.weight in_proj.weight "
    "out_proj.weight x_proj.weight",
    "Mamba2": "A_log D conv1d.bias conv1d.weight dt_bias in_proj.weight norm.weight "
    "out_proj.weight",
}
"""Names that checkpoints of mamba_ssm have."""


@pytest.mark.parametrize("name", WEIGHTS)
def test_layers_of_a_package_that_is_made_take_its_weights(
    no_library: None, tmp_path: Path, name: str
) -> None:
    file = tmp_path / f"layer_{name}.py"
    file.write_text(
        f"import torch\nfrom mamba_ssm import {name}\n\n\ndef build():\n"
        f"    return {name}(d_model=32, d_state=4, expand=4), (torch.randn(2, 6, 32),)\n"
    )
    loaded = load_factory(f"{file}:build", seed=0, stand_ins=True)
    assert sorted(loaded.module.state_dict()) == WEIGHTS[name].split()
    assert loaded.kernels


def test_an_extension_that_must_be_there_is_made_without_being_asked_for(
    no_library: None, tmp_path: Path
) -> None:
    loaded = load_factory(written(tmp_path, EXTENSION), seed=0)
    assert [one.name for one in loaded.kernels] == ["selective_scan_cuda_oflex.fwd"]
    with torch.no_grad():
        torch.testing.assert_close(
            loaded.module(*loaded.args).double(), expected_scan(loaded), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(
    "line", ["from mamba_ssm.ops.nothing import x", "from mamba_ssm import NoSuchLayer"]
)
def test_a_name_that_is_not_known_is_an_import_error(
    no_library: None, tmp_path: Path, line: str
) -> None:
    with pytest.raises(UsageError, match=r"NoSuchLayer|ops"):
        load_factory(written(tmp_path, line), seed=0, stand_ins=True)


def test_an_installed_package_is_not_made(fla: Path) -> None:
    with absent.standing_in(absent.KNOWN):
        assert importlib.import_module("fla.ops").__file__ == str(fla / "fla/ops/__init__.py")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("fla.ops.nothing")


def test_stand_ins_are_for_code_alone(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    for source in (tmp_path / "model.onnx", (nn.Linear(2, 2), (torch.ones(1, 2),))):
        with pytest.raises(UsageError, match="stand_ins=True goes with a class or a function"):
            load_model(source, stand_ins=True)


def test_every_kernel_says_what_it_computes() -> None:
    names = [(p, n) for k in gpu_kernels.kernels() for p in k.packages for n in k.names]
    assert len(set(names)) == len(names)
    assert all(kernel.formula and kernel.function.__doc__ for kernel in gpu_kernels.kernels())


def test_a_source_is_inspected_with_the_stand_ins_that_it_converts_with(
    no_library: None, tmp_path: Path
) -> None:
    source = written(tmp_path, DIRECT)
    with pytest.raises(UsageError, match="mamba_ssm, which is not installed: stand_ins=True"):
        linexport.inspect(source)
    found = linexport.inspect(source, stand_ins=True)
    assert isinstance(found, SourceInspection)
    assert [op.op for op in found.ops] == ["LinearAttention"]
    (kernel,) = found.to_json()["kernels"]
    assert kernel["name"] == "mamba_ssm.selective_scan_fn"


@pytest.mark.parametrize(("options", "said"), [((), "--stand-ins"), (("--stand-ins",), "kernel")])
def test_the_command_line_inspects_with_stand_ins(
    no_library: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["linexport", "inspect", written(tmp_path, DIRECT), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == (0 if options else 2)
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    assert ("1 kernel of mamba_ssm computed in PyTorch" in printed.out) is bool(options)
