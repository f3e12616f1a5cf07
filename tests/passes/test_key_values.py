"""Softmax attention beside linear attention, as users write both: keys and values are states.

Each is compared with the original by plain ONNX Runtime, at lengths never traced, in pieces and in
single tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import linexport
from linexport.manifest import Manifest
from linexport.sources.factory import load_module
from linexport.targets.cpu_fusion import with_programs
from tests.support.independent import check_independently

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, HEADS = 16, 4
WINDOW = 5
LOWEST = float("-inf")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Linear(nn.Module):
    """Linear attention with the feature map elu + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        scores = ((F.elu(q) + 1) @ (F.elu(k) + 1).transpose(1, 2)).tril()
        return scores @ v / (scores.sum(-1, keepdim=True) + 1e-6)


class Softmax(nn.Module):
    """Softmax attention, (B, H, T, d) inside unless ``behind``: then (B, T, H, d)."""

    def __init__(self, attend: Attend, behind: bool = False) -> None:
        super().__init__()
        self.project, self.attend = nn.Linear(WIDTH, 3 * WIDTH), attend
        self.places = (2, 2) if behind else (1, 2)

    def forward(self, x: Tensor) -> Tensor:
        parts = (y.unflatten(2, (HEADS, -1)) for y in self.project(x).chunk(3, -1))
        q, k, v = (y.transpose(*self.places) for y in parts)
        return self.attend(q, k, v).transpose(*self.places).flatten(2)


class Stored(nn.Module):
    """One head, whose mask is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("mask", torch.ones(5000, 5000).tril().triu(1 - WINDOW).bool())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        mask = self.mask[: x.shape[1], : x.shape[1]]
        return (q @ k.transpose(1, 2) / 4).masked_fill(~mask, LOWEST).softmax(-1) @ v


class Multihead(nn.Module):
    """The module of PyTorch, whose heads are in the axis of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = ~(distances(x.shape[1]) < WINDOW)
        return self.inner(x, x, x, attn_mask=mask | later(x.shape[1]))[0]


