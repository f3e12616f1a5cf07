"""linexport.linearize with feed-forward layers: which are found, what becomes of them."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linexport
from linexport.errors import LinexportError, UnsupportedModelError, UsageError
from linexport.linearization.verdict import Measurements, verdict
from linexport.manifest.linearization_records import (
    FeedForwardRow,
    FeedForwardTimes,
    FormCosts,
    FormTimes,
)
from linexport.models import DigitClassifier, LanguageModel
from linexport.models.classifier import DigitClassifierConfig
from linexport.models.feed_forward import KernelFeedForward
from linexport.models.language_model import LanguageModelConfig
from linexport.report.linearization import linearization_page

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"dim": 8, "num_heads": 2, "hidden_dim": 12, "attention": "softmax"}
PIXELS = torch.rand(64, 16, 4, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(256, (24, 12), generator=torch.Generator().manual_seed(0))
FIRST = "blocks.0.feed_forward.0"


def digits(layers: int = 2) -> DigitClassifier:
    torch.manual_seed(0)
    return DigitClassifier(DigitClassifierConfig(layers=layers, **SIZES)).eval()


def run(module: nn.Module, data: Any = PIXELS, form: Any = "least-squares", **options: Any) -> Any:
    options = {"map": "taylor2", "bench": False, "feed_forward": form, **options}
    return linexport.linearize(module, data, **options)


def shared_activation() -> nn.Sequential:
    torch.manual_seed(0)
    act = nn.Tanh()
    return nn.Sequential(nn.Linear(6, 8), act, nn.Linear(8, 8), act, nn.Linear(8, 3)).eval()


@pytest.mark.parametrize("form", ["least-squares", "bernstein", "taylor"])
def test_each_form_is_reported_and_comes_near(form: str) -> None:
    module = digits(1)
    with torch.no_grad():  # the power series needs small |w|
        module.blocks[0].feed_forward[0].weight.mul_(0.2)
    found = run(module, form=form, target_error=0.05, map="keep")
    (row,) = found.report.feed_forward
    assert row.form == form and row.activation == "gelu" and row.reason is None
    # With the layer after it, 12 to 8, folded in.
    assert row.folded and row.multiply_adds_before == 8 * 12 + 12 * 8
    assert row.error < 2 * 0.05
    assert 0 < found.report.output_error < 0.2
    assert isinstance(found.module.blocks[0].feed_forward[0], KernelFeedForward)
    assert type(module.blocks[0].feed_forward[0]) is nn.Linear
    json.dumps(asdict(found.report))


def test_a_checkpoint_has_the_layers_and_is_linearised_again(tmp_path: Path) -> None:
    path = tmp_path / "linear.pt"
    found = run(digits(), form={FIRST: "least-squares"}, map={"blocks.0.*": "taylor2"})
    rows = found.report.feed_forward
    assert [row.form for row in rows] == ["least-squares", None]
    assert rows[1].reason == "left as it is, as requested"
    found.save(path)
    loaded = linexport.models.load(path)
    with torch.no_grad():
        assert torch.equal(loaded(PIXELS), found.module(PIXELS))
    again = run(loaded).module
    assert torch.equal(
        again.blocks[0].feed_forward[0].weight, loaded.blocks[0].feed_forward[0].weight
    )
    assert sorted(again.config["kernel_feed_forward"]) == [FIRST, "blocks.1.feed_forward.0"]


@pytest.mark.slow
def test_a_checkpoint_converts(tmp_path: Path) -> None:
    found = run(digits(1))
    found.save(tmp_path / "linear.pt")
    report = linexport.convert(str(tmp_path / "linear.pt"), tmp_path / "artifact", bench=False)
    assert report.status == "ok"


def test_the_language_model_still_streams() -> None:
    torch.manual_seed(0)
    module = LanguageModel(LanguageModelConfig(layers=1, **SIZES)).eval()
    linear = run(module, TOKENS, distil=4).module
    with torch.no_grad():
        first, state = linear.step(TOKENS[:, :5], linear.initial_state(24))
        rest, _ = linear.step(TOKENS[:, 5:], state)
        whole = linear(TOKENS)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, atol=2e-5, rtol=1e-4)


def test_a_module_without_attention_becomes_a_program(tmp_path: Path) -> None:
    module, data = shared_activation(), torch.randn(200, 6)
    found = run(module, data, target_error=1e-4)
    assert [row.name for row in found.report.feed_forward] == ["0", "2"]
    found.save(tmp_path / "linear.pt2")
    loaded = torch.export.load(tmp_path / "linear.pt2").module()
    with torch.no_grad():
        torch.testing.assert_close(loaded(data), found.module(data))
        assert (loaded(data) - module(data)).square().mean() < 1e-3
    assert found.report.layers == ()


def test_an_activation_without_a_form_is_left_with_the_reason() -> None:
    layers = OrderedDict(a=nn.Linear(4, 4), b=nn.Sigmoid(), c=nn.Linear(4, 4), d=nn.ReLU())
    found = run(nn.Sequential(layers).eval(), torch.randn(80, 4)).report.feed_forward
    assert [row.name for row in found] == ["a", "c"]
    assert "its activation is sigmoid; forms are of gelu" in found[0].reason
    assert found[1].reason is None and found[1].activation == "relu"


def test_the_cost_is_told_first_and_refused_above_the_limit() -> None:
    notes: list[str] = []

    class Told(linexport.system.progress.Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    with pytest.raises(UsageError, match=rf"{FIRST}: .*max_cost"):
        run(digits(1), max_cost=100, progress=Told())
    assert len(notes) == 1 and notes[0].startswith(f"{FIRST}\n")


class Called(nn.Module):
    """Activations as attributes and as functions; one layer twice; one output used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")
        self.first, self.gate, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        g = self.gate(h)
        h = F.gelu(self.first(h), approximate="tanh") + F.silu(g) * g
        h = torch.relu(self.first(h))
        return self.last(h).tanh()


