"""ReLU attention of images in float16, as EfficientViT, SANA and DC-AE have it, at large values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from onnxruntime import InferenceSession
from torch import Tensor, nn
from torch.export import Dim

import linexport
from linexport.passes.rewriting import rewrite
from linexport.plugins.ops.registry import attach_functions
from linexport.sources import load_model
from linexport.sources.factory import load_module
from linexport.trace import trace
from tests.support.runtimes import session

HEADS, WIDTH, EPS = 2, 4, 1e-15
CHANNELS = 3 * HEADS * WIDTH
DYNAMIC = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}


class OnesRow(nn.Module):
    """(B, C, H, W), values with a row of ones behind them: EfficientViT's LiteMLA."""

    wide = False

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3 HEADS WIDTH, H, W) -> (B, HEADS, WIDTH, H W)."""
        q, k, v = x.reshape(x.shape[0], HEADS, 3 * WIDTH, -1).chunk(3, 2)
        q, k = F.relu(q), F.relu(k)
        if self.wide:
            q, k, v = q.float(), k.float(), v.float()
        v = F.pad(v, (0, 0, 0, 1), value=1.0)
        out = (v @ k.mT) @ q
        return (out[:, :, :-1] / (out[:, :, -1:] + EPS)).to(x.dtype)


class Widened(OnesRow):
    """The same with sums in float32, as SANA's processor has them."""

    wide = True


class Separate(nn.Module):
    """The denominator as a sum of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3 HEADS WIDTH, H, W) -> (B, HEADS, WIDTH, H W)."""
        q, k, v = x.reshape(x.shape[0], HEADS, 3 * WIDTH, -1).chunk(3, 2)
        q, k = F.relu(q).mT, F.relu(k)
        sums = q @ k.sum(-1, keepdim=True)
        return (q @ (k @ v.mT) / (sums + EPS)).mT


def oracle(x: np.ndarray) -> np.ndarray:
    q, k, v = np.split(x.astype(np.float64).reshape(len(x), HEADS, 3 * WIDTH, -1), 3, 2)
    scores = np.maximum(q, 0).swapaxes(2, 3) @ np.maximum(k, 0)
    out = scores @ v.swapaxes(2, 3) / (scores.sum(-1, keepdims=True) + EPS)
    return out.swapaxes(2, 3)


def image(seed: int, size: float, rows: int, columns: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, CHANNELS, rows, columns))
    return (size * (np.abs(x) + 0.05 * np.sign(x) if seed % 2 else x)).astype(np.float16)


FUSED: dict[tuple[type[nn.Module], bool], InferenceSession] = {}


def fused(kind: type[nn.Module], dynamic: bool) -> InferenceSession:
    """Return a session of a module whose attention is one operator, in float16."""
    if (kind, dynamic) not in FUSED:
        example = torch.from_numpy(image(0, 1.0, 8, 6))
        shapes = (DYNAMIC,) if dynamic else ({0: Dim.DYNAMIC},)
        traced = trace(load_module((kind().half(), (example,), shapes), "half:relu"))
        found = rewrite(traced.model)
        (node,) = (n for n in found.model.graph.node if n.op_type == "LinearAttention")
        given = {a.name: a for a in node.attribute}
        assert given["normalize"].i == 1 and given["eps"].f == pytest.approx(EPS, rel=1e-6)
        assert given["q_num_heads"].i == given["kv_num_heads"].i == HEADS
        assert not found.findings.rejected
        attach_functions(found.model)
        FUSED[kind, dynamic] = session(found.model)
    return FUSED[kind, dynamic]


@pytest.mark.parametrize("kind", [OnesRow, Widened, Separate])
@pytest.mark.parametrize("dynamic", [True, False])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**16), size=st.sampled_from([0.1, 1.0, 30.0, 200.0, 3000.0]))
def test_relu_attention_in_float16_is_that_of_float64(
    kind: type[nn.Module], dynamic: bool, seed: int, size: float
) -> None:
    x = image(seed, size, *((17, 40) if dynamic else (8, 6)))
    opened = fused(kind, dynamic)
    (got,) = opened.run(None, {opened.get_inputs()[0].name: x})
    expected = oracle(x)
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, expected, atol=2e-3 * np.abs(expected).max())


