"""The report: complete, self-contained, safe with hostile names, open about what is missing."""

from __future__ import annotations

import copy
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper
from rich.console import Console

from linexport import report
from linexport.errors import UsageError
from linexport.manifest import ConvertOptions, from_json
from linexport.plugins.ops.registry import all_ops
from linexport.report import page as report_page
from linexport.report import snippet
from linexport.report.text import amount, error, format_speedup, split
from linexport.report.verdict import Verdict, parity_check
from linexport.report.verdict import verdict as verdict_of

SAMPLE = Path(__file__).with_name("test_report_sample.json")


def timing(
    length: int, artifact: float, plain: float | None, torch: float | None, **reasons: str
) -> dict[str, Any]:
    """One row of latencies."""
    row: dict[str, Any] = {"length": length, "batch": 1, "reasons": reasons}
    for key, value in (("artifact", artifact), ("plain_export", plain), ("pytorch", torch)):
        row[f"{key}_ms"] = value
        row[f"{key}_p90_ms"] = None if value is None else value * 1.17
    return row


def sample() -> dict[str, Any]:
    """A manifest as convert writes it: a small language model for ONNX Runtime."""
    manifest: dict[str, Any] = json.loads(SAMPLE.read_text())
    return manifest


def failed() -> dict[str, Any]:
    """A manifest whose artifact differs from the original at length 100."""
    manifest = sample()
    manifest["status"] = "parity_failed"
    parity = manifest["parity"]
    parity["passed"] = False
    parity |= {"max_relative_error": 0.12, "max_absolute_error": 0.031}
    parity["cases"][7] |= {"passed": False, "max_relative_error": 0.12, "max_absolute_error": 0.031}
    parity["cases"][8] |= {"passed": False, "max_relative_error": 7e-5}
    parity["histogram"]["counts"][14] = 5120
    manifest["streaming"] |= {"passed": False, "reason": "token 6 differs after the first split"}
    return manifest


class Page(HTMLParser):
    """What a browser would see: the tags with their attributes, and the text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[str] = []
        self.pieces: list[str] = []
        self.inside = ""
        self.feed(source)
        self.text = re.sub(r"\s+", " ", "".join(self.pieces))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "h2":
            self.headings.append("")

    def handle_data(self, data: str) -> None:
        if self.inside == "h2":
            self.headings[-1] += data
        if self.inside != "style":
            self.pieces.append(data)

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""
        if tag in {"td", "th", "p", "dt", "dd", "h1", "li"}:
            self.pieces.append(" ")


def render_html(content: dict[str, Any]) -> str:
    """The page of a manifest given as JSON."""
    return report.render_html(from_json(content))


def verdict(content: dict[str, Any]) -> Verdict:
    """The verdict on a manifest given as JSON."""
    return verdict_of(from_json(content))


def summary(manifest: dict[str, Any], **options: Any) -> str:
    """The terminal summary as a file would receive it."""
    console = Console(file=io.StringIO(), **{"width": 100} | options)
    report.render_summary(from_json(manifest), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def paths(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested JSON, of long lists the first two items only."""
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = list(value)
    elif isinstance(value, list):
        inner = list(range(min(2, len(value))))
    for key in inner:
        yield (*here, key)
        yield from paths(value[key], (*here, key))


