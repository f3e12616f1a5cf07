"""The low-rank form, and forms with the linear layer after the activation folded in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linexport
from linexport.errors import UsageError
from linexport.linearization import feed_forward
from linexport.linearization.replace import with_forms
from linexport.manifest.linearization_records import FeedForwardTimes
from linexport.models import DigitClassifier
from linexport.models.classifier import DigitClassifierConfig
from linexport.models.feed_forward import (
    KernelFeedForward,
    LowRankFeedForward,
    linearize_feed_forward,
    low_rank,
)
from linexport.models.feed_forward.following import Following
from linexport.models.feed_forward.problem import checked_problem

pytestmark = pytest.mark.usefixtures("one_thread")

WIDE = 64


def block(width: int = 8, out: int = 4, hidden: int = WIDE, scale: float = 0.5) -> nn.Sequential:
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, out)).eval()
    with torch.no_grad():
        found[0].weight *= scale
    return found


def inputs(width: int = 8, count: int = 600) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1))


def run(module: nn.Module, data: Tensor, form: Any = "low-rank", **options: Any) -> Any:
    return linexport.linearize(module, data, feed_forward=form, map="keep", bench=False, **options)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_the_layer_is_its_formula(rank: int) -> None:
    g = torch.Generator().manual_seed(0)
    plan = low_rank.LowRankPlan(
        rank, 0, 0.0,
        *(torch.randn(s, generator=g, dtype=torch.float64).numpy()
          for s in ((rank, 8), (3, 8), (3, (rank + 1) * (rank + 2) // 2))),
    )  # fmt: skip
    problem = checked_problem(block()[0], "gelu", inputs(), 0)
    layer = plan.layer(problem, folded=False)
    x = inputs()[:6].double()
    centred = x - torch.from_numpy(problem.centre)
    z = np.pad(centred.numpy() @ plan.projection.T, ((0, 0), (0, 1)), constant_values=1.0)
    phi = torch.tensor(
        [[row[i] * row[j] for i in range(rank + 1) for j in range(i, rank + 1)] for row in z]
    )
    want = centred @ torch.from_numpy(plan.linear).mT + phi @ torch.from_numpy(plan.products).mT
    for shape in ((6,), (2, 3), (1, 2, 3)):
        got = layer(x.float().reshape(*shape, 8))
        torch.testing.assert_close(got.double().reshape(6, 3), want, atol=2e-5, rtol=1e-5)


def test_the_effect_of_float32_is_measured() -> None:
    """Not zero, and nearer to float32's than to a fault's."""
    linear, _, following = block()
    _, report = linearize_feed_forward(
        linear, "gelu", inputs(), form="low-rank", following=following
    )
    assert 1e-9 < report.rounding < 1e-5


def test_a_quadratic_in_two_directions_is_found_exactly() -> None:
    problem = checked_problem(block()[0], "gelu", inputs(), 0)
    u = np.zeros((2, 8))
    u[0, 1] = u[1, 5] = 1.0
    x = problem.rows[:, :-1]
    z = np.pad(x @ u.T, ((0, 0), (0, 1)), constant_values=1.0)
    want = (z[:, :1] * z[:, 1:2]) * 3 + x @ np.arange(8.0)[:, None] - 2
    features = low_rank._features(problem.rows, u)
    found = features @ low_rank._ridge(features, want)
    assert np.linalg.norm(found - want) < 1e-3 * np.linalg.norm(want)


def test_it_costs_less_and_errs_less_the_higher_its_rank() -> None:
    module = block()
    problem = checked_problem(module[0], "gelu", inputs(), 0)
    after = Following.of(module[2].weight, module[2].bias)
    before = low_rank.cost_before(problem, after)
    plans = list(low_rank._plans(problem, after, before - 1))
    assert before == 8 * WIDE + WIDE * 4 and all(p.multiply_adds < before for p in plans)
    errors = [p.error for p in plans]
    assert len(plans) >= 5 and errors[-1] < errors[0] / 2
    rank, d, out = plans[2].rank, 8, 4
    products = (rank + 1) * (rank + 2) // 2
    assert plans[2].multiply_adds == (rank + out) * d + (2 + out) * products
    chosen = low_rank.fit(problem, after, errors[2] * 1.0001, before)
    assert chosen.rank <= plans[2].rank
    with pytest.raises(UsageError, match=r"comes within target_error 1e-12: rank \d+, of [\d,]+"):
        low_rank.fit(problem, after, 1e-12, before)
    cheaper = low_rank.fit(problem, after, None, plans[2].multiply_adds)
    assert cheaper.rank in (1, 2, 3) and cheaper.error == min(errors[:3])


def test_where_no_rank_costs_less_it_is_refused() -> None:
    with pytest.raises(UsageError, match=r"No low-rank form costs less than the 64 multiply-adds"):
        linearize_feed_forward(nn.Linear(16, 4), "gelu", inputs(16), "low-rank")


def test_linearize_replaces_both_layers_by_one_that_pays() -> None:
    module, data = block(), inputs()
    found = run(module, data)
    (row,) = found.report.feed_forward
    assert row.folded and row.form == "low-rank" and row.cost_factor < 1
    assert found.report.status == "ok"
    assert "1 feed-forward layer (0, with the layer after it) costs 0." in found.report.verdict
    fresh = torch.randn(500, 8, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        want, got = module(fresh), found.module(fresh)
    assert float((got - want).norm() / want.norm()) < 1.5 * row.relative_error + 1e-3 < 0.3


@pytest.mark.parametrize("fast", [3, 0])
def test_the_rank_is_chosen_by_measured_time(fast: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def times(before: Any, layer: Any, x: Tensor, threads: int) -> tuple[FeedForwardTimes, ...]:
        tried.append(layer.config["rank"])
        return (FeedForwardTimes(1, 1.0, 0.9 if tried[-1] <= fast else 1.1),)

    monkeypatch.setattr(feed_forward, "feed_forward_times", times)
    config = feed_forward.FeedForwardConfig({"*": "low-rank"}, None, 10**7, 0, True, 1)
    module, data = block(), inputs()
    forms = with_forms(module, {})
    (row,) = feed_forward.replace_feed_forward(forms, [(data,)], config, lambda line: None)
    assert tried == sorted(set(tried), reverse=True) and tried[0] > 3
    # None pays: that of least error stays, and the verdict is no.
    assert row.rank == (tried[-1] if fast else tried[0]) and row.pays == bool(fast)
    assert tried[-1] <= fast if fast else tried[-1] <= 2


def test_the_least_squares_form_is_folded_where_that_is_cheaper(tmp_path: Any) -> None:
    module, data = block(width=3), inputs(3)
    layer, report = linearize_feed_forward(module[0], "gelu", data)
    folded, other = linearize_feed_forward(module[0], "gelu", data, following=module[2])
    assert not report.folded and other.folded and isinstance(folded, KernelFeedForward)
    x = data[:20]
    torch.testing.assert_close(folded(x), module[2](layer(x)), atol=1e-5, rtol=1e-4)
    assert other.multiply_adds < other.multiply_adds_before == 3 * WIDE + 4 * WIDE
    found = run(module, data, "least-squares")
    assert found.report.feed_forward[0].folded and found.report.status == "ok"
    found.save(tmp_path / "folded.pt2")
    loaded = torch.export.load(tmp_path / "folded.pt2").module()
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), found.module(x), atol=1e-5, rtol=1e-4)


class Used(nn.Module):
    """What comes out of the activation goes elsewhere as well, or through dropout."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.inner, self.twice, self.drop = block(), twice, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.nn.functional.gelu(self.inner[0](x)))
        y: Tensor = self.inner[2](h)
        return y + h[..., :4] if self.twice else y