CALLED = {
    "layer.linear1": "gelu",
    "first": "gelu-tanh",
    "gate": "silu",
    "first#2": "relu",
    "last": "tanh",
}


def test_activations_are_found_wherever_they_are_called(tmp_path: Path) -> None:
    module, data = Called().eval(), torch.randn(60, 5, 8)
    (only,) = run(module, data, {"gate": "least-squares"}, map="keep").report.feed_forward[2:3]
    assert only.form == "least-squares"
    found = run(module, data, target_error=1e-3)
    assert {row.name: row.activation for row in found.report.feed_forward} == CALLED
    found.save(tmp_path / "linear.pt2")
    loaded = torch.export.load(tmp_path / "linear.pt2").module()
    with torch.no_grad():
        torch.testing.assert_close(loaded(data), found.module(data), atol=1e-5, rtol=1e-4)
        changed = found.module(data) - module(data)
    assert 0 < changed.norm() / module(data).norm() < 0.2


def test_what_is_not_replaced_is_the_original() -> None:
    module, data = Called().eval(), torch.randn(40, 5, 8)
    found = run(module, data, {"last": "least-squares"}, map="keep", target_error=1e-4)
    seen: list[Tensor] = []
    module.last.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    found.module.inner.last.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        module(data), found.module(data)
    torch.testing.assert_close(seen[0], seen[1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"form": "cubic"}, "Unknown form 'cubic'"),
        ({"form": "bernstein"}, "needs a target_error"),
        ({"form": {"block.*": "taylor"}}, "No layer is called 'block"),
        ({"form": None, "target_error": 0.1}, "name a form"),
        ({"form": "keep"}, "No feed-forward layer was replaced"),
    ],
)
def test_wishes_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(LinexportError, match=words):
        run(digits(1), **options)


def row(*factors: float, cost: int = 50) -> FeedForwardRow:
    times = tuple(FeedForwardTimes(rows, 1.0, f) for rows, f in zip((1, 64), factors, strict=False))
    return FeedForwardRow(
        name="layer", multiply_adds=cost, multiply_adds_before=100, relative_error=0.1,
        times=times or None,
    )  # fmt: skip


