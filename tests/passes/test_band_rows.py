"""Sums over the last tokens with weights of pairs stream, with linear attention to the rest too."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linexport.graph.states import find_states
from linexport.token_flow import classify
from tests.support.pieces import in_pieces, largest_error, random_pieces, rewritten

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8
LIMIT = 3e-6

Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def distances(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[-2])
    return places[:, None] - places


def near(x: Tensor, w: int) -> Tensor:
    d = distances(x)
    return (d >= 0) & (d < w)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / 3


def features(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def multiplied_by_a_mask(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    return (scores(q, k) * near(q, w)) @ v


def filled(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    return scores(q, k).masked_fill(~near(q, w), 0.0) @ v


def between_triangles(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    return scores(q, k).tanh().tril().triu(1 - w) @ v


def of_earlier_tokens(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    d = distances(q)
    return (scores(q, k).square() * ((d > 0) & (d < w))) @ v


def einsums(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    weights = torch.einsum("btd,bsd->bts", q, k).sigmoid() * near(q, w)
    return torch.einsum("bts,bsd->btd", weights, v)


def faded(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    weights = torch.where(near(q, w), 0.9 ** distances(q).clamp(min=0), 0.0)
    return (scores(q, k) * weights) @ v


def heads(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    q, k, v = (x.unflatten(2, (2, -1)).transpose(1, 2) for x in (q, k, v))
    return ((scores(q, k).tanh() * near(q, w)) @ v).transpose(1, 2).flatten(2)


def heads_in_the_batch(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    q, k, v = (x.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    found = torch.bmm(torch.bmm(q, k.mT).masked_fill(~near(q, w), -1e9).exp(), v)
    return found.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)


def shares(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    weights = scores(q, k).exp() * near(q, w)
    return weights @ v / weights.sum(-1, keepdim=True)


def sigmoid_shares(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    weights = scores(q, k).sigmoid() * near(q, w)
    return weights @ v / weights.sum(-1, keepdim=True)


def shares_below_the_largest(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    masked = scores(q, k).masked_fill(~near(q, w), -1e9)
    weights = (masked - masked.amax(-1, keepdim=True)).exp()
    return weights @ v / weights.sum(-1, keepdim=True)


def squares_of_shares(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    return scores(q, k).masked_fill(~near(q, w), float("-inf")).softmax(-1).square() @ v


def logarithm(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    return scores(q, k).masked_fill(~near(q, w), float("-inf")).logsumexp(-1, keepdim=True) * v


def matrix_of_a_mean(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    seen = near(q, w).to(v.dtype)
    return (seen / seen.sum(-1, keepdim=True)) @ v


def matrix_of_a_sum(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    ones = torch.ones(q.shape[1], q.shape[1], dtype=v.dtype)
    return (ones.tril() - ones.tril(-w)) @ v


def between_two_triangles(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    weights = scores(q, k).tanh()
    return (weights.tril() - weights.tril(-w)) @ v


def between_two_selections(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    weights, d = scores(q, k).tanh(), distances(q)
    late = torch.where(d >= w, weights, 0.0)
    return (-late + weights * (d >= 0)) @ v


def looked_up(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    table = torch.linspace(1, -1, w, dtype=v.dtype)
    return torch.where(near(q, w), table[distances(q).clamp(0, w - 1)], 0.0) @ v


def unfolded(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    return F.pad(v, (0, 0, w - 1, 0)).unfold(1, w, 1).mean(-1)


def difference_of_sums(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    sums = v.cumsum(1)
    return (sums - F.pad(sums, (0, 0, w, 0))[:, : v.shape[1]]) / w


BANDS: list[Attend] = [
    *(multiplied_by_a_mask, filled, between_triangles, of_earlier_tokens, einsums, faded),
    *(heads, heads_in_the_batch, shares, sigmoid_shares, shares_below_the_largest),
    *(squares_of_shares, logarithm),
    *(between_two_triangles, between_two_selections, looked_up),
    *(matrix_of_a_mean, matrix_of_a_sum, unfolded, difference_of_sums),
]


class Layered(nn.Module):
    """Linear attention, which tells the token axis; then a sum of attentions to few tokens."""

    def __init__(self, attends: list[Attend], window: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.second = (nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.attends, self.window = attends, window

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        weights = (q.sigmoid() @ k.sigmoid().mT).tril()
        x = x + (weights @ v) / weights.sum(-1, keepdim=True)
        q, k, v = self.second(x).chunk(3, -1)
        for attend in self.attends:
            x = x + attend(q, k, v, self.window) / len(self.attends)
        return x


def check_stream(module: nn.Module, model: onnx.ModelProto, length: int, longest: int) -> None:
    """Compare pieces, single tokens and the whole with the module in float64."""
    x = torch.randn(2, length, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        expected = module.double()(x).numpy()
    module.float()
    given = x.float().numpy()
    for pieces in (random_pieces(length, longest, 0), [1] * length, [length]):
        assert largest_error(in_pieces(model, given, pieces), expected) < LIMIT


def rows(model: onnx.ModelProto) -> set[tuple[int | str, ...]]:
    """The shapes of the states that are rows of the past."""
    return {s.shape for s in find_states(model) if s.past.startswith("past_inputs")}


@pytest.mark.parametrize("window", [3, 64])
def test_every_notation_of_a_band_keeps_the_rows_of_its_window(window: int) -> None:
    module = Layered(BANDS, window)
    model = rewritten(module, torch.randn(2, 23, WIDTH))
    assert not classify(model, find_states(model)).mixing
    kept = {size for shape in rows(model) for size in shape[1:]} - {WIDTH, WIDTH // 2, 2}
    assert kept - {2} <= {window - 1, window}
    check_stream(module, model, 2 * window + 20, window + 5)
    check_stream(module, model, max(window // 2, 2), 3)


def test_sums_of_one_band_share_the_rows_of_its_columns() -> None:
    model = rewritten(Layered([sigmoid_shares], 6), torch.randn(2, 23, WIDTH))
    real = ("batch", 5)
    assert rows(model) == {("batch", WIDTH, 5), ("batch", 5, WIDTH), real}


def far(q: Tensor, k: Tensor, w: int) -> Tensor:
    return (features(q) @ features(k).mT) * (distances(q) >= w)


def added(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    weights = scores(q, k).masked_fill(~near(q, w), float("-inf")).softmax(-1)
    rest = far(q, k, w)
    return weights @ v + rest @ v / (rest.sum(-1, keepdim=True) + 1e-6)


def under_one_denominator(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    weights = scores(q, k).exp() * near(q, w) + far(q, k, w)
    return weights @ v / weights.sum(-1, keepdim=True)


def chosen(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    rest = features(q) @ features(k).mT
    weights = torch.where(distances(q) < w, scores(q, k).exp(), rest).tril()
    return (weights / weights.sum(-1, keepdim=True)) @ v


def below_the_largest(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    """The hybrid attention of LoLCATs, of two heads."""
    q, k, v = (x.unflatten(2, (2, -1)).transpose(1, 2) for x in (q, k, v))
    masked = scores(q, k).masked_fill(~near(q, w), -1e9)
    weights = 0.4 * torch.where(near(q, w), (masked - masked.amax(-1, keepdim=True)).exp(), 0.0)
    q, k = (torch.cat([x.softmax(-1), (-x).softmax(-1)], -1) for x in (q, k))
    rest = (q @ k.mT).masked_fill(distances(q) < w, 0.0)
    total = weights.sum(-1, keepdim=True) + rest.sum(-1, keepdim=True)
    return ((weights @ v + rest @ v) / total).transpose(1, 2).flatten(2)


def with_delayed_sums(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    weights = scores(q, k).exp() * near(q, w)
    keys, values = (F.pad(x, (0, 0, w, 0))[:, : q.shape[1]] for x in (features(k), v))
    state = (keys[..., None] * values[..., None, :]).cumsum(1)
    rest = (features(q)[..., None, :] @ state)[..., 0, :]
    below = (features(q) * keys.cumsum(1)).sum(-1, keepdim=True)
    return (weights @ v + rest) / (weights.sum(-1, keepdim=True) + below)


FAR = [added, under_one_denominator, chosen, below_the_largest, with_delayed_sums]


@pytest.mark.parametrize("window", [3, 64])
def test_a_state_takes_the_tokens_that_leave_the_window(window: int) -> None:
    module = Layered(FAR, window)
    model = rewritten(module, torch.randn(2, 23, WIDTH))
    states = find_states(model)
    assert not classify(model, states).mixing
    assert not [s for s in states if s.growing_axis is not None]
    check_stream(module, model, 2 * window + 20, window + 5)
    check_stream(module, model, max(window // 2, 2), 3)


def of_earlier_tokens_by_softmax(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    """The first token sees none, so that its softmax is over all tokens, the later ones as well."""
    d = distances(q)
    masked = scores(q, k).masked_fill(~((d > 0) & (d < w)), -1e9)
    weights = (masked - masked.amax(-1, keepdim=True)).exp()
    return weights @ v / weights.sum(-1, keepdim=True)


def both_ways(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    return (scores(q, k).tanh() * (distances(q).abs() < w)) @ v


def by_values(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    seen = q[..., :1] > k[:, None, :, 0]
    return (scores(q, k).tanh() * seen * (distances(q) >= 0)) @ v


def divided_by_all(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    weights = scores(q, k).exp() * near(q, w)
    return weights @ v / weights.sum((1, 2), keepdim=True)


@pytest.mark.parametrize(
    "attend", [of_earlier_tokens_by_softmax, both_ways, by_values, divided_by_all]
)
def test_what_sees_more_than_the_last_tokens_gets_no_rows_and_is_named(attend: Attend) -> None:
    module = Layered([attend], 5)
    model = rewritten(module, torch.randn(2, 23, WIDTH))
    assert not rows(model)
    assert classify(model, find_states(model)).mixing
    x = torch.randn(2, 31, WIDTH)
    with torch.no_grad():
        expected = module.double()(x.double()).numpy()
    assert largest_error(in_pieces(model, x.numpy(), []), expected) < LIMIT
