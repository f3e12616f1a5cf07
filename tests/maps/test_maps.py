"""Comparing feature maps: what is measured, what is drawn, what the command line says."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import linexport
from linexport import models
from linexport.errors import UsageError
from linexport.manifest import dumps
from linexport.manifest.map_records import MapComparison, MapRow
from linexport.maps import accuracy, attention_samples, catalogue, compare_maps, output_files
from linexport.models import feature_maps
from linexport.models.feature_maps import draws
from linexport.report import figures, map_charts
from linexport.report import map_comparison as report
from linexport.sources.loaded_model import LoadedModel, Source

pytestmark = pytest.mark.usefixtures("one_thread")

Cli = Callable[..., Any]
MAPS = ["elu1", "favor+", "taylor2", "trigonometric", "softmax_time"]


@pytest.fixture(scope="module")
def result() -> MapComparison:
    """A small comparison with a map of every kind, one that is refused among them."""
    return compare_maps(8, 96, [16, 32], maps=MAPS, threads=1)


def rows(result: MapComparison, name: str) -> list[MapRow]:
    return [r for r in result.rows if r.map == name]


def with_errors(result: MapComparison, errors: list[float]) -> MapComparison:
    """The comparison with other errors of the rows of "trigonometric"."""
    given = iter(errors)
    changed = [
        replace(r, output_error=next(given)) if r.map == "trigonometric" else r for r in result.rows
    ]
    return replace(result, rows=tuple(changed))


# What is measured


def test_each_map_is_measured_at_each_number_of_features(result: MapComparison) -> None:
    assert [(r.map, r.features) for r in result.rows] == [
        *(("elu1", 8), ("favor+", 16), ("favor+", 32), ("taylor2", 45)),
        *(("trigonometric", 16), ("trigonometric", 32), ("softmax_time", None)),
    ]
    for row in result.rows:
        if row.map == "softmax_time":
            assert "bidirectional only" in row.reason
            continue
        assert row.reason is None
        assert row.us_per_token > 0 and row.bytes_per_token > 0
        assert row.state_bytes == 4 * 4 * row.features * 9
        assert row.output_error_worst >= row.output_error > 0


def test_the_output_error_is_that_of_attention_by_its_definition(result: MapComparison) -> None:
    """One token after another, for elu1, on the same samples."""
    given = attention_samples.random_samples(8, 96, 0)
    squares, sizes, uniform = 0.0, 0.0, 0.0
    for q, k, v in zip(given.queries, given.keys, given.values, strict=True):
        phi_q, phi_k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k))
        for t in range(96):
            weights = np.exp(k[: t + 1] @ q[t] / math.sqrt(8))
            want = weights @ v[: t + 1] / weights.sum()
            scores = phi_k[: t + 1] @ phi_q[t]
            squares += ((scores @ v[: t + 1] / scores.sum() - want) ** 2).sum()
            uniform += ((v[: t + 1].mean(0) - want) ** 2).sum()
            sizes += (want**2).sum()
    assert rows(result, "elu1")[0].output_error == pytest.approx(math.sqrt(squares / sizes))
    assert result.uniform_error == pytest.approx(math.sqrt(uniform / sizes))


def test_kernel_errors_stand_beside_their_prediction(result: MapComparison) -> None:
    for row in rows(result, "elu1") + rows(result, "taylor2"):
        assert row.kernel_error < 1e-12 and row.kernel_error_predicted == 0
    for row in rows(result, "trigonometric"):
        assert 0.4 < row.kernel_error / row.kernel_error_predicted < 2
    few, many = (r.kernel_error_predicted for r in rows(result, "favor+"))
    assert few == pytest.approx(math.sqrt(2) * many)


def test_denominators_show_what_cancels(result: MapComparison) -> None:
    for row in rows(result, "elu1") + rows(result, "favor+"):
        assert row.cancellation == pytest.approx(1) and row.negative_denominators == 0
    for row in rows(result, "trigonometric"):
        assert row.cancellation < 0.5


def test_exponential_maps_are_judged_without_overflow() -> None:
    given = attention_samples.random_samples(8, 32, 0)
    large = attention_samples.HeadSamples(
        100 * given.queries,
        100 * given.keys,
        given.values,
        given.keys[0],
        given.keys[0],
        True,
        4,
        "",
    )
    found = accuracy.judge([feature_maps.make("favor+", 8)], accuracy.reference(large))
    assert math.isfinite(found.output_error)
    assert "not finite: kernel_error, kernel_error_predicted." in found.reason


def test_what_is_not_finite_is_null_and_said() -> None:
    given = attention_samples.random_samples(8, 32, 0)
    large = attention_samples.HeadSamples(
        100 * given.queries,
        100 * given.keys,
        given.values,
        given.keys[0],
        given.keys[0],
        True,
        4,
        "",
    )
    module = feature_maps.make("trigonometric", 8)
    found = accuracy.judge([module], accuracy.reference(large))
    assert found.output_error is None
    assert "not finite" in found.reason and module.failure in found.reason


def test_the_frontier_is_what_nothing_beats(result: MapComparison) -> None:
    placed = [r for r in result.rows if r.us_per_token is not None]
    for row in placed:
        beaten = any(
            other.us_per_token <= row.us_per_token and other.output_error < row.output_error
            for other in placed
        )
        of_use = row.output_error < result.uniform_error
        assert row.frontier == (of_use and not beaten)


def test_random_maps_are_drawn_several_times_and_fitted_ones_fitted() -> None:
    """Pseudo-keys as many as tokens in clusters do better than unfitted ones can."""
    result = compare_maps(4, 64, [32], maps=["pseudo_keys", "laplace"], threads=1, seed=3)
    assert result.draws == 3 and result.seed == 3
    row = rows(result, "pseudo_keys")[0]
    assert row.output_error < 0.6 * result.uniform_error
    assert row.kernel_error_predicted is None
    assert rows(result, "laplace")[0].output_error_worst > 0


def test_the_same_seed_gives_the_same_errors(result: MapComparison) -> None:
    again = compare_maps(8, 96, [16], maps=["favor+"], threads=1)
    assert again.rows[0].output_error == rows(result, "favor+")[0].output_error


# The data of a model


def saved(folder: Path, name: str, **config: Any) -> Path:
    torch.manual_seed(0)
    path = folder / f"{name}.pt"
    models.save(models.build(name, config), path)
    return path


SMALL = {"dim": 24, "num_heads": 3, "layers": 2}


def test_a_models_own_queries_and_keys(tmp_path: Path) -> None:
    path = saved(tmp_path, "language_model", **SMALL, kv_heads=1)
    found = attention_samples.model_samples(path, 40, 0, None)
    assert found.queries.shape == found.keys.shape == found.values.shape == (6, 40, 8)
    assert found.causal and found.layer_heads == 3
    assert "3 of" not in found.source and "6 of 6 heads in 2 layers" in found.source
    model = models.load(path)
    tokens = model.example_inputs(1, 40, 0)[0]
    block = model.blocks[0]
    x, _ = block.conv(block.attention_norm(model.embedding(tokens)), None)
    want = block.attention.query(x)[0].detach().numpy()
    got = found.queries[:3].swapaxes(0, 1).reshape(40, 24)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    # One key head serves three query heads.
    np.testing.assert_array_equal(found.keys[0], found.keys[2])
    assert not np.array_equal(found.fit_keys[:40], found.keys[0])


def test_a_bidirectional_model_and_inputs_of_ones_own(tmp_path: Path) -> None:
    path = saved(tmp_path, "digit_classifier", **SMALL)
    pixels = np.random.default_rng(0).random((1, 16, 4), np.float32)
    np.savez(tmp_path / "x.npz", pixels)
    result = compare_maps(
        length=999, data=path, inputs=tmp_path / "x.npz", maps=["softmax_time"], threads=1
    )
    assert (result.length, result.d, result.causal) == (16, 8, False)
    assert "x.npz" in result.source
    assert result.rows[0].output_error > 0 and result.rows[0].us_per_token > 0


def test_a_softmax_models_own_queries_and_keys(tmp_path: Path) -> None:
    path = saved(tmp_path, "language_model", **SMALL, kv_heads=1, attention="softmax")
    found = attention_samples.model_samples(path, 40, 0, None)
    assert found.queries.shape == found.keys.shape == (6, 40, 8) and found.causal
    model = models.load(path)
    block = model.blocks[0]
    x, _ = block.conv(
        block.attention_norm(model.embedding(model.example_inputs(1, 40, 0)[0])), None
    )
    want = block.attention.query(x)[0].detach().numpy()
    got = found.queries[:3].swapaxes(0, 1).reshape(40, 24)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


class Scored(torch.nn.Module):
    """Attention with a scale of its own, a mask, and cross-attention that is left out."""

    def __init__(self, mask: torch.Tensor | None) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attention = torch.nn.functional.scaled_dot_product_attention
        y = attention(x, x[:, :2], x[:, :2], self.mask, scale=1.0, enable_gqa=True)
        return attention(y, x[:, :, :3], x[:, :, :3])


@pytest.mark.parametrize("additive", [False, True])
def test_scale_heads_and_masks_of_any_module(additive: bool) -> None:
    x = torch.randn(2, 4, 6, 16, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    if additive:
        mask = torch.zeros(6, 6).masked_fill(~mask, -torch.inf)
    (layer,) = attention_samples._run(a_module(Scored(mask), x), (x,))
    assert layer.causal
    # Scores are q . k, and kernels of q . k / sqrt(16).
    np.testing.assert_allclose(layer.queries, 4 * x[0].double().numpy())
    np.testing.assert_allclose(layer.keys, x[0, [0, 0, 1, 1]].double().numpy())
    with pytest.raises(UsageError, match=r"no attention to take queries and keys from: expected"):
        attention_samples._run(a_module(Scored(torch.randn(6, 6)), x), (x,))


def test_layers_of_torch_are_read_whatever_kernel_would_compute_them() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval()
    x = torch.randn(1, 5, 16)
    (found,) = attention_samples._run(a_module(layer, x), (x,))
    assert found.queries.shape == (2, 5, 8) and not found.causal


def a_module(module: torch.nn.Module, *args: torch.Tensor) -> LoadedModel:
    return LoadedModel(module.eval(), args, {}, None, Source("factory", "here", None, "a module"))


def test_a_model_without_such_layers_is_refused(factories: SimpleNamespace) -> None:
    with pytest.raises(UsageError, match="no attention to take queries and keys from"):
        compare_maps(data=factories.source("position"), length=8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"maps": ["fvaor+"]}, r"Unknown feature map 'fvaor\+'.*Did you mean 'favor\+'"),
        ({"d": 0}, "Head width 0; expected at least 1"),
        ({"length": 0}, "Length 0; expected 1 to"),
        ({"features": [64, 0]}, r"Features \[64, 0\]; expected"),
        ({"features": []}, r"Features \[\]; expected"),
        ({"d": 8, "data": "x.pt"}, "either a model's data or a head width"),
        ({"inputs": "x.npz"}, "Inputs are those of a model"),
        ({"data": "nothing.pt"}, "no file or folder nothing.pt"),
        ({"d": 2000, "length": 4, "maps": ["taylor2"]}, "None of these maps.*taylor2.*15 GiB"),
        ({"d": 8, "length": 4, "maps": ["softmax_time"]}, "None of these.*bidirectional only"),
    ],
)
def test_bad_requests_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compare_maps(**arguments)


def test_unreadable_inputs_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, "language_model", **SMALL)
    (tmp_path / "x.npz").write_bytes(b"no archive")
    with pytest.raises(UsageError, match=r"x.npz cannot be read as inputs.*numpy.savez"):
        compare_maps(data=path, inputs=tmp_path / "x.npz")
    np.savez(tmp_path / "y.npz", np.zeros((1, 4, 3)))
    with pytest.raises(UsageError, match="does not run on these inputs"):
        compare_maps(data=path, inputs=tmp_path / "y.npz")


# The list


def test_every_map_is_listed_with_all_it_says_of_itself() -> None:
    found = {m.map: m for m in catalogue(64)}
    assert sorted(found) == feature_maps.kinds()
    for entry in found.values():
        assert all(
            getattr(entry, key) for key in ("kernel", "exactness", "error", "regime", "failure")
        )
    assert found["taylor2"].features == 2145
    assert found["favor+"].options["features"] == found["favor+"].features == 128
    assert found["local"].features is None and "laplace" in found["local"].note
    assert not found["softmax_time"].causal


def test_the_list_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orthogonal draws of a wide head take minutes."""
    monkeypatch.setattr(draws, "gaussian", lambda *_: pytest.fail("drew"))
    found = {m.map: m for m in catalogue(1024)}
    assert found["favor+"].features == 128
    assert "GiB" in found["taylor2"].note