class CausalMultihead(Multihead):
    """The same of all tokens before, which PyTorch computes by another way."""

    def forward(self, x: Tensor) -> Tensor:
        mask = later(x.shape[1])
        return self.inner(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


class Hybrid(nn.Module):
    """Linear attention, and softmax attention behind it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Linear(), *layers])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def distances(length: int) -> Tensor:
    places = torch.arange(length)
    return places[:, None] - places


def later(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def seeing(seen: Callable[[Tensor], Tensor]) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = seen(distances(q.shape[2]))
        return scores(q, k).masked_fill(~mask, LOWEST).softmax(-1) @ v

    return attend


in_window = seeing(lambda d: (d >= 0) & (d < WINDOW))


def rotated(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[2])[:, None] / 10.0 ** torch.arange(x.shape[3] // 2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def rotary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return in_window(rotated(q), rotated(k), v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def scaled_dot_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    d = distances(q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(d >= 0) & (d < WINDOW))


def added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.full((q.shape[2], q.shape[2]), LOWEST).triu(1)
    return (scores(q, k) + mask).softmax(-1) @ v


def difference_of_triangles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ones = torch.ones(q.shape[2], q.shape[2])
    return (scores(q, k) + (1 - ones.tril() + ones.tril(-WINDOW)) * -1e9).softmax(-1) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    d = distances(q.shape[2])
    hidden = (d < 0) | (d >= WINDOW)
    return (5 * torch.tanh(scores(q, k) / 5)).masked_fill(hidden, -1e10).softmax(-1) @ v


def capped_behind_its_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    masked = scores(q, k).masked_fill(later(q.shape[2]), -1e9)
    return (5 * torch.tanh(masked / 5)).softmax(-1) @ v


def of_shared_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return in_window(q, k[:, :1], v[:, :1])


def of_grouped_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return in_window(q, *(x[:, :2].repeat_interleave(2, 1) for x in (k, v)))


def turned(x: Tensor) -> Tensor:
    """Return x turned by the positions, with one row of angles for all of the batch."""
    angles = torch.arange(x.shape[2])[None, :, None] / 10.0 ** torch.arange(2)
    cos, sin = (f(torch.cat([angles, angles], -1))[:, None] for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., 2:], x[..., :2]], -1) * sin


def by_llama(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return by_gqa(turned(q), turned(k), v)


def by_gqa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True)


def by_expand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def repeated(x: Tensor) -> Tensor:
        batch, heads, length, width = x.shape
        copies = x[:, :, None].expand(batch, heads, 2, length, width)
        return copies.reshape(batch, 2 * heads, length, width)

    k, v = repeated(rotated(k[:, :2])), repeated(v[:, :2])
    return F.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)


def capped_by_interleave(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :2].repeat_interleave(2, 1) for x in (k, v))
    capped = 5 * torch.tanh(scores(q, k) / 5)
    return capped.masked_fill(later(q.shape[2]), LOWEST).softmax(-1) @ v


def by_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :2].transpose(1, 2).repeat_interleave(2, 2).transpose(1, 2) for x in (k, v))
    return scores(q, k).masked_fill(later(q.shape[2]), LOWEST).softmax(-1) @ v


def of_heads_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    d = distances(q.shape[1])
    weights = torch.einsum("bthd,bshd->bhts", q, k).masked_fill(~((d >= 0) & (d < 5)), LOWEST)
    return torch.einsum("bhts,bshd->bthd", weights.softmax(-1), v)


def with_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    biased = scores(q, k) - 0.1 * distances(q.shape[2])
    return biased.masked_fill(later(q.shape[2]), LOWEST).softmax(-1) @ v


def first_tokens_always(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    d = distances(q.shape[2])
    seen = (d >= 0) & ((d < WINDOW) | (torch.arange(q.shape[2]) < 2))
    return scores(q, k).masked_fill(~seen, LOWEST).softmax(-1) @ v


def converted(module: nn.Module, folder: Path) -> Manifest:
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    source = load_module(
        (module.eval(), (torch.randn(2, 16, WIDTH),), shapes), "tests.models:hybrid"
    )
    return linexport.convert(source, folder, bench=False, threads=1)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path, Manifest]:
    """Attention to a window and to all tokens before: the module, its artifact and manifest."""
    module, folder = Hybrid(Softmax(in_window), Softmax(causal)), tmp_path_factory.mktemp("hybrid")
    return module, folder / "artifact", converted(module, folder / "artifact")


def test_a_window_and_all_rows_beside_linear_attention(
    hybrid: tuple[nn.Module, Path, Manifest],
) -> None:
    module, folder, manifest = hybrid
    assert manifest.streaming and manifest.streaming.passed
    rows = {s.past: (s.shape, s.grows) for s in manifest.states if s.op == "KeyValueCache"}
    all_rows = ("batch", HEADS, "past", 4)
    assert rows["past_key_0"] == rows["past_value_0"] == (all_rows, 2)
    ring = {s.past: s.shape for s in manifest.states if s.op == "WindowAttention"}
    kept = ("batch", WINDOW, HEADS * 4)
    assert ring["past_window_key_1"] == ring["past_window_value_1"] == kept
    check_independently(folder, module, WIDTH, lengths=(1, 2, 7, 130))
    model = linexport.load(folder)
    x = np.random.default_rng(0).standard_normal((1, 30, WIDTH)).astype(np.float32)
    whole, stream = model.run(x)["output"], model.stream(history=8)
    stream.step(x[:, :20])
    stream.rewind(6)
    np.testing.assert_allclose(stream.step(x[:, 14:])["output"], whole[:, 14:], atol=1e-5)


def test_rows_of_no_token_are_not_seen(hybrid: tuple[nn.Module, Path, Manifest]) -> None:
    """Sequences of different lengths share a call: the shorter one's rows begin with padding."""
    model = linexport.load(hybrid[1])
    x = np.random.default_rng(1).standard_normal((2, 12, WIDTH)).astype(np.float32)
    states = []
    for row, length in enumerate((3, 8)):
        state = model.initial_state(1)
        states.append(model.call({"x": x[row : row + 1, :length]}, state)[1])
    for name, held in model.states.items():
        if held.growing_axis is not None:
            pads = [(0, 0)] * len(held.shape)
            pads[held.growing_axis] = (5, 0)
            states[0][name] = np.pad(states[0][name], pads, constant_values=0)
    together = {name: np.concatenate([s[name] for s in states]) for name in states[0]}
    found, _ = model.call({"x": np.stack([x[0, 3:7], x[1, 8:12]])}, together)
    for row, (start, end) in enumerate(((3, 7), (8, 12))):
        whole = model.run(x[row : row + 1, :end])["output"][0, start:]
        np.testing.assert_allclose(found["output"][row], whole, atol=1e-5)


def by_one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :1].expand(-1, HEADS, -1, -1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def window_by_gqa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    d = distances(q.shape[2])
    seen = (d >= 0) & (d < WINDOW)
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], attn_mask=seen, enable_gqa=True)


