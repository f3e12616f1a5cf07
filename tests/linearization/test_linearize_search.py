"""The search for linear forms: bounds, costs, choices, its record on disk and its time."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import linexport
from linexport.errors import UsageError
from linexport.linearization import auto, search_candidates, search_record
from linexport.linearization.confidence import upper_bound
from linexport.linearization.find_softmax import find_sites
from linexport.linearization.forms import Forms, KernelAttention
from linexport.linearization.layer_costs import CallShape, measure
from linexport.linearization.replace import with_forms
from linexport.linearization.search_candidates import front
from linexport.linearization.task_loss import TaskLoss, TaskRows
from linexport.linearization.window_forms import WindowForm
from linexport.manifest.linearization_records import AttentionCost, AttentionTime
from linexport.models import LanguageModel, feature_maps
from linexport.models.language_model import LanguageModelConfig
from linexport.models.softmax_calls import Attending
from linexport.report.linear_search import search_texts
from linexport.report.linearization import linearization_page
from linexport.sources import load_model
from tests.linearization.test_linearize_windows import SITE, turned

Cli = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("one_thread")


# Bounds


def binomial(count: int, share: float, most: int) -> float:
    """P(at most ``most`` of ``count``), summed from the definition."""
    terms = (math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(most + 1))
    return math.fsum(terms)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 80), st.data())
def test_the_bound_of_counted_rows_is_that_of_clopper_and_pearson(count: int, data: Any) -> None:
    worse = data.draw(st.integers(0, count - 1))
    differences = torch.zeros(count, dtype=torch.float64)
    differences[:worse] = 1
    bound = upper_bound(differences, True)
    assert bound > worse / count
    # No row is better: its exact lower bound is 0, and half of the risk is of the others.
    assert binomial(count, bound, worse) == pytest.approx(0.025, rel=1e-6)


def test_students_quantile_is_that_of_tables() -> None:
    values = torch.tensor([-1.0, 1.0] * 5, dtype=torch.float64)
    spread = float(values.std()) / 10**0.5
    assert upper_bound(values, False) == pytest.approx(1.833113 * spread, rel=1e-5)
    assert upper_bound(values, False, 0.99) == pytest.approx(2.821438 * spread, rel=1e-5)
    assert upper_bound(values[:1], False) == math.inf
    assert upper_bound(torch.tensor([0.0, math.nan]), False) == math.inf


@pytest.mark.parametrize("count", [24, 128])
def test_bounds_hold_as_often_as_they_say(count: int) -> None:
    generator = np.random.default_rng(0)
    skewed = generator.lognormal(0.0, 0.5, (400, count)) - 1.0
    mean = math.exp(0.125) - 1
    held = [upper_bound(torch.from_numpy(row), False) >= mean for row in skewed]
    assert np.mean(held) >= 0.91
    answers = generator.choice([-1.0, 0.0, 1.0], p=[0.02, 0.93, 0.05], size=(400, count))
    held = [upper_bound(torch.from_numpy(row), True) >= 0.03 for row in answers]
    assert np.mean(held) >= 0.95


# Candidates and costs


def test_only_what_nothing_cheaper_is_as_good_as_is_tried() -> None:
    errors = {"a": (8, 0.5), "b": (8, 0.4), "c": (16, 0.45), "d": (32, 0.3), "e": (64, 0.1)}
    assert front(errors) == ["b", "e"]
    assert front({"one": (4.0, 0.2)}) == ["one"]
    assert front({}) == []


def test_a_call_alone_is_measured_with_its_states() -> None:
    shape = CallShape.of(replace(SITE, head_dim=8, value_dim=8, scale=8**-0.5))
    form = WindowForm(replace(SITE, value_dim=8), feature_maps.make("elu1", 8), 4, 2)
    found = measure(shape, form, [32, 64], 1)
    assert [row.length for row in found.times] == [32, 64]
    assert all(row.milliseconds > 0 and not row.computed for row in found.times)
    rows, numbers = 2 * (8 + 8), 4
    far = 2 * 8 * (8 + 1)
    assert found.state_bytes == numbers * ((4 + 2) * rows + 4 + 1 + far)
    assert found.bytes_at(10) == found.bytes_at(10_000)


def test_softmax_at_lengths_beyond_memory_or_patience_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from linexport.linearization import layer_costs

    monkeypatch.setattr(layer_costs, "_fits", lambda shape, form, length: length <= 128)
    found = measure(CallShape.of(SITE), None, [64, 128, 1024], 1)
    assert [row.computed for row in found.times] == [False, False, True]
    one, two, last = (row.milliseconds for row in found.times)
    assert 8 * two <= last * 1.001 and last <= 64 * two * 1.001
    assert found.bytes_at(100) == 4 * 100 * 2 * (8 + 5) and one > 0


# A search, with costs that are given: those above are measured


class Layers(nn.Module):
    """Two layers of causal attention, one much sharper than the other, and classes."""

    def __init__(self, sharp: float = 6.0, every_token: bool = False) -> None:
        super().__init__()
        self.every_token = every_token
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 64) for _ in range(2))
        self.outs = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 5)
        self.sharpness = (0.5, sharp)

    def forward(self, x: Tensor) -> Tensor:
        for layer, out, sharp in zip(self.layers, self.outs, self.sharpness, strict=True):
            q, k, v, _ = layer(x).unflatten(-1, (8, 8)).transpose(1, 2).split(2, 1)
            o = F.scaled_dot_product_attention(sharp * turned(q), turned(k), v, is_causal=True)
            x = x + out(o.transpose(1, 2).flatten(2))
        return self.head(x if self.every_token else x.mean(1))


ROWS = torch.randn(160, 40, 16, generator=torch.Generator().manual_seed(3))
NAMES = ["elu1", "window8+elu1"]
COSTS = {"softmax": (4.0, 4096.0), "elu1": (1.0, 64.0), "window8+elu1": (2.0, 128.0)}


def given_cost(shape: CallShape, form: Any, lengths: Any, threads: int) -> AttentionCost:
    base = COSTS["softmax" if form is None else form.name]
    times = tuple(AttentionTime(n, base[0] * n / lengths[0]) for n in lengths)
    return AttentionCost(times, 0 if form is None else int(base[1]), 128 if form is None else 0)


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Costs that are given, and the names of forms in the order they were measured."""
    seen = list[str]()

    def counted(shape: CallShape, form: Any, lengths: Any, threads: int) -> AttentionCost:
        seen.append("softmax" if form is None else form.name)
        return given_cost(shape, form, lengths, threads)

    monkeypatch.setattr(search_candidates, "measure", counted)
    yield seen