# Charts

OVERS = ("features", "us_per_token")


def svg(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def words_of(found: ElementTree.Element) -> str:
    return " ".join(t.text or "" for t in found.iter("text"))


@pytest.mark.parametrize("width", [960, 340])
@pytest.mark.parametrize("over", OVERS)
def test_charts_name_every_map_inside_their_frame(
    result: MapComparison, over: map_charts.Over, width: int
) -> None:
    found = svg(map_charts.error_chart(result, over, "a", width))
    wide, high = (float(n) for n in found.attrib["viewBox"].split()[2:])
    assert wide == width
    for row in result.rows:
        seen = row.output_error is not None and row.output_error <= map_charts.CEILING
        assert (row.map in words_of(found)) == seen
        assert (row.map in map_charts.off_chart(result, over)) == (
            row.output_error is not None and not seen
        )
    for text in found.iter("text"):
        assert 0 <= float(text.attrib.get("x", 0)) <= wide
        assert 0 <= float(text.attrib.get("y", 0)) <= high


def test_every_point_has_a_marker_that_tells_its_numbers(result: MapComparison) -> None:
    measured = [r for r in result.rows if (r.output_error or 9) <= map_charts.CEILING]
    found = svg(map_charts.error_chart(result, "features", "a"))
    tips = [tip.text or "" for mark in found.iter("use") for tip in mark.findall("title")]
    assert len(tips) == len(measured)
    for row in measured:
        assert any(f"{row.map}, M = {row.features}: error " in tip for tip in tips)


def test_markers_are_hollow_where_the_denominator_can_vanish(result: MapComparison) -> None:
    assert map_charts.HOLLOW not in words_of(svg(map_charts.error_chart(result, "features", "a")))
    near = with_errors(result, [1.0, 1.0])
    chart = map_charts.error_chart(near, "features", "a")
    assert map_charts.HOLLOW in words_of(svg(chart))
    hollow = [p for p in map_charts.measured(near, "features") if p.hollow]
    assert {p.name for p in hollow} == {"trigonometric"}
    assert chart.count("fill: var(--paper)") == len(hollow) + 1  # and the one of the legend


def test_the_frontier_is_drawn_over_time_alone(result: MapComparison) -> None:
    assert "a-frontier" not in map_charts.error_chart(result, "features", "a")
    timed = map_charts.error_chart(result, "us_per_token", "a")
    assert 'id="a-frontier"' in timed and map_charts.FRONTIER in timed


def test_maps_off_the_chart_are_listed_below_it(result: MapComparison) -> None:
    far = with_errors(result, [55.0, 8.0])
    sentence = r"Off the chart, with an error above 1.9: .*trigonometric 8.00 to 55.0"
    assert re.search(sentence, report.comparison_page(far))
    assert "trigonometric" not in map_charts.error_chart(far, "us_per_token", "a")


def test_nothing_to_draw_is_no_chart(result: MapComparison) -> None:
    empty = replace(result, rows=tuple(rows(result, "softmax_time")))
    assert map_charts.error_chart(empty, "us_per_token", "a") == ""
    assert "No map could be compared" in report.comparison_page(empty)
    assert report.picture(empty)[:4] == b"\x89PNG"


def test_the_page_is_whole_by_itself(result: MapComparison) -> None:
    page = report.comparison_page(result)
    assert "http" not in page.replace("http-equiv", "")
    assert "default-src 'none'" in page
    assert report.headline(result).split(";")[0].split(",")[0] in page
    for row in result.rows:
        assert row.map in page
    hostile = replace(result, source="<script>alert(1)</script>")
    assert "<script>" not in report.comparison_page(hostile)


def test_the_headline_names_the_nearest_and_the_fastest_of_use(result: MapComparison) -> None:
    words = report.headline(result)
    placed = [r for r in result.rows if r.output_error is not None]
    nearest = min(placed, key=lambda r: r.output_error)
    assert words.startswith(f"{nearest.map} (M = {nearest.features}) comes nearest")
    useless = replace(result, uniform_error=1e-9)
    assert "None beats attending to all keys alike" in report.headline(useless)


def test_the_picture_shows_both_charts(result: MapComparison) -> None:
    png = report.picture(result)
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    assert width == figures.ZOOM * (960 + 2 * figures.MARGIN)
    assert height > figures.ZOOM * 2 * 560


# Files and the command line


def test_files_by_their_ending(result: MapComparison, tmp_path: Path) -> None:
    assert output_files.write_comparison(result, None) == []
    for name in ("a.html", "a.png", "a.json"):
        assert output_files.write_comparison(result, tmp_path / name) == [tmp_path / name]
    assert json.loads((tmp_path / "a.json").read_text()) == json.loads(dumps(asdict(result)))
    written = output_files.write_comparison(result, tmp_path / "all")
    assert sorted(p.name for p in written) == ["maps.html", "maps.json", "maps.png"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.html", "a.json", "a.png", "all"]


def test_outputs_that_cannot_be_are_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "x.png").mkdir()
    for name, message in (
        ("a.pdf", "ends in .pdf; expected one of .html, .png, .json"),
        ("no/a.html", "The folder .* does not exist"),
        ("file", "is a file"),
        ("x.png", "is a folder"),
    ):
        with pytest.raises(UsageError, match=message):
            output_files.check_report_paths(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


def test_the_commands(cli: Cli, tmp_path: Path) -> None:
    listed = cli("maps")
    assert listed.code == 0
    assert all(kind in listed.out for kind in feature_maps.kinds())
    assert {m["map"] for m in cli("maps", "--json", "--d", 8).json()["maps"]} == set(
        feature_maps.kinds()
    )
    given = ("--d", 4, "--length", 24, "--features", "8", "--maps", "relu,laplace")
    shown = cli("maps", "compare", *given, "--threads", 1, "-o", tmp_path / "page.html")
    assert shown.code == 0
    assert "comes nearest to softmax" in shown.out and "page.html" in shown.out
    assert (tmp_path / "page.html").is_file()
    found = cli("maps", "compare", *given, "--threads", 1, "--json").json()
    assert found["kind"] == "map_comparison" and len(found["rows"]) == 2
    assert found["linexport"] == linexport.__version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--features", "64,x"), "--features '64,x': expected positive integers"),
        (("--maps", ","), "--maps is empty"),
        (("--maps", "rleu"), "Did you mean 'relu'"),
        (("-o", "a.svg"), "ends in .svg"),
    ],
)
def test_the_command_line_refuses(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    done = cli("maps", "compare", *arguments, "--json")
    assert done.code == 2 and message in done.json()["message"]
    assert "Traceback" not in done.err