@pytest.mark.parametrize("twice", [True, False])
def test_a_layer_is_folded_only_if_it_alone_is_given_the_output(twice: bool) -> None:
    module, data = Used(twice).eval(), inputs()
    form = "least-squares" if twice else "low-rank"
    found = run(module, data, form)
    (row,) = found.report.feed_forward
    assert row.folded is not twice
    with torch.no_grad():
        error = (found.module(data) - module(data)).norm() / module(data).norm()
    assert 0 < error < 0.3


def test_a_stack_keeps_its_folded_layers(tmp_path: Any) -> None:
    torch.manual_seed(0)
    sizes = {"dim": 8, "num_heads": 2, "layers": 1, "hidden_dim": 96, "attention": "softmax"}
    module = DigitClassifier(DigitClassifierConfig(**sizes)).eval()  # type: ignore[arg-type]
    pixels = torch.rand(64, 16, 4, generator=torch.Generator().manual_seed(0))
    found = run(module, pixels)
    inner = found.module.blocks[0].feed_forward
    assert isinstance(inner[0], LowRankFeedForward) and isinstance(inner[2], nn.Identity)
    found.save(tmp_path / "linear.pt")
    loaded = linexport.models.load(tmp_path / "linear.pt")
    with torch.no_grad():
        assert torch.equal(loaded(pixels), found.module(pixels))
    name = "blocks.0.feed_forward.0"
    config = {**loaded.config["kernel_feed_forward"][name], "in_features": 9}
    with pytest.raises(UsageError, match="9 to 8 features; expected 8 to 8"):
        DigitClassifier(
            DigitClassifierConfig(**sizes, kernel_feed_forward={name: config})  # type: ignore[arg-type]
        )
