"""Models that take whole chunks alone have a state, and then any number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim

import linexport
from linexport.sources.factory import load_module
from tests.support.chunk_listing import CHUNK, HEADS, WIDTH, D, Projections, chunk_products
from tests.support.formulations.decayed import segsum
from tests.support.independent import Independent, check_independently

Mixer = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

pytestmark = pytest.mark.usefixtures("one_thread")


def quadratic(q: Tensor, k: Tensor, v: Tensor, steps: Tensor) -> Tensor:
    """What all compute: (B, H, T, D) and logarithms of decays (B, H, T), at any length."""
    since = steps.cumsum(-1)
    decay = torch.exp((since[..., None] - since[..., None, :]).tril()).tril()
    return ((q @ k.mT) * decay) @ v


def heads_first(q: Tensor, k: Tensor, v: Tensor, steps: Tensor) -> Tensor:
    """Mamba-2's listing with heads before chunks: a zero state in front of those of chunks."""
    batch, _, tokens, _ = q.shape
    chunks = tokens // CHUNK
    q, k, v = (x.reshape(batch, HEADS, chunks, CHUNK, D) for x in (q, k, v))
    steps = steps.reshape(batch, HEADS, chunks, CHUNK)
    since = steps.cumsum(-1)
    within = ((q @ k.mT) * torch.exp(segsum(steps))) @ v
    states = (k * torch.exp(since[..., -1:] - since)[..., None]).mT @ v
    states = torch.cat([torch.zeros_like(states[:, :, :1]), states], dim=2)
    decay = torch.exp(segsum(F.pad(since[..., -1], (1, 0))))
    before = torch.einsum("bhzc,bhcde->bhzde", decay, states)[:, :, :-1]
    return (within + (q * since.exp()[..., None]) @ before).reshape(batch, HEADS, tokens, D)


def tokens_first(q: Tensor, k: Tensor, v: Tensor, steps: Tensor) -> Tensor:
    """The same as published: (B, chunks, CHUNK, H, D), whose last size is left to reshape."""
    batch, _, tokens, _ = q.shape
    shape = (batch, tokens // CHUNK, CHUNK, HEADS, -1)
    q, k, v = (x.transpose(1, 2).reshape(shape) for x in (q, k, v))
    steps = steps.mT.reshape(shape[:-1]).permute(0, 3, 1, 2)
    out, _ = chunk_products(q, k, v, steps)
    return out.reshape(batch, tokens, HEADS, D).transpose(1, 2)


def padded(q: Tensor, k: Tensor, v: Tensor, steps: Tensor) -> Tensor:
    """The same at any length: zeros behind the tokens, of which there are -T % CHUNK."""
    tokens = q.shape[2]
    behind = -tokens % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, behind)) for x in (q, k, v))
    return tokens_first(q, k, v, F.pad(steps, (0, behind)))[:, :, :tokens]


def cut_off(q: Tensor, k: Tensor, v: Tensor, steps: Tensor) -> Tensor:
    """Tokens behind the last whole chunk are dropped, at any length."""
    whole = q.shape[2] // CHUNK * CHUNK
    q, k, v, steps = q[:, :, :whole], k[:, :, :whole], v[:, :, :whole], steps[:, :, :whole]
    return quadratic(q, k, v, steps)


class Layer(Projections):
    """A mixer whose outputs are all that is returned."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH)."""
        return self.joined(self.mixer(*self.heads(x)))


def converted(mixer: Mixer, folder: Path) -> linexport.Manifest:
    given = ((torch.randn(2, 4 * CHUNK, WIDTH),), ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},))
    loaded = load_module((Layer(mixer).eval(), *given), "chunks:layer")
    return linexport.convert(loaded, folder, target="onnx", bench=False, threads=1)


@pytest.mark.parametrize("mixer", [heads_first, tokens_first])
def test_chunks_stream_by_tokens(tmp_path: Path, mixer: Mixer) -> None:
    manifest = converted(mixer, tmp_path / "a")
    assert manifest.fused == {"LinearAttention": 1} and manifest.streaming.passed
    check_independently(tmp_path / "a", Layer(mixer), WIDTH, lengths=(8, 48, 136), unit=CHUNK)
    check_independently(tmp_path / "a", Layer(quadratic), WIDTH, lengths=(1, 7, 130))


def test_a_model_that_pads_its_chunks_streams_by_tokens(tmp_path: Path) -> None:
    """torch writes -T % 8 as PythonMod, and the one state in front as Min(1, chunks)."""
    manifest = converted(padded, tmp_path / "a")
    assert manifest.fused == {"LinearAttention": 1} and manifest.streaming.passed
    check_independently(tmp_path / "a", Layer(padded), WIDTH, lengths=(1, 7, 130))


def test_what_is_cut_off_stays_cut_off(tmp_path: Path) -> None:
    manifest = converted(cut_off, tmp_path / "a")
    assert manifest.fused == {"LinearAttention": 1} and not manifest.states
    x = torch.randn(2, 3 * CHUNK + 5, WIDTH)
    got = Independent(tmp_path / "a").pieces(x.numpy(), [x.shape[1]])
    with torch.no_grad():
        expected = Layer(cut_off).double()(x.double()).numpy()
    assert got.shape == expected.shape == (2, 3 * CHUNK, WIDTH)
    assert abs(got - expected).max() <= 2e-5 * abs(expected).max()
