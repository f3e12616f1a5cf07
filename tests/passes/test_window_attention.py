"""Softmax over a window beside linear attention, in notations of others, is one node in blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linexport.graph.states import find_states
from linexport.token_flow import classify
from tests.support.near_far import near_far
from tests.support.pieces import in_pieces, largest_error, random_pieces, rewritten

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, WIDTH, W = 4, 8, 16

Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor], Tensor]


def distances(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[-2])
    return places[:, None] - places


def near(x: Tensor) -> Tensor:
    d = distances(x)
    return (d >= 0) & (d < W)


def lolcats(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """The quadratic form of LoLCATs: two masks, a maximum, a learned share of the window."""
    length = q.shape[2]
    causal, far = torch.ones(length, length).tril(), torch.ones(length, length).tril(-W)
    window, far = (causal - far)[None, None], far[None, None]

    def phi(x: Tensor) -> Tensor:
        x = torch.einsum("hdf,bhld->bhlf", m.map, x)
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1).clamp(min=1e-12)

    a = torch.einsum("bhmd,bhnd->bhmn", q, k) * (k.shape[-1] ** -0.5)
    a = a.masked_fill(~window.bool(), -1e10)
    a = m.share.sigmoid() * torch.exp(a - torch.amax(a, dim=-1, keepdim=True))
    linear = torch.einsum("bhmd,bhnd->bhmn", phi(q), phi(k)).masked_fill(~far.bool(), 0)
    total = a.sum(-1, keepdim=True) + linear.sum(-1, keepdim=True)
    return torch.einsum("bhmn,bhnd->bhmd", a + linear, v) / total


def two_masks(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    exact = torch.where(near(q), (q @ k.mT / WIDTH**0.5).exp(), 0.0)
    far = torch.where(distances(q) >= W, (F.elu(q) + 1) @ (F.elu(k) + 1).mT, 0.0)
    weights = exact + far
    return (weights @ v) / weights.sum(-1, keepdim=True)


def based(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Outputs of a Taylor map over all tokens and of softmax over the window, added."""
    scores = q @ k.mT / WIDTH**0.5
    exact = scores.masked_fill(~near(q), float("-inf")).softmax(-1) @ v
    taylor = (1 + scores + scores.square() / 2).tril()
    return exact + (taylor @ v) / (taylor.sum(-1, keepdim=True) + 1e-6)


