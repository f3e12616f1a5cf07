"""Batches with padding, in layers of fla that are given an ``attention_mask``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import linexport
from linexport.errors import UnsupportedModelError
from linexport.patches.gpu_kernels import padding, softmax

pytestmark = pytest.mark.usefixtures("one_thread")

MASKS = st.integers(1, 4).flatmap(
    lambda batch: st.integers(1, 9).flatmap(
        lambda length: st.lists(
            st.lists(st.booleans(), min_size=length, max_size=length),
            min_size=batch,
            max_size=batch,
        )
    )
)


def alone(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Sums until each valid token (B, T, C), of each row's valid tokens alone; 0 at padding."""
    found = np.zeros_like(x)
    for row, valid, y in zip(x, mask, found, strict=True):
        y[valid] = row[valid].cumsum(0)
    return found


@settings(max_examples=60, deadline=None)
@given(MASKS, st.integers(0, 3))
def test_valid_tokens_of_a_row_are_as_alone_and_padding_is_zero(
    rows: list[list[bool]], earlier: int
) -> None:
    mask = np.array(rows)
    x = np.random.default_rng(0).standard_normal((*mask.shape, 2)).astype(np.float32)
    whole = torch.tensor(np.pad(mask, ((0, 0), (earlier, 0)))).long()
    given = torch.from_numpy(x)
    moved, places, ends = padding.unpad_hidden_states(given, None, whole, x.shape[1])
    assert places is not None
    assert ends is None
    found = padding.repad_hidden_states(moved.cumsum(1), places, *mask.shape)
    expected = alone(x.astype(np.float64), mask)
    assert np.abs(found.numpy() - expected).max() <= 1e-5
    (first, second), (third,), places, ends, lengths = padding.unpad_input(
        (given, 2 * given), (given[..., None],), whole[:, earlier:], x.shape[1]
    )
    valid = torch.arange(x.shape[1]) < torch.tensor(mask.sum(1, keepdims=True))
    assert torch.equal(torch.where(valid[..., None], first, 0.0), moved)
    assert torch.equal(second, 2 * first)
    assert ends == (None, None)
    assert lengths == (x.shape[1], x.shape[1])
    found = padding.pad_input(third.cumsum(1).squeeze(0), places, *mask.shape)
    assert np.abs(found[..., 0].numpy() - expected).max() <= 1e-5


def test_without_a_mask_nothing_is_moved() -> None:
    x, ends = torch.randn(1, 5, 2), torch.tensor([0, 2, 5])
    assert padding.unpad_hidden_states(x, None, None, 5) == (x, None, None)
    assert padding.unpad_hidden_states(x, ends, torch.ones(1, 5), 5) == (x, None, ends)
    assert padding.repad_hidden_states(x, None, 1, 5) is x


def test_more_keys_than_queries_are_refused() -> None:
    x = torch.randn(2, 5, 2)
    with pytest.raises(UnsupportedModelError, match="1 tokens and 5 keys"):
        padding.unpad_input(x[:, :1], (x, x), torch.ones(2, 5), 1)


def test_flash_attention_takes_the_batch_that_padding_leaves_and_no_packed_row() -> None:
    x = torch.randn(2, 5, 2, 4)
    given = (None, None, 5, 5, 0.0, None, True, (2, 0))
    found = softmax.flash_attn_varlen_func(x, x, x, *given)
    torch.testing.assert_close(
        found, softmax.flash_attn_func(x, x, x, causal=True, window_size=(2, 0))
    )
    ends = torch.tensor([0, 5, 10])
    with pytest.raises(UnsupportedModelError, match="attention_mask for the padding"):
        softmax.flash_attn_varlen_func(x[0], x[0], x[0], ends, ends, 5, 5)


UTILS = """
def unpad_hidden_states(hidden_states, cu_seqlens, attention_mask, q_len):
    raise RuntimeError("the number of tokens is that of the mask")


def repad_hidden_states(hidden_states, indices, batch_size, q_len):
    raise RuntimeError("the number of tokens is that of the mask")
"""
LAYER = """
import torch
from torch import nn
from fla.utils import repad_hidden_states, unpad_hidden_states


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x, attention_mask):
        batch, length, _ = x.shape
        x, indices, ends = unpad_hidden_states(x, None, attention_mask, length)
        assert ends is None
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = (torch.tril(q @ k.mT) @ v).transpose(1, 2).flatten(2)
        return repad_hidden_states(y, indices, batch_size=batch, q_len=length)
"""


@pytest.fixture
def layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.nn.Module]:
    """A layer of linear attention that removes padding by functions with names of fla's."""
    names = ("fla", "fla.utils", "fla.layers")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "fla"
    package.mkdir()
    for file, text in (("__init__", ""), ("utils", UTILS), ("layers", LAYER)):
        (package / f"{file}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(0)
    yield importlib.import_module("fla.layers").Layer().eval()
    for name in names:
        sys.modules.pop(name, None)


def test_a_layer_with_a_mask_converts_and_its_rows_are_as_alone(
    layer: torch.nn.Module, tmp_path: Path
) -> None:
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[0, :5], mask[1, 9:] = 0, 0
    manifest = linexport.convert(
        layer, args=(torch.randn(3, 12, 8), mask), output=tmp_path / "out", bench=False
    )
    assert manifest.status == "ok"
    assert manifest.fused == {"LinearAttention": 1}
    assert not manifest.kernels  # the library, too, moves rows in PyTorch
    x = np.random.default_rng(1).standard_normal((2, 21, 8)).astype(np.float32)
    valid = np.ones((2, 21), bool)
    valid[0, :4], valid[1, 13:] = False, False
    (found,) = manifest.load().run(x, valid.astype(np.int64)).values()
    weight, bias = (w.detach().double().numpy() for w in layer.qkv.parameters())
    for row, one, y in zip(x, valid, found, strict=True):
        assert not y[~one].any()
        q, k, v = np.split((row[one].astype(np.float64) @ weight.T + bias).reshape(-1, 6, 4), 3, 1)
        scores = np.einsum("thd,shd->hts", q, k)
        expected = np.einsum("hts,shd->thd", np.tril(scores), v).reshape(-1, 8)
        assert np.abs(y[one] - expected).max() <= 1e-5 * np.abs(expected).max()


def test_what_the_layer_gives_on_padded_rows_is_what_the_artifact_was_compared_with(
    layer: torch.nn.Module,
) -> None:
    x, mask = torch.randn(2, 6, 8), torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    linexport.inspect(layer, (x, mask))
    with torch.no_grad():
        found: Tensor = layer(x, mask)
        for row, one, y in zip(x, mask.bool(), found, strict=True):
            ones = torch.ones(1, int(one.sum()))
            torch.testing.assert_close(y[one][None], layer(row[one][None], ones))