def run(module: nn.Module, data: Tensor = ROWS, minutes: float = 1.0, **options: Any) -> Any:
    wish = linexport.AutoSearch(minutes, options.pop("labels", None), options.pop("record", None))
    given = {"map": NAMES, "max_drop": 0.3, "lengths": [40], "bench": False, **options}
    return linexport.linearize(module, data, auto=wish, **given)


def labels_of(module: nn.Module, data: Tensor) -> Tensor:
    with torch.no_grad():
        return module(data).argmax(-1)


def test_the_result_is_confirmed_on_rows_the_search_never_saw(costs: list[str]) -> None:
    module = Layers().eval()
    found = run(module, labels=labels_of(module, ROWS), max_drop=0.4)
    report, search = found.report, found.report.search
    assert search.fit_rows + search.search_rows + search.confirm_rows == len(ROWS)
    parts = auto.parts_of((ROWS,), None, 0)
    confirm = parts.confirm.rows[0]
    seen = {row.numpy().tobytes() for part in (parts.fit, parts.search) for row in part.rows[0]}
    assert not seen & {row.numpy().tobytes() for row in confirm}
    with torch.no_grad():
        wrong = (found.module(confirm).argmax(-1) != labels_of(module, confirm)).double()
    assert search.drop == pytest.approx(float(wrong.mean()))
    assert report.metric.drop == pytest.approx(search.drop)
    assert search.bound == pytest.approx(upper_bound(wrong, True)) and search.bound <= 0.4
    assert report.status == "ok" and report.verdict.count(". ") == 2
    assert any(row.map for row in report.layers)
    text = linearization_page(report)
    assert "The search" in text and text.count("<svg") >= 2


def test_a_layer_that_cannot_be_followed_keeps_its_softmax(costs: list[str]) -> None:
    """Nearly one-hot attention to far keys; the other layer attends to all keys alike."""
    found = run(Layers(sharp=400.0).eval(), map=["elu1"], max_drop=0.06, minutes=0.3)
    first, second = found.report.layers
    assert first.map == "elu1" and second.map is None
    assert second.reason == "the search keeps its softmax"
    chosen = next(point for point in found.report.search.points if point.chosen)
    assert chosen.forms == ("elu1", "softmax")