def liger(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Half gated linear attention over all tokens, half softmax over the window."""
    gate = (F.logsigmoid(m.gate(x)) / 16).unflatten(-1, (HEADS, -1)).transpose(1, 2).cumsum(2)
    fade = (gate[:, :, :, None] - gate[:, :, None]).clamp(max=0).exp()
    phi_q, phi_k = q.softmax(-1), k.softmax(-1)
    weights = torch.einsum("bhtd,bhsd,bhtsd->bhts", phi_q, phi_k, fade).tril()
    exact = F.scaled_dot_product_attention(q, k, v, attn_mask=near(q))
    return 0.5 * (weights @ v) + 0.5 * exact


def gated(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Both outputs mixed by a gate of each token, with keys that are shared by all heads."""
    k, v = k[:, :1], v[:, :1]
    exact = ((q @ k.mT / 3) + torch.where(near(q), 0.0, -1e9)).softmax(-1) @ v
    weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
    far = weights @ v / weights.sum(-1, keepdim=True)
    g = m.mix(x).sigmoid().transpose(1, 2)[..., None]
    return g * exact + (1 - g) * far


def one_head(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Products of a batch of matrices, a denominator without its axis, masks that multiply."""
    q, k, v = (y[:, 1] for y in (q, k, v))
    weights = torch.bmm(q, k.mT).mul(0.1).exp() * near(q)
    rest = (q.sigmoid() @ k.sigmoid().mT) * (distances(q) >= W)
    total = weights.sum(-1) + rest.sum(-1)
    found = (torch.bmm(weights, v) + rest @ v) / total[..., None]
    return found[:, None].expand(-1, HEADS, -1, -1)


def stabilized(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """One denominator: the maximum that exponentials are stabilised by scales the far part, too."""
    scores = (q @ k.mT / WIDTH**0.5).masked_fill(~near(q), float("-inf"))
    top = scores.amax(-1, keepdim=True)
    far = torch.where(distances(q) >= W, (F.elu(q) + 1) @ (F.elu(k) + 1).mT, 0.0)
    weights = (scores - top).exp() + far * (-top).exp()
    return (weights @ v) / weights.sum(-1, keepdim=True)


def logarithms(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Means of both parts, joined by the logarithms of their sums."""
    scores = (q @ k.mT / WIDTH**0.5).masked_fill(~near(q), float("-inf"))
    far = torch.where(distances(q) >= W, (F.elu(q) + 1) @ (F.elu(k) + 1).mT, 0.0)
    total = far.sum(-1, keepdim=True) + 1e-6
    share = (scores.logsumexp(-1, keepdim=True) - total.log()).sigmoid()
    return share * (scores.softmax(-1) @ v) + (1 - share) * (far @ v) / total


NOTATIONS: list[Attend] = [
    stabilized,
    logarithms,
    lolcats,
    two_masks,
    based,
    liger,
    gated,
    one_head,
]


class Layer(nn.Module):
    """Attention with rotary positions, whose keys and values two heads share."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.attend, full = attend, HEADS * WIDTH
        self.q, self.o, self.gate = (nn.Linear(full, full) for _ in range(3))
        self.k, self.v = nn.Linear(full, full // 2), nn.Linear(full, full // 2)
        self.mix = nn.Linear(full, HEADS)
        self.share = nn.Parameter(torch.randn(1, HEADS, 1, 1))
        self.map = nn.Parameter(torch.randn(HEADS, WIDTH, WIDTH))

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            f(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        k, v = (y[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for y in (k, v))
        return turned(q), turned(k), v

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.attend(self, *self.projected(x), x).transpose(1, 2).flatten(2))


def turned(x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[-2])[:, None] * 0.3 ** torch.arange(x.shape[-1] // 2)
    first, second = x.chunk(2, -1)
    sine, cosine = angle.sin(), angle.cos()
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)


def made(attend: Attend) -> tuple[Layer, onnx.ModelProto]:
    module = Layer(attend)
    return module, rewritten(module, torch.randn(2, 50, HEADS * WIDTH))


def windows(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "WindowAttention"]


@pytest.mark.parametrize("attend", NOTATIONS)
def test_a_notation_is_one_node_that_streams_and_no_value_has_all_pairs(attend: Attend) -> None:
    module, model = made(attend)
    assert len(windows(model)) == 1
    states = find_states(model)
    assert not classify(model, states).mixing
    assert not [s for s in states if s.growing_axis is not None]
    inferred = onnx.shape_inference.infer_shapes(model)
    for info in inferred.graph.value_info:
        sizes = [d.dim_param for d in info.type.tensor_type.shape.dim]
        assert sum("seq" in size for size in sizes) < 2, info.name
    x = torch.randn(2, 300, HEADS * WIDTH)
    with torch.no_grad():
        expected = module.double()(x.double()).numpy()
    for cuts in ([300], [1] * 40 + [7, 100, 153], random_pieces(300, 60, 0)):
        assert largest_error(in_pieces(model, x.numpy(), cuts), expected) < 3e-6


def test_4200_streamed_tokens_are_the_formula() -> None:
    module, model = made(two_masks)
    x = torch.randn(1, 4200, HEADS * WIDTH)
    cuts = [1, 15, 16, 17, 1, *random_pieces(3000, 700, 1)]
    found = in_pieces(model, x.numpy(), cuts)
    np.testing.assert_allclose(found, in_pieces(model, x.numpy(), [4200]), atol=2e-6)
    module.double()
    with torch.no_grad():
        q, k, v = (y[0].numpy() for y in module.projected(x.double()))
        for t in (0, 15, 16, 17, 31, 2000, 4199):
            weights = near_row(q[:, t], k[:, : t + 1])
            mean = (weights[..., None] * v[:, : t + 1]).sum(1) / weights.sum(1, keepdims=True)
            output = module.o(torch.from_numpy(mean).flatten()).numpy()
            np.testing.assert_allclose(found[0, t], output, atol=2e-6)


def near_row(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Weights of one query of each head, for keys up to its own."""
    exact = np.exp((k * q[:, None]).sum(-1) / np.sqrt(WIDTH))
    phi_q, phi_k = (np.where(y > 0, y + 1, np.exp(np.minimum(y, 0))) for y in (q, k))
    weights = (phi_k * phi_q[:, None]).sum(-1)
    weights[:, -W:] = exact[:, -W:]
    return weights


def test_the_formula_of_the_rows_is_that_of_all_pairs() -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(1, HEADS, 30, WIDTH)) for _ in range(3))
    phis = tuple(np.where(y > 0, y + 1, np.exp(np.minimum(y, 0))) for y in (q, k))
    weights = near_row(q[0, :, -1], k[0])
    mean = (weights[..., None] * v[0]).sum(1) / weights.sum(1, keepdims=True)
    expected = near_far(q, k, v, (phis[0], phis[1]), W)[0, :, -1]
    np.testing.assert_allclose(mean, expected)


def capped(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    scores = 5 * torch.tanh(q @ k.mT / 5)
    return scores.masked_fill(~near(q), float("-inf")).softmax(-1) @ v + all_tokens(q, k, v)


def squared(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(~near(q), float("-inf"))
    return scores.softmax(-1).square() @ v + all_tokens(q, k, v)


def of_earlier_tokens(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    d = distances(q)
    weights = (q @ k.mT / 3).exp() * ((d > 0) & (d < W))
    return weights @ v + all_tokens(q, k, v)


def faded(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    fade = torch.where(near(q), 0.9 ** distances(q).clamp(min=0), 0.0)
    return ((q @ k.mT / 3).exp() * fade) @ v + all_tokens(q, k, v)


def all_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q.sigmoid() @ k.sigmoid().mT).tril()
    return weights @ v / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("attend", [capped, squared, of_earlier_tokens, faded])
def test_other_sums_over_a_window_are_left_and_the_reason_is_logged(
    attend: Attend, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="linexport.passes.window_attention"):
        module, model = made(attend)
    assert not windows(model)
    reasons = [r.message for r in caplog.records if r.name == "linexport.passes.window_attention"]
    assert any("left as it is" in r or "not made a Window" in r for r in reasons)
    x = torch.randn(1, 90, HEADS * WIDTH)
    with torch.no_grad():
        expected = module.double()(x.double()).numpy()
    assert largest_error(in_pieces(model, x.numpy(), [1, 1, 20, 68]), expected) < 3e-6