def test_the_original_overflows_at_200() -> None:
    x = torch.from_numpy(image(0, 200.0, 17, 40))
    assert not OnesRow()(x).isfinite().all() and OnesRow()(x.float()).isfinite().all()


@pytest.mark.parametrize("kind", [OnesRow, Separate])
def test_an_onnx_file_in_float16_that_overflows_is_fused_and_does_not(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    example = torch.from_numpy(image(0, 1.0, 8, 6))
    program = torch.onnx.export(
        kind().half().eval(), (example,), dynamo=True, dynamic_shapes=(DYNAMIC,), optimize=False
    )
    assert program is not None
    program.save(tmp_path / "half.onnx")
    x = image(2, 200.0, 17, 40)
    (plain,) = session(onnx.load(tmp_path / "half.onnx")).run(None, {"x": x})
    assert not np.isfinite(plain).all()
    found = rewrite(trace(load_model(tmp_path / "half.onnx")).model)
    assert [n.op_type for n in found.model.graph.node].count("LinearAttention") == 1
    attach_functions(found.model)
    (got,) = session(found.model).run(None, {"x": x})
    expected = oracle(x)
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, expected, atol=2e-3 * np.abs(expected).max())


@pytest.mark.slow
def test_an_original_that_overflows_is_compared_in_float32_which_is_said(tmp_path: Path) -> None:
    example = torch.from_numpy(image(0, 1.0, 16, 12))
    scaled = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False), OnesRow())
    with torch.no_grad():
        scaled[0].weight.copy_(200 * torch.eye(CHANNELS)[..., None, None])
    model = load_module((scaled.half(), (example,), (DYNAMIC,)), "half:overflow")
    manifest = linexport.convert(model, tmp_path / "a", target="onnx", bench=False, threads=1)
    assert manifest.fused["LinearAttention"] == 1 and manifest.parity.passed
    said = "The original overflows in float16 on the random inputs"
    alone = "there the artifact is compared with its float32 computation alone"
    assert any(w.startswith(said) and alone in w for w in manifest.warnings)
    assert said in (tmp_path / "a" / "report.html").read_text()
    large = [c for c in manifest.parity.cases if c.name == "random" and c.length > 100]
    assert large and {c.reference for c in large} == {"float32", "float64"}


class DecaysInFloat32(nn.Module):
    """Mamba-2's recurrence in float16, whose steps and decays are computed in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.step = nn.Linear(8, 24), nn.Linear(8, 2)
        self.rates = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).float() for y in self.project(x).chunk(3, -1))
        step = F.softplus(self.step(x).float())
        decay = (step * -self.rates.float().exp()).exp()
        state, out = torch.zeros(x.shape[0], 2, 4, 4), []
        for t in range(x.shape[1]):
            added = k[:, t, :, :, None] * v[:, t, :, None] * step[:, t, :, None, None]
            state = decay[:, t, :, None, None] * state + added
            out.append((q[:, t, :, :, None] * state).sum(-2))
        return torch.stack(out, 1).flatten(2).to(x.dtype)


def test_numbers_in_a_function_have_the_type_that_it_is_computed_in(tmp_path: Path) -> None:
    """A function of a value in float16 that begins with a cast to float32."""
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    model = DecaysInFloat32().half().eval()
    source = (model, (torch.randn(2, 12, 8).half(),), shapes)
    manifest = linexport.convert(source, tmp_path / "made", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.fused == {"LinearAttention": 1}
    x = torch.randn(3, 41, 8).half()
    exact = DecaysInFloat32().half().float()
    with torch.no_grad():
        expected = exact(x.float()).numpy()
    (found,) = linexport.load(tmp_path / "made", threads=1).run(x.numpy()).values()
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())