def window_by_one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return in_window(q, *(x[:, :1].expand(-1, HEADS, -1, -1) for x in (k, v)))


GROUPED = by_llama, by_gqa, by_expand, capped_by_interleave, by_tokens, by_one_head


@pytest.mark.parametrize(
    "heads, attend", [(2, of_grouped_keys), (2, window_by_gqa), (1, window_by_one_head)]
)
def test_a_window_of_keys_that_heads_share_is_kept_once(
    heads: int, attend: Attend, tmp_path: Path
) -> None:
    module = Hybrid(Softmax(attend))
    manifest = converted(module, tmp_path / "artifact")
    assert manifest.streaming and manifest.streaming.passed
    rows = {s.shape for s in manifest.states if "window_key" in s.past or "window_value" in s.past}
    assert rows == {("batch", WINDOW, heads * 4)}
    check_independently(tmp_path / "artifact", module, WIDTH, lengths=(1, 2, 7, 130))


def cached_attentions(folder: Path) -> int:
    """Return how many nodes of the CPU library compute softmax attention over a cache."""
    nodes = with_programs(onnx.load(folder / "model.onnx")).graph.node
    return sum(node.op_type == "CachedAttention" for node in nodes)


def test_multihead_attention_is_one_node(tmp_path: Path) -> None:
    module = Hybrid(CausalMultihead())
    assert converted(module, tmp_path / "artifact").streaming.passed
    assert cached_attentions(tmp_path / "artifact") == 1
    check_independently(tmp_path / "artifact", module, WIDTH, lengths=(1, 2, 7, 130))


@pytest.mark.parametrize("attend", GROUPED, ids=lambda attend: attend.__name__)
def test_keys_that_heads_share_are_kept_once(attend: Attend, tmp_path: Path) -> None:
    module = Hybrid(Softmax(attend))
    manifest = converted(module, tmp_path / "artifact")
    assert manifest.streaming and manifest.streaming.passed
    rows = {s.shape for s in manifest.states if s.past in ("past_key_0", "past_value_0")}
    assert rows == {("batch", 1 if attend is by_one_head else 2, "past", 4)}
    assert cached_attentions(tmp_path / "artifact") == (attend is not capped_by_interleave)
    check_independently(tmp_path / "artifact", module, WIDTH, lengths=(1, 2, 7, 130))


STREAMS: dict[str, nn.Module] = {
    "rotary": Softmax(rotary),
    "scaled_dot_product": Softmax(scaled_dot_product),
    "added": Softmax(added),
    "difference_of_triangles": Softmax(difference_of_triangles),
    "capped": Softmax(capped),
    "of_shared_keys": Softmax(of_shared_keys),
    "of_grouped_keys": Softmax(of_grouped_keys),
    "of_heads_behind": Softmax(of_heads_behind, behind=True),
    "stored": Stored(),
    "multihead": Multihead(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_every_formulation_streams(name: str, tmp_path: Path) -> None:
    module = Hybrid(STREAMS[name])
    manifest = converted(module, tmp_path / "artifact")
    assert manifest.streaming and manifest.streaming.passed
    ops = {"KeyValueCache", "WindowAttention"}
    grows = {s.grows for s in manifest.states if s.op in ops and s.past != "past_mask"}
    assert grows == ({2} if name == "added" else {None})
    check_independently(tmp_path / "artifact", module, WIDTH, lengths=(1, 2, 7, 130))


@pytest.mark.slow
@pytest.mark.parametrize(
    "attend",
    [
        capped_behind_its_mask,
        with_bias,
        first_tokens_always,
        seeing(lambda d: (d >= 0) & (d % 2 == 0)),
        seeing(lambda d: (d >= -1) & (d < WINDOW)),
        lambda q, k, v: scores(q, k).softmax(-1) @ v,
    ],
    ids=["capped", "biased", "first tokens", "every second", "one ahead", "all"],
)
def test_other_softmax_attention_stays_right_without_a_state(
    attend: Attend, tmp_path: Path
) -> None:
    module = Hybrid(Softmax(attend))
    manifest = converted(module, tmp_path / "artifact")
    assert not manifest.states
    check_independently(tmp_path / "artifact", module, WIDTH, lengths=(1, 2, 7, 130))