def changed(manifest: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy with another value in one place."""
    result = copy.deepcopy(manifest)
    holder: Any = result
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return result


@pytest.fixture
def each_chart_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw a chart again only where what it shows has changed: a page takes 0.3 s to draw."""
    drawn: dict[str, str] = {}

    def once(draw: Callable[..., str], *arguments: Any) -> str:
        key = repr((draw, arguments))
        if key not in drawn:
            drawn[key] = draw(*arguments)
        return drawn[key]

    for name in ("error_histogram", "length_chart"):
        monkeypatch.setattr(report_page, name, partial(once, getattr(report_page, name)))


def bare() -> dict[str, Any]:
    """A manifest of convert without checks and benchmarks."""
    gone = ("parity", "streaming", "latency", "decode", "memory", "measurement")
    return sample() | dict.fromkeys(gone)


def test_the_header_says_equal_and_how_fast() -> None:
    found = verdict(sample())
    assert found.tone == "good"
    assert found.sentence == (
        "This ONNX model equals the PyTorch original (largest relative error 3.1e-06 over 13 "
        "checks) and runs 3.8× as fast as a plain export at 1,024 tokens."
    )
    assert found.sentence in Page(render_html(sample())).text


def test_the_header_of_a_failure_is_red_and_names_the_worst_case() -> None:
    found = verdict(failed())
    assert found.tone == "bad"
    assert found.sentence == (
        "This ONNX model does not equal the PyTorch original: 2 of 13 checks failed, worst "
        "“random tokens” (batch 3, 100 tokens), where the relative error reaches 1.2e-01 and "
        "5.0e-05 is allowed."
    )
    page = Page(render_html(failed()))
    assert found.sentence in page.text
    assert ("header", {"class": "top bad"}) in page.tags
    assert (
        sum(tag == "tr" and "failed" in (given.get("class") or "") for tag, given in page.tags) == 2
    )


def test_wrong_nan_counts_are_worse_than_any_error() -> None:
    manifest = failed()
    manifest["parity"]["cases"][2] |= {"passed": False, "nan": {"expected": 0, "got": 12}}
    assert "it gives 12 NaN values where the original gives 0" in verdict(manifest).sentence


def test_a_failure_by_absolute_error_quotes_the_absolute_error() -> None:
    manifest = failed()
    for index, relative in ((7, 1e-7), (8, 1e-8)):
        manifest["parity"]["cases"][index]["max_relative_error"] = relative
    assert "the absolute error reaches 3.1e-02 and 1.0e-06" in verdict(manifest).sentence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"latency": None}, "and its speed was not measured."),
        ({"latency": [timing(64, 2.0, 1.0, 9.0)]}, "takes 2.0× as long as a plain export at 64"),
        ({"latency": [timing(64, 1.0, 1.02, 9.0)]}, "runs about as fast as a plain export at 64"),
        ({"latency": [timing(64, 1.0, None, 9.0)]}, "runs 9.0× as fast as eager PyTorch at 64"),
        ({"latency": [timing(64, 1.0, None, None)]}, "and takes 1.00 ms at 64 tokens."),
        ({"parity": None}, "Parity was not measured"),
        ({"parity": None}, "; it runs 3.8× as fast"),
        ({"streaming": {"passed": False, "reason": "x"}}, "must not be streamed"),
        ({"target": "tensorrt"}, "This artifact equals"),
    ],
)
def test_the_header_follows_the_numbers(change: dict[str, Any], words: str) -> None:
    assert words in verdict(sample() | change).sentence


@pytest.mark.parametrize(
    ("cpu", "length", "words"),
    [
        ("", 64, "runs 4.0× as fast as its softmax original at 64 tokens"),
        ("", 256, "takes 1.00 ms at 256 tokens; its softmax original was not measured there"),
        ("another", 64, "takes 1.00 ms at 64 tokens; its softmax original was not measured there"),
    ],
)
def test_a_linear_form_is_compared_with_its_softmax_original(
    cpu: str, length: int, words: str
) -> None:
    """Eager features and their plain export are 9 and 5 times slower, which says nothing."""
    content = sample() | {"latency": [timing(length, 1.0, 5.0, 9.0)]}
    content["source"]["linearized"] = {
        "description": "a language model",
        "cpu": cpu or content["environment"]["cpu"],
        "lengths": [64, 1024],
        "milliseconds": [4.0, 30.0],
    }
    found = verdict(content).sentence
    assert words in found and "eager" not in found and "plain export" not in found


def test_errors_of_lower_precisions_are_beside_what_is_allowed() -> None:
    manifest = sample()
    manifest["parity"]["tolerance"] |= {"dtype": "bfloat16", "relative": 0.03}
    assert "error 3.1e-06 of the 3.0e-02 allowed in bfloat16 over" in verdict(manifest).sentence


@pytest.mark.parametrize(
    ("wide", "own", "words"),
    [
        (
            2e-3,
            0.7,
            "2.0e-03 of the 3.0e-02 allowed in bfloat16, whose rounding moves the original",
        ),
        (0.2, 0.1, "2.0e-01, as far as rounding moves the original itself, or 3.0e-02 allowed in"),
    ],
)
def test_what_the_original_loses_in_half_precision_is_said(
    wide: float, own: float, words: str
) -> None:
    """An error beyond the tolerance passes only where the original is as far from its float32."""
    manifest = sample()
    parity = manifest["parity"]
    parity["tolerance"] |= {"dtype": "bfloat16", "relative": 0.03}
    case = parity["cases"][0]
    parity["cases"] = [
        case | {"reference": reference, "max_relative_error": error}
        for reference, error in (("float32", wide), ("bfloat16", own))
    ]
    parity["max_relative_error"] = max(wide, own)
    assert words in verdict(manifest).sentence