def test_fine_tuning_brings_a_choice_within_the_drop(costs: list[str]) -> None:
    """All layers are linear only after it, which stops when that is enough."""
    module = Layers(every_token=True).eval()
    search = run(module, map=["elu1"], max_drop=0.175, minutes=0.5).report.search
    softmax, *_, raw, tuned = search.points
    assert softmax.steps == raw.steps == 0 < tuned.steps and tuned.chosen
    assert raw.forms == tuned.forms == ("elu1", "elu1")
    assert tuned.bound <= 0.9 * 0.175 < raw.bound and search.bound <= 0.175
    assert search.seconds < 30


@pytest.mark.parametrize("window", [None, 4])
def test_gains_of_queries_are_in_the_projections_of_a_rebuilt_model(window: int | None) -> None:
    torch.manual_seed(0)
    config = LanguageModelConfig(dim=16, num_heads=2, layers=1, attention="softmax")
    model, ids = LanguageModel(config).eval(), torch.randint(256, (3, 20))
    (site,) = find_sites(model, [(ids,)])
    feature_map = feature_maps.make("elu1", 8)
    form = (
        WindowForm(site, feature_map, window, 1) if window else KernelAttention(site, feature_map)
    )
    with torch.no_grad():
        form.gain.copy_(torch.tensor([0.5, 3.0]))
        with Attending(Forms({0: form}).answer):
            expected = model(ids)[0]
        torch.testing.assert_close(with_forms(model, {0: form})(ids)[0], expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_linexport_is_saved_with_what_its_forms_learned(
    name: str, costs: list[str], tmp_path: Path
) -> None:
    """Its layers have no gains of queries: these are in the projections."""
    torch.manual_seed(0)
    config = LanguageModelConfig(dim=16, num_heads=2, layers=2, attention="softmax")
    model, ids = LanguageModel(config).eval(), torch.randint(256, (64, 40))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    found = run(model, ids, map=[name], max_drop=5.0, minutes=0.2)
    assert all(row.map == name for row in found.report.layers)
    found.save(tmp_path / "linear.pt")
    with torch.no_grad():
        got = load_model(tmp_path / "linear.pt").module(ids)
        torch.testing.assert_close(got, found.module(ids))
        with_softmax = model(ids)
    assert (got[0] - with_softmax[0]).abs().max() > 1e-4


def test_where_nothing_is_within_the_drop_the_answer_is_no(costs: list[str]) -> None:
    found = run(Layers(sharp=400.0).eval(), max_drop=1e-7, minutes=0.1)
    assert found.report.status == "declined" and not found.replaced
    assert found.report.verdict.startswith("No: no layer can be replaced within a drop of 1e-07")
    torch.testing.assert_close(found.module(ROWS), Layers(sharp=400.0).eval()(ROWS))


def test_forms_that_save_nothing_are_not_tried(
    costs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COSTS, "elu1", (5.0, 1e6))
    search = run(Layers().eval(), minutes=0.2).report.search
    assert {name for point in search.points for name in point.forms} <= {"softmax", NAMES[1]}


def test_an_interrupted_search_goes_on_where_it_was(
    costs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(Layers().eval(), minutes=1.0).report.search
    measured = list(costs)
    costs.clear()
    record = tmp_path / "record"
    from linexport.linearization import search as searching

    count, true = itertools.count(), searching.FormSearch._loss

    def stopped(self: Any, choice: Any) -> float:
        if next(count) == 7:
            raise KeyboardInterrupt
        return true(self, choice)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(searching.FormSearch, "_loss", stopped)
        run(Layers().eval(), record=record)
    kept = json.loads((record / "search.json").read_text())
    assert kept["transferred"] and 0 < len(kept["losses"]) < whole.measured
    again = run(Layers().eval(), record=record).report.search
    assert costs == measured and again.resumed == len(kept["losses"]) + len(measured)
    assert [p.forms for p in again.points] == [p.forms for p in whole.points]
    assert again.drop == pytest.approx(whole.drop, abs=0.01)
    third = run(Layers().eval(), record=record).report.search
    assert third.measured == again.measured and costs == measured
    assert third.drop == pytest.approx(again.drop, abs=1e-9)


def test_a_second_run_of_a_search_is_refused(costs: list[str], tmp_path: Path) -> None:
    """In another process or thread, for as long as the first one lasts."""
    record = tmp_path / "record"
    key = {"data": "0"}
    with search_record.opened(record, key) as file:
        refused = pytest.raises(UsageError, match=r"Another run of this search is at work in")
        with refused, search_record.opened(record, key):
            pass
        file.save()
    with search_record.opened(record, key) as file:
        assert file.kept.key == key
    empty = tmp_path / "empty"
    with search_record.opened(empty, key):
        assert empty.is_dir()
    assert not empty.exists()
    missing = tmp_path / "none" / "record"
    with pytest.raises(UsageError, match="cannot be written"), search_record.opened(missing, key):
        pass


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"module": Layers(5.0)}, "data"),
        ({"data": ROWS[:150]}, "data differ"),
        ({"seed": 1}, "seed differ"),
    ],
)
def test_a_record_of_another_search_is_refused(
    costs: list[str], tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    run(Layers().eval(), record=tmp_path / "r", minutes=0.05)
    given = {"module": Layers(), **change}
    if "module" in change:
        with torch.no_grad():
            given["module"].head.weight += 1
        words = "model differ"
    with pytest.raises(UsageError, match=words):
        run(given.pop("module").eval(), record=tmp_path / "r", minutes=0.05, **given)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"key": {}, "seconds": "much"}'])