def test_time_decides_and_multiply_adds_only_where_it_is_not_known() -> None:
    def judged(*rows: FeedForwardRow, forced: bool = False) -> tuple[str, str]:
        return verdict(Measurements(feed_forward=rows, forced=forced))

    status, text = judged(row(3.0, 0.5))
    assert status == "ok" and "0.5 times the time for 64 rows at once, 3 for 1" in text
    status, text = judged(row(3.0, 1.5))
    assert status == "declined"
    assert text.startswith("No: no feed-forward layer is faster than the one it replaces")
    assert judged(row(3.0, 1.5), forced=True)[0] == "ok"
    assert judged(row(3.0, 1.5), row(3.0, 0.9))[0] == "ok"
    assert judged(row(cost=150))[1].startswith("No: no feed-forward layer costs less than")
    assert judged(row(cost=99))[0] == "ok" == judged(row(0.9, cost=150))[0]


def test_a_no_and_a_gain_do_not_contradict_each_other() -> None:
    slow = row(3.0, 1.5)
    at_last = tuple(FormTimes(n, 1.0, ms, 1.0, 9.0) for n, ms in ((64, 2.0), (4096, 0.5)))
    gains = FormCosts(latency=at_last, crossover=4096, over="rows")
    # Only this layer was replaced: what the whole model gains, it gains.
    status, text = verdict(Measurements(feed_forward=[slow], costs=gains))
    assert status == "ok" and "faster from 4,096 rows on, 2.0 times at 4,096" in text
    at_first = FormCosts(latency=at_last[::-1], over="rows")
    status, text = verdict(Measurements(feed_forward=[row(3.0, 0.9)], costs=at_first))
    assert status == "declined"
    assert "No: the linear form is faster at 4,096 rows, but not at 64, where it takes 2 ms" in text


@pytest.mark.slow
def test_layers_are_timed_and_rows_take_the_place_of_tokens() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1, 512), nn.GELU(), nn.Linear(512, 1)).eval()
    options = {"target_error": 0.1, "bench": True, "lengths": [2048], "threads": 1}
    report = run(module, torch.rand(200, 1), "chebyshev", map="keep", **options).report
    (found,) = report.feed_forward
    assert [one.rows for one in found.times] == [1, 64, 1024] and found.pays
    assert min(min(one.before_ms, one.after_ms) for one in found.times) > 0
    assert [one.length for one in report.latency] == [2048] and report.lengths_left_out is None
    text = linearization_page(report)
    assert report.over == "rows" and "Time by rows at once" in text
    assert "token" not in text and "attention" not in text


class WrittenOut(nn.Module):
    """GELU as a formula, which is not found."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        t = self.layer(x)
        return 0.5 * t * (1 + torch.tanh(0.8 * (t + 0.0447 * t**3)))


def test_an_activation_that_is_written_out_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="No feed-forward layer found in"):
        run(WrittenOut().eval(), torch.randn(20, 5, 8))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("blocks.0.feed_forward.2", {}, "expected configs by the names"),
        ("nowhere", {}, "'nowhere'"),
        (FIRST, {"in_features": 9}, "9 to 12 features; expected 8 to 12"),
        (FIRST, {"width": 1}, "unknown key 'width'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    name: str, change: dict[str, Any], words: str
) -> None:
    config = {"in_features": 8, "out_features": 12, "maps": [], **change}
    layers = {name: config}
    with pytest.raises(UsageError, match=words):
        DigitClassifier(DigitClassifierConfig(layers=1, kernel_feed_forward=layers, **SIZES))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    monkeypatch.chdir(tmp_path)
    linexport.models.save(digits(1), "softmax.pt")
    np.savez("rows.npz", PIXELS.numpy())
    arguments = ("linearize", "softmax.pt", "--data", "rows.npz", "--map", "keep", "--no-bench")
    arguments += ("--feed-forward", "least-squares", "-o", "linear.pt")
    done = cli(*arguments, "--html", "page.html")
    assert done.code == 3 and "times the multiply-adds of before" in " ".join(done.out.split())
    assert FIRST in done.err and "before" in done.err
    text = Path("page.html").read_text()
    assert FIRST in text and "least-squares" in text and "blocks.0.attention" in text
    refused = cli(*arguments, "--max-cost", 10, "--overwrite")
    assert refused.code == 2 and "Traceback" not in refused.err