def test_capabilities_are_beside_the_target() -> None:
    options = vars(ConvertOptions(target="ort-cuda", sms=(89, 90)))
    text = Page(render_html(sample() | {"target": "ort-cuda", "options": options})).text
    assert "compute capability 8.9, 9.0" in text


def test_status_and_parity_block_that_disagree_count_as_failed() -> None:
    assert verdict(sample() | {"status": "parity_failed"}).tone == "bad"
    assert verdict(changed(sample(), ("parity", "passed"), False)).tone == "bad"


def test_a_failure_in_pieces_alone_is_not_said_of_parity() -> None:
    pieces = {"passed": False, "reason": "x"}
    found = sample() | {"status": "parity_failed", "streaming": pieces}
    assert "equals the PyTorch original" in verdict(found).sentence
    assert "must not be streamed" in verdict(found).sentence
    assert parity_check(from_json(found)).word == "passed"


def test_a_failure_of_greedy_decoding_alone_is_named() -> None:
    greedy = {"steps": 48, "rows": 2, "different": 7, "ties": 3, "passed": False}
    found = changed(changed(sample(), ("parity", "passed"), False), ("parity", "greedy"), greedy)
    assert "4 of 96 tokens of greedy decoding differ" in verdict(found).sentence


def test_sections_come_in_order() -> None:
    for manifest in (sample(), bare()):
        assert Page(render_html(manifest)).headings == [
            "Key facts",
            "What was matched",
            "Parity",
            "Streaming",
            "Latency",
            "Decode step",
            "Peak memory",
            "Inputs, outputs, states",
            "Use it",
            "Environment",
            "Glossary",
        ]


def test_every_number_of_the_tables_is_on_the_page() -> None:
    manifest, text = sample(), Page(render_html(sample())).text
    for row in manifest["latency"]:
        for key in ("artifact", "plain_export", "pytorch"):
            for name in (f"{key}_ms", f"{key}_p90_ms"):
                assert row[name] is None or f" {amount(row[name])} " in text
            if row[f"{key}_ms"] is not None and key != "artifact":
                assert f" {format_speedup(row[f'{key}_ms'], row['artifact_ms'])} " in text
    for row in manifest["memory"]:
        for key in ("io_mb", "artifact_mb", "plain_export_mb", "pytorch_mb"):
            assert row[key] is None or f" {amount(row[key])} " in text
    for one in manifest["parity"]["cases"]:
        for key in ("max_relative_error", "max_absolute_error"):
            assert f" {error(one[key])} " in text
        assert str(one["worst"]["index"]) in text
        assert f"{one['worst']['expected']:.9g} → {one['worst']['got']:.9g}" in text
    for much in manifest["parity"]["histogram"]["counts"]:
        assert f" {much:,} " in text
    for value in manifest["environment"].values():
        assert f" {value} " in text
    assert "could not run: needs 17 GB, the machine has 8" in text
    assert "could not run: a plain export carries no state" in text
    assert "1 + 5 + 31" in text and "37 pieces of 1" in text
    assert manifest["parity"]["tolerance"]["why"] in text
    assert manifest["rejected"][0]["reason"] in text


def hybrid(softmax: int, states: int) -> dict[str, Any]:
    """The sample with so many softmax attentions, and so many states of keys or values."""
    manifest = sample()
    reason = "its scores pass through Softmax before they meet the values: softmax attention"
    manifest["rejected"] += [
        {"where": f"attended_{i}", "reason": reason, "nodes": []} for i in range(softmax)
    ]
    tensor = {"dtype": "float32", "shape": ["batch", 4, "past", 32]}
    longer = tensor | {"shape": ["batch", 4, "past + seq", 32]}
    for i in range(states):
        names = {"past": f"past_{i}", "present": f"present_{i}"}
        of = {"op": "KeyValueCache", "grows": 2, "initial": 0.0}
        manifest["states"].append(names | tensor | of)
        manifest["inputs"].append(manifest["inputs"][-1] | tensor | {"name": names["past"]})
        manifest["outputs"].append(longer | {"name": names["present"]})
    return manifest