def test_a_damaged_record_is_an_error_of_one_sentence(
    costs: list[str], tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "search.json").write_bytes(content)
    with pytest.raises(UsageError, match="cannot be read as the record of a search"):
        run(Layers().eval(), record=tmp_path)


def test_the_time_budget_holds(costs: list[str]) -> None:
    search = run(Layers(sharp=400.0).eval(), max_drop=1e-7, minutes=0.05).report.search
    assert search.seconds <= 3.0 + 3.0


def test_a_look_that_would_end_late_is_not_begun(
    costs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only losses of rows take time on, a quarter of the budget for all rows."""
    now, losses_of = [0.0], TaskLoss.of

    def timed(self: TaskLoss, *given: Any, **options: Any) -> Tensor:
        now[0] += 0.75 * len(given[2]) / (len(ROWS) // 4)
        return losses_of(self, *given, **options)

    monkeypatch.setattr(TaskLoss, "of", timed)
    monkeypatch.setattr(search_record, "time", SimpleNamespace(monotonic=lambda: now[0]))
    search = run(Layers().eval(), minutes=0.05).report.search
    assert search.exhausted or search.seconds < 3.0
    assert 1.0 < search.seconds <= 1.05 * 3.0


def test_rows_that_are_equal_are_taken_once() -> None:
    data = torch.cat([ROWS, ROWS[:7]])
    parts = auto.parts_of((data,), torch.arange(len(data)) % 3, 0)
    assert parts.repeated == 7
    assert len(parts.fit) + len(parts.search) + len(parts.confirm) == len(ROWS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_drop": None}, "expected a number above 0"),
        ({"minutes": 0.0}, "expected a number above 0"),
        ({"distil": 3}, "leave .*features"),
        ({"evaluate": len}, "leave .*features"),
        ({"map": {"*": "elu1"}}, "candidates alone"),
        ({"map": "elu2"}, "Did you mean"),
        ({"map": "windowed+elu1"}, "window"),
        ({"labels": torch.rand(160)}, "expected one class"),
        ({"labels": torch.arange(3)}, "expected one class"),
        ({"labels": torch.full((160,), 9)}, "expected a class for each"),
        ({"data": ROWS[:20]}, "expected at least 32"),
        ({"labels": torch.arange(160) % 5, "max_drop": 0.01}, "Give at least 1,6.. rows"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run(Layers().eval(), **options)


def test_rows_of_several_lengths_count_by_their_tokens() -> None:
    """The mean over rows is the bits per token that ``linearize`` states without a search."""
    from linexport.linearization.default_score import default_score
    from linexport.linearization.task_loss import find_task

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(16, 16)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.table(ids) @ self.table.weight.T

    ids = torch.randint(16, (40, 9))
    mask = (torch.arange(9) < torch.arange(40)[:, None] % 5 + 4).long()
    data, model = TaskRows((ids, mask)), Tokens()
    task = find_task(model, [SITE], data)
    metric = default_score(model, [SITE], [(ids, mask)])
    assert metric is not None
    assert task.score(task.of(model, model, data)) == pytest.approx(metric.of(model), rel=1e-9)


def test_a_page_without_a_search_has_no_part_of_it() -> None:
    assert search_texts(None)["search"] == ""
