"""The extension of RWKV-4 that a model's code compiles itself, without a compiler and a GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import cpp_extension

import linexport
from linexport.errors import UnsupportedModelError
from linexport.manifest.inspected import SourceInspection
from linexport.patches import gpu_kernels
from linexport.patches.gpu_kernels import on_cpu, wkv
from linexport.sources.factory import load_factory

pytestmark = pytest.mark.usefixtures("one_thread")

ROLES = {"original": nullcontext, "traced": gpu_kernels.traced}


def oracle(w: np.ndarray, u: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Weighted averages (B, T, C) in float64, each from all its exponents."""
    out = np.zeros_like(v)
    for t in range(k.shape[1]):
        ages = np.arange(t - 1, -1, -1)[:, None]
        exponents = np.concatenate([k[:, :t] + ages * w, (u + k[:, t])[:, None]], 1)
        weights = np.exp(exponents - exponents.max(1, keepdims=True))
        out[:, t] = (weights * v[:, : t + 1]).sum(1) / weights.sum(1)
    return out


@pytest.mark.parametrize("role", ROLES)
@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(1, 5),
    st.sampled_from([1.0, 30.0, 200.0]),
    st.integers(0, 2**16),
)
def test_the_average_is_its_formula(
    role: str, batch: int, tokens: int, channels: int, size: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    w = -np.exp(random.standard_normal(channels))
    u, k, v = (
        scale * random.standard_normal(shape)
        for scale, shape in (
            (1.0, channels),
            (size, (batch, tokens, channels)),
            (1.0, (batch, tokens, channels)),
        )
    )
    tensors = [torch.from_numpy(x).float() for x in (w, u, k, v)]
    y = torch.empty(batch, tokens, channels)
    with ROLES[role]():
        wkv.forward(batch, tokens, channels, *tensors, y)
    expected = oracle(*(x.double().numpy() for x in tensors))
    # Exponents of some hundreds have no more digits after the point than this.
    assert np.abs(y.numpy() - expected).max() <= 3e-6 * max(size, 2.0)


RWKV = """
template <typename F>
__global__ void kernel_forward(const int B, const int T, const int C, const F *_w, const F *_u,
                               const F *_k, const F *_v, F *_y) {
    F p = 0, q = 0, o = MIN_VALUE;
    for (int i = 0; i < T; i++) {
        F no = max(o, u + k[ii]);
        y[ii] = (exp(o - no) * p + exp(u + k[ii] - no) * v[ii]) / z;
        no = max(w + o, k[ii]);
        o = no;
    }
}
"""
BOTH_WAYS = """
#define TOKEN_SPLIT (512 / CHANNEL_SPLIT)
template <typename F>
__global__ void kernel_forward(const int B, const int T, const int C, const F *_w, const F *_u,
                               const F *_k, const F *_v, F *_y) {
    F no = max(o1, k[ii] - w * (i - _t));
    no = max(o2, k[nini] - w * exp_w);
}
"""
CODE = """
import os

import torch
from torch import nn
from torch.export import Dim
from torch.utils.cpp_extension import load

T_MAX, HERE = 4096, os.path.dirname(__file__)
wkv_cuda = load(name="wkv", sources=[os.path.join(HERE, "op.cpp"), os.path.join(HERE, "wkv.cu")],
                verbose=True, extra_cuda_cflags=["-res-usage", f"-DTmax={T_MAX}"])


class WKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, B, T, C, w, u, k, v):
        ctx.B, ctx.T, ctx.C = B, T, C
        assert T <= T_MAX
        assert B * C % min(C, 1024) == 0
        ctx.save_for_backward(w, u, k, v)
        w = -torch.exp(w.float().contiguous())
        u, k, v = u.float().contiguous(), k.float().contiguous(), v.float().contiguous()
        y = torch.empty((B, T, C), device="cuda", memory_format=torch.contiguous_format)
        wkv_cuda.forward(B, T, C, w, u, k, v, y)
        return y


def average(B, T, C, w, u, k, v):
    return WKV.apply(B, T, C, w.cuda(), u.cuda(), k.cuda(), v.cuda())


class Mix(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.decay, self.first = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x):
        return average(*x.size(), self.decay, self.first, self.key(x), self.value(x))


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.mix = nn.Conv2d(3, 8, 4, 4), Mix()

    def forward(self, x):
        x = self.stem(x)
        y = self.mix(x.flatten(2).transpose(1, 2))
        return y.transpose(1, 2).reshape(x.shape)


def tokens():
    return Mix().eval(), (torch.randn(2, 12, 8),)


def image():
    sizes = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    return Image().eval(), (torch.randn(2, 3, 24, 32),), (sizes,)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Code with the sources of its extension, on a machine without a compiler."""
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    (tmp_path / "op.cpp").write_text("// binds forward\n")
    (tmp_path / "wkv.cu").write_text(RWKV)
    (tmp_path / f"net_{tmp_path.name}.py").write_text(CODE)
    own = [(torch.Tensor, "cuda"), *((torch, name) for name in on_cpu.MAKERS)]
    before = [getattr(holder, name) for holder, name in own]
    yield tmp_path
    assert all(getattr(*one) is was for one, was in zip(own, before, strict=True))


def source(folder: Path, function: str) -> str:
    return f"{folder / f'net_{folder.name}.py'}:{function}"


def test_the_recurrence_is_known_by_the_source_of_the_kernel(folder: Path) -> None:
    files = [folder / "op.cpp", str(folder / "wkv.cu")]
    assert wkv.known(files) == wkv.known(files[1]) == wkv.KERNELS
    assert not wkv.known([folder / "op.cpp", folder / "missing.cu"])
    (folder / "wkv.cu").write_text(BOTH_WAYS)
    assert not wkv.known(files)


def test_the_extension_needs_stand_ins(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        load_factory(source(folder, "tokens"), seed=0)
    assert "the extension 'wkv' (op.cpp, wkv.cu), which fails here" in str(error.value)
    assert str(error.value).endswith("stand_ins=True computes it in PyTorch.")


def test_another_recurrence_of_the_same_name_is_refused(folder: Path) -> None:
    (folder / "wkv.cu").write_text(BOTH_WAYS)
    with pytest.raises(UnsupportedModelError, match="linexport knows no form of it in PyTorch"):
        load_factory(source(folder, "tokens"), seed=0, stand_ins=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the code moves tensors to the GPU")
def test_a_module_with_the_extension_converts_and_streams(folder: Path, tmp_path: Path) -> None:
    manifest = linexport.convert(
        source(folder, "tokens"), stand_ins=True, output=tmp_path / "out", bench=False
    )
    assert manifest.status == "ok"
    assert manifest.fused["LinearAttention"] == 1
    assert manifest.streaming is not None
    assert manifest.streaming.passed
    assert [kernel.name for kernel in manifest.kernels] == ["wkv.forward"]
    net = load_factory(source(folder, "tokens"), seed=0, stand_ins=True).module
    assert torch.equal(copy.deepcopy(net)(torch.ones(1, 3, 8)), net(torch.ones(1, 3, 8)))
    x = np.random.default_rng(0).standard_normal((3, 70, 8)).astype(np.float32)
    (found,) = manifest.load().run(x).values()
    weights = {name: p.detach().double().numpy() for name, p in net.named_parameters()}
    k, v = (x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"] for name in ("key", "value"))
    expected = oracle(-np.exp(weights["decay"]), weights["first"], k, v)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    assert not hasattr(cpp_extension.load, "__wrapped__")  # the compiler's own again


@pytest.mark.skipif(torch.cuda.is_available(), reason="the code moves tensors to the GPU")
def test_tokens_of_images_of_any_height_and_width_are_averaged(folder: Path) -> None:
    found = linexport.inspect(source(folder, "image"), stand_ins=True)
    assert isinstance(found, SourceInspection)
    assert {op.op for op in found.ops} >= {"StabilizedExp", "LinearAttention"}
    assert len(found.dims) == 3
    assert all(limits.max != limits.min for limits in found.dims.values())