def test_softmax_attention_with_states_is_kept() -> None:
    manifest = hybrid(2, 4)
    first, *others = manifest["rejected"]
    said = " ".join(summary(manifest, width=200).split())
    assert "Kept softmax attention, with its keys and values as states (2 layers)" in said
    assert said.count("Refused") == 1 and f"Refused {first['where']}: {first['reason']}" in said
    assert "attended" not in said
    text = Page(render_html(manifest)).text
    assert "Kept: softmax attention, with its keys and values as states" in text
    assert first["reason"] in text and others[0]["reason"] not in text
    assert all(one["where"] in text for one in others)


@pytest.mark.parametrize("change", ["a state is missing", "pieces differ", "does not stream"])
def test_softmax_attention_that_is_not_proven_to_stream_is_refused(change: str) -> None:
    manifest = hybrid(2, 3 if change == "a state is missing" else 4)
    manifest["streaming"]["passed"] = {"pieces differ": False, "does not stream": None}.get(
        change, True
    )
    said = summary(manifest, width=200)
    assert said.count("Refused") == 2 and "The same in 1 more case." in said
    assert "Kept" not in said


def test_measurements_that_were_skipped_are_one_line_on_a_terminal() -> None:
    said = summary(bare(), width=200)
    lines = [line for line in said.splitlines() if "linexport bench measures" in line]
    assert [line.split()[0] for line in lines] == ["Speed"]
    assert not any(line.startswith(("Latency", "Decode", "Memory")) for line in said.splitlines())
    measured = [line.split()[0] for line in summary(sample(), width=200).splitlines() if line]
    assert {"Latency", "Decode", "Memory"} <= set(measured) and "Speed" not in measured


def test_missing_sections_say_so() -> None:
    text = Page(render_html(bare())).text
    assert text.count("not measured: it was skipped") == 3
    assert text.count("not measured: the manifest gives no reason") >= 2
    assert "not applicable: both ways" in Page(
        render_html(sample() | {"streaming": {"passed": None, "reason": "both ways"}})
    ).text.replace(":  ", ": ")


@pytest.mark.usefixtures("each_chart_once")
@pytest.mark.parametrize("value", [None, "text", float("nan"), [None]])
def test_no_value_in_any_place_stops_the_report(value: Any) -> None:
    manifest = failed()
    manifest["parity"]["cases"] = manifest["parity"]["cases"][7:9]
    for path in paths(manifest):
        damaged = changed(manifest, path, value)
        try:
            from_json(damaged)
        except UsageError:
            continue
        render_html(damaged)
        summary(damaged)


@pytest.mark.usefixtures("each_chart_once")
def test_names_from_files_are_text_never_markup() -> None:
    hostile = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}"
    quiet = Page(render_html(sample()))
    for path in paths(sample()):
        manifest = changed(sample(), path, hostile)
        if path[0] != "fused":
            manifest["fused"][hostile] = 1
        try:
            page = Page(render_html(manifest))
        except UsageError as refusal:
            assert "is damaged" in str(refusal) or "format" in str(refusal)
            continue
        assert not {tag for tag, _ in page.tags} - {tag for tag, _ in quiet.tags}
        assert not any(name.startswith("on") for _, given in page.tags for name in given)
        assert hostile in page.text or path == ("fused",)
    manifest = changed(sample(), ("lowerings", 0, "node"), hostile)
    assert "&lt;script&gt;alert(1)&lt;/" in render_html(manifest)


def test_the_page_loads_nothing() -> None:
    source = render_html(sample())
    assert source.startswith("<!doctype html>")
    assert "http://" not in source and "https://" not in source and "url(" not in source
    page = Page(source)
    for tag, given in page.tags:
        assert tag not in {"script", "iframe", "object", "embed", "img", "base"}
        assert "src" not in given
        assert (given.get("href") or "#").startswith(("#", "data:,"))
    anchors = {given["href"] for tag, given in page.tags if tag == "a"}
    assert anchors <= {f"#{given.get('id')}" for _, given in page.tags}
    idents = [given["id"] for _, given in page.tags if "id" in given]
    assert len(idents) == len(set(idents))


