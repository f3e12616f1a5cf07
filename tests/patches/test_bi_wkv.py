"""The extension of Vision-RWKV, without a compiler and a GPU."""

from __future__ import annotations

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
from linexport.patches.gpu_kernels import bi_wkv, wkv
from linexport.sources.factory import load_factory

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

ROLES = {"original": nullcontext, "traced": gpu_kernels.traced}
PARTS = 32


def oracle(w: np.ndarray, u: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The kernel in float64, (T, C): what each of its threads sums, for tokens of its own."""
    tokens, channels = k.shape
    length = -(-tokens // PARTS)
    ends = [range(p * length, min((p + 1) * length, tokens)) for p in range(PARTS)]
    both = np.exp(k)[:, None] * np.stack([v, np.ones_like(v)], 1)  # numerator and denominator
    nothing = np.zeros((2, channels))
    back = [sum((both[i] * np.exp(-w * (i - p[0])) for i in p), nothing) for p in ends]
    ahead = [sum((both[i] * np.exp(-w * (p[-1] + 1 - i)) for i in p), nothing) for p in ends]
    out = np.zeros_like(v)
    for number, own in enumerate(ends):
        past, future = nothing, nothing
        for i in range(number):
            past = past + ahead[i] * np.exp(-w * (number - i - 1) * length)
        for i in range(number, PARTS):
            future = future + back[i] * np.exp(-w * (i - number) * length)
        future = future - (both[own[0]] if own else 0.0)
        for i in own:
            total = past + future + np.exp(u) * both[i]
            out[i] = total[0] / total[1]
            past = np.exp(-w) * past + both[i]
            future = np.exp(w) * future - np.exp(w) * both[(i + 1) % tokens]
    return out


@pytest.mark.parametrize("role", ROLES)
@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 150),
    st.integers(1, 5),
    st.sampled_from([0.5, 2.0]),
    st.integers(0, 2**16),
)
def test_the_average_is_that_of_the_kernel(
    role: str, batch: int, tokens: int, channels: int, size: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    w = random.uniform(-5, 3, channels) / tokens
    u = random.standard_normal(channels) / tokens
    k, v = (s * random.standard_normal((batch, tokens, channels)) for s in (size, 1.0))
    given_tensors = [torch.from_numpy(x).float() for x in (w, u, k, v)]
    y = torch.empty(batch, tokens, channels)
    with ROLES[role]():
        bi_wkv.forward(batch, tokens, channels, *given_tensors, y)
        same = bi_wkv.bi_wkv_forward(*given_tensors)
    w, u, k, v = (x.double().numpy() for x in given_tensors)
    expected = np.stack([oracle(w, u, *row) for row in zip(k, v, strict=True)])
    # EPS in the denominator is of the largest key here, of nearly that in the kernel.
    assert np.abs(y.numpy() - expected).max() <= 4e-5 * np.abs(expected).max()
    assert torch.equal(y, same)


KERNEL = """
#define TOKEN_SPLIT 32
    const int exp_w = _t + _tokenLength - ni;
    y[ii] = (c * e1 + a * e2 + e3 * v[ii])/(d * e1 + b * e2 + e3 + EPS);
    no = max(o1 + w, k[ii2] + w);
    c = e1 * c - e3 * v[ii2];
"""
CODE = """
import os

import torch
from torch import nn
from torch.export import Dim
from torch.utils.cpp_extension import load

wkv_cuda = load(name="bi_wkv", sources=[os.path.join(os.path.dirname(__file__), "wkv.cu")])


class Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx, B, T, C, w, u, k, v):
        y = torch.empty((B, T, C), device="cuda", memory_format=torch.contiguous_format)
        wkv_cuda.forward(B, T, C, w, u, k, v, y)
        return y


class Returned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, u, k, v):
        return wkv_cuda.bi_wkv_forward(w, u, k, v)


class Image(nn.Module):
    def __init__(self, returned):
        super().__init__()
        self.returned, self.stem = returned, nn.Conv2d(3, 8, 4, 4)
        self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8)
        self.decay, self.first = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, image):
        x = self.stem(image)
        tokens = x.flatten(2).transpose(1, 2)
        B, T, C = tokens.size()
        given = self.decay / T, self.first / T, self.key(tokens), self.value(tokens)
        given = tuple(one.cuda() for one in given)
        y = Returned.apply(*given) if self.returned else Written.apply(B, T, C, *given)
        return y.transpose(1, 2).reshape(x.shape)


def written():
    sizes = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    return Image(False).eval(), (torch.randn(2, 3, 24, 32),), (sizes,)


def returned():
    sizes = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    return Image(True).eval(), (torch.randn(2, 3, 24, 32),), (sizes,)
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    (tmp_path / "wkv.cu").write_text(KERNEL)
    file = tmp_path / f"net_{tmp_path.name}.py"
    file.write_text(CODE)
    return file


def test_the_kernel_is_known_by_its_lines_and_the_number_of_its_parts(code: Path) -> None:
    source = code.parent / "wkv.cu"
    assert wkv.known([source]) == bi_wkv.KERNELS
    source.write_text(KERNEL.replace("TOKEN_SPLIT 32", "TOKEN_SPLIT 16"))
    assert not wkv.known([source])
    with pytest.raises(UnsupportedModelError, match="linexport knows no form of it in PyTorch"):
        load_factory(f"{code}:written", seed=0, stand_ins=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the code moves tensors to the GPU")
@pytest.mark.parametrize("function", ["written", "returned"])
def test_an_image_model_converts_for_any_height_and_width(
    function: str, code: Path, tmp_path: Path
) -> None:
    source = f"{code}:{function}"
    manifest = linexport.convert(source, stand_ins=True, output=tmp_path / "out", bench=False)
    assert manifest.status == "ok"
    assert manifest.fused["LinearAttention"] >= 1
    [kernel] = manifest.kernels
    assert kernel.formula == bi_wkv.AVERAGE
    found = linexport.inspect(source, stand_ins=True)
    assert isinstance(found, SourceInspection)
    assert all(limits.max != limits.min for limits in found.dims.values())
    net = load_factory(source, seed=0, stand_ins=True).module
    run = manifest.load().run
    for height, width in ((4, 8), (36, 20), (68, 40)):
        x = torch.randn(3, 3, height, width)
        with torch.no_grad():
            expected = net(x).numpy()
        (got,) = run(x.numpy()).values()
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