def tiny_model(path: Path) -> None:
    """A running sum whose state is its last value, as model.onnx."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["tokens"], ["x"], to=TensorProto.FLOAT),
            helper.make_node("ReduceSum", ["x", "axes"], ["part"], keepdims=0),
            helper.make_node("Add", ["part", "past_0"], ["present_0"]),
            helper.make_node("Identity", ["present_0"], ["logits"]),
        ],
        "tiny",
        [
            value("tokens", TensorProto.INT64, ["batch", "seq"]),
            value("past_0", TensorProto.FLOAT, ["batch"]),
        ],
        [
            value("logits", TensorProto.FLOAT, ["batch"]),
            value("present_0", TensorProto.FLOAT, ["batch"]),
        ],
        [helper.make_tensor("axes", TensorProto.INT64, [1], [1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, str(path))


def test_the_printed_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(tmp_path / "model.onnx")
    state = {"past": "past_0", "present": "present_0", "dtype": "float32", "shape": ["batch"]}
    state |= {"op": "Sum", "grows": None, "initial": 0.0}
    tokens, logits = sample()["inputs"][0], sample()["outputs"][0]
    past = {"name": "past_0", "dtype": "float32", "shape": ["batch"]}
    present = past | {"name": "present_0"}
    carried = {"inputs": [tokens, past], "outputs": [logits, present], "states": [state]}
    manifest = sample() | carried
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(snippet.with_onnxruntime(from_json(manifest)), names)
    assert names["outputs"]["logits"].shape == (1,)
    assert list(names["past"]) == ["past_0"]
    quotes = {"name": 'it\'s "x"', "dtype": "float32", "shape": ["batch", 3]}
    for render in (snippet.with_linexport, snippet.with_onnxruntime):
        for states in ([], [state]):
            streaming = {"passed": None, "reason": "it is a test"}
            changes = {"inputs": [quotes, past], "outputs": [present], "states": states}
            dims = {"batch": sample()["dims"]["batch"]}
            content = sample() | changes | {"streaming": streaming, "dims": dims}
            code = render(from_json(content))
            compile(code, "snippet", "exec")
            assert ("past =" in code) == (bool(states) and render is snippet.with_onnxruntime)


def test_the_summary_reads_without_colour() -> None:
    text = summary(sample())
    assert "\x1b" not in text
    for words in ("✓ passed  13 of 13 checks", "4 LinearAttention", "3.8×", "could not run"):
        assert words in text
    assert "✗ failed" in summary(failed())
    assert "\x1b[" in summary(sample(), force_terminal=True, color_system="standard")


def test_the_summary_fits_its_width_and_plain_terminals() -> None:
    assert max(map(len, summary(sample(), width=60).splitlines())) <= 60
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    report.render_summary(from_json(sample()), Console(file=file, width=100))
    file.seek(0)
    assert "+ passed" in file.read()


def test_names_cannot_command_the_terminal_or_rich() -> None:
    manifest = changed(sample(), ("rejected", 0, "where"), "\x1b[2J[red]node[/]\r")
    text = summary(manifest)
    assert "\x1b" not in text and "\r" not in text
    assert "[red]node[/]" in text


def test_importing_the_report_is_cheap() -> None:
    heavy = "{'jinja2', 'matplotlib', 'rich', 'numpy', 'torch', 'onnx'} & set(sys.modules)"
    code = f"import sys, linexport.report; sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("function", "value", "words"),
    [
        (amount, 0.0412, "0.0412"),
        (amount, 2.4, "2.40"),
        (amount, 1234.5, "1,234"),
        (amount, 0, "0"),
        (error, 0.0, "0"),
        (error, float("nan"), "nan"),
        (split, [1] * 3 + [34], "3 pieces of 1 + 34"),
    ],
)
def test_numbers_in_words(function: Callable[[Any], str], value: Any, words: str) -> None:
    assert function(value) == words


def test_a_match_and_its_proof_are_on_the_page() -> None:
    """Next to what was fused: heads, the range of the map, sizes and error of the proof."""
    text = Page(render_html(sample())).text
    (match,) = sample()["matches"]
    assert match["where"] in text and "causal linear attention" in text
    assert "elu1, compared up to |x| = 3.4e+38" in text
    assert "2.5e-07" in text and "at batch 2, seq 5; batch 3, seq 70" in text
    assert match["where"] not in Page(render_html(sample() | {"matches": []})).text


def test_passes_are_on_the_page_under_a_heading_that_opens() -> None:
    page = render_html(sample())
    table = page.split("<summary>Passes over the graph")[1].split("</details>")[0]
    for one in sample()["passes"]:
        assert one["name"] in table and f">{one['nodes_before']}<" in table
    assert "Passes over the graph" not in render_html(sample() | {"passes": []})


def test_fused_ops_are_told_by_their_declarations() -> None:
    text = Page(render_html(sample() | {"fused": {"GeneralizedDeltaRule": 1, "Elsewhere": 2}})).text
    assert all_ops()["GeneralizedDeltaRule"].summary in text and "Elsewhere" in text
    assert all(op.summary.endswith(".") for op in all_ops().values())
