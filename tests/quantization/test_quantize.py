"""``linexport quantize`` and ``convert --weights``: artifacts, proofs, bad input."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

import linexport
from linexport import trace
from linexport.artifact.temporary import Arrays, Run
from linexport.conversion import pipeline
from linexport.conversion import quantize as quantizing
from linexport.conversion.context import Checks
from linexport.errors import UnsupportedModelError, UsageError
from linexport.manifest import ConvertOptions, Manifest, read
from linexport.parity.language import split
from linexport.quantization import quantisable
from linexport.quantization.half import half_model
from linexport.quantization.opened import open_exactly
from linexport.report.verdict import verdict
from linexport.sources import load_model
from linexport.targets.lowering.split_head import HIDDEN
from linexport.targets.runtime.options import FLOAT_PRODUCTS
from tests.support.command_line import Result

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("choice", ["int8", "int4", "auto"])
def test_the_record_holds_every_number_of_the_proof(
    choice: str, exact: Path, quantised: Callable[[str], Path]
) -> None:
    manifest = read(quantised(choice))
    record = manifest.quantisation
    assert record is not None and record.divergence is not None and record.drift is not None
    assert manifest.status == "ok" and record.weights == choice
    assert manifest.model_sha256 != read(exact).model_sha256
    assert manifest.files["model.onnx"].bytes == record.model_bytes < record.float32_bytes
    assert 0 < record.divergence.mean <= record.divergence.p99 <= record.divergence.maximum
    assert record.drift.streaming < 5e-5
    assert set(record.drift.split_states) == set(record.drift.states) != set()
    assert max(record.drift.split_states.values()) <= record.drift.streaming_integer
    assert all("weight" in t.name for t in record.tensors)
    assert {p.first for p in record.divergence.by_position} == {0, 64, 512}
    assert {t.bits for t in record.tensors} <= {"int8": {8}, "int4": {4, 8}}.get(choice, {4, 8})
    assert manifest.latency is None


@pytest.mark.parametrize("words", [1, 2**14])
def test_streams_of_many_words_are_compared_on_hidden_states(
    words: int, exact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of many words is left out, and all states are there."""
    outputs: list[set[str]] = []

    def opened(*given: Any) -> Run:
        run = open_exactly(*given)

        def watched(feeds: Arrays) -> dict[str, Any]:
            found = run(feeds)
            outputs.append(set(found))
            return found

        return watched

    monkeypatch.setattr(split, "MIN_VOCABULARY", words)
    monkeypatch.setattr(quantizing, "open_exactly", opened)
    manifest = linexport.quantize(exact, tmp_path / "int4", weights="int4", threads=1)
    assert manifest.quantisation and manifest.quantisation.drift
    assert 0 < manifest.quantisation.drift.streaming < 5e-5
    expected = {s.present for s in manifest.states} | {HIDDEN if words == 1 else "output"}
    assert outputs and all(own == expected for own in outputs)


@pytest.mark.parametrize("choice", ["fp16", "bf16"])
def test_half_precision_is_the_float32_graph_with_rounded_weights(
    choice: str, exact: Path, quantised: Callable[[str], Path]
) -> None:
    """Independently: the values of every matrix are rounded in the file of the float32 artifact."""
    record = read(quantised(choice)).quantisation
    assert record and record.divergence and record.drift and record.passed
    assert record.model_bytes < 0.6 * record.float32_bytes
    assert {(t.bits, t.block, t.method) for t in record.tensors} == {(16, None, choice)}
    model = onnx.load_model(str(exact / "model.onnx"))
    kind = torch.float16 if choice == "fp16" else torch.bfloat16
    names = {t.name for t in record.tensors}
    values = {t.name: numpy_helper.to_array(t) for t in quantisable.floating_weights(model)}
    found, _ = quantisable.find(model, values)
    names = {use.weight for w in found for use in w.uses if w.name in names}
    for tensor in model.graph.initializer:
        if tensor.name in names:
            rounded = torch.from_numpy(values[tensor.name].copy()).to(kind).float().numpy()
            tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))
    expected = onnxruntime.InferenceSession(model.SerializeToString())
    given = linexport.load(quantised(choice), threads=1)
    feeds = given.feeds(np.arange(40, dtype=np.int64)[None])
    got = given.run_graph(feeds)
    for output, value in zip(expected.get_outputs(), expected.run(None, feeds), strict=True):
        np.testing.assert_allclose(got[output.name], value, atol=1e-5 * np.abs(value).max())


def test_convert_judges_half_precision_by_that_of_the_original(
    cli: Callable[..., Result], factories: SimpleNamespace, tmp_path: Path
) -> None:
    source = factories.source("language_model")
    result = cli("convert", source, "-o", tmp_path / "h", "--weights", "bf16", "--no-bench")
    assert result.code == 0, result.err
    record = read(tmp_path / "h").quantisation
    assert record and record.divergence and record.original_divergence
    assert 0 < record.divergence.mean < record.original_divergence.mean
    worse = replace(record, divergence=replace(record.divergence, mean=1.0))
    assert not worse.passed
    header = verdict(replace(read(tmp_path / "h"), quantisation=worse))
    assert header.tone == "bad" and "above the" in header.sentence
    assert "of the original itself in bf16" in header.sentence


def test_weights_beyond_the_range_of_half_precision_are_named(exact: Path, tmp_path: Path) -> None:
    model = onnx.load_model(str(exact / "model.onnx"))
    values = {t.name: numpy_helper.to_array(t) for t in quantisable.floating_weights(model)}
    found, _ = quantisable.find(model, values)
    large = {name: value * np.float32(1e6) for name, value in values.items()}
    with pytest.raises(UnsupportedModelError, match=r"values up to .*; fp16 ends at 6.55e\+04"):
        half_model(model, large, found, "fp16")
    assert half_model(model, large, found, "bf16").values


def test_auto_measures_and_draws_what_it_chose_from(quantised: Callable[[str], Path]) -> None:
    record = read(quantised("auto")).quantisation
    assert record and record.divergence
    [chosen] = [p for p in record.pareto if p.chosen]
    assert chosen.bytes == sum(t.bytes for t in record.tensors)
    assert chosen.measured == pytest.approx(record.divergence.mean) and chosen.step_ms
    assert [p.bytes for p in record.pareto] == sorted(p.bytes for p in record.pareto)
    page = (quantised("auto") / "report.html").read_text()
    assert "not measured" not in page.split("<h3>Divergence by size</h3>")[1].split("</table>")[0]
    assert "<h3>Divergence by size</h3>" in page and "<h3>Divergence by time of a step</h3>" in page


def test_fewer_bits_diverge_more(quantised: Callable[[str], Path]) -> None:
    eight, four = (read(quantised(c)).quantisation for c in ("int8", "int4"))
    assert eight and four and eight.divergence and four.divergence
    assert four.model_bytes < eight.model_bytes
    assert four.divergence.mean > eight.divergence.mean


def test_the_recorded_divergence_is_that_of_both_artifacts(
    exact: Path, quantised: Callable[[str], Path]
) -> None:
    """An independent computation, on text of its own, is of the same size."""
    both = [linexport.load(path, threads=1) for path in (exact, quantised("int4"))]
    text = Path(json.__file__).read_bytes()[:2000]
    ids = np.frombuffer(text, np.uint8).astype(np.int64)[None]
    p, q = (model.run(ids)["output"][0].astype(np.float64) for model in both)
    p -= np.log(np.exp(p).sum(-1, keepdims=True))
    q -= np.log(np.exp(q).sum(-1, keepdims=True))
    mean = float((np.exp(p) * (p - q)).sum(-1).mean())
    record = read(quantised("int4")).quantisation
    assert record and record.divergence
    assert mean == pytest.approx(record.divergence.mean, rel=0.5)


def test_a_quantised_artifact_streams_and_generates(quantised: Callable[[str], Path]) -> None:
    model = linexport.load(quantised("int8"), threads=1)
    ids = np.arange(40, dtype=np.int64)[None]
    whole = model.run(ids)["output"]
    stream = model.stream()
    parts = [stream.step(ids[:, a:b])["output"] for a, b in ((0, 7), (7, 8), (8, 40))]
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=0.02 * np.abs(whole).max())
    assert len(list(model.generate(b"import ", max_tokens=5))) == 5


def test_token_ids_beyond_a_quantised_table_are_refused(quantised: Callable[[str], Path]) -> None:
    model = linexport.load(quantised("int4"), threads=1)
    for wrong in (-1, 256):
        with pytest.raises(UsageError):
            model.run(np.asarray([[wrong]]))


def test_a_tied_table_is_stored_once(quantised: Callable[[str], Path], exact: Path) -> None:
    model = onnx.load_model(str(quantised("int4") / "model.onnx"))
    before = onnx.load_model(str(exact / "model.onnx"))
    values = {t.name: numpy_helper.to_array(t) for t in quantisable.floating_weights(before)}
    found, _ = quantisable.find(before, values)
    table = next(w for w in found if w.is_table)
    assert len(table.uses) == 2
    stored = [t for t in model.graph.initializer if t.name.startswith(f"{table.name}/")]
    assert sorted(t.name.rpartition("/")[2] for t in stored) == ["scales", "values", "zeros"]
    assert table.name not in {t.name for t in model.graph.initializer}
    kinds = {n.op_type for n in model.graph.node}
    assert {"GatherBlockQuantized", "MatMulNBits"} <= kinds and "MatMul" not in kinds


def test_validate_compares_with_the_original(
    cli: Callable[..., Result],
    factories: SimpleNamespace,
    quantised: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    copy = shutil.copytree(quantised("int8"), tmp_path / "copy")
    (tmp_path / "text.txt").write_text("A text of one's own. " * 200)
    source = ("--source", factories.source("language_model"))
    result = cli("validate", copy, *source, "--data", tmp_path / "text.txt", "--json")
    assert result.code == 0, result.err
    record = json.loads(result.out)["quantisation"]
    assert record["reference"] == "the original in PyTorch"
    assert record["data"].endswith("text.txt")
    assert record["divergence"]["mean"] < 0.01


def test_convert_quantises_what_it_has_proven(
    cli: Callable[..., Result], factories: SimpleNamespace, tmp_path: Path
) -> None:
    source = factories.source("language_model")
    result = cli("convert", source, "-o", tmp_path / "q", "--weights", "int8", "--no-bench")
    assert result.code == 0, result.err
    assert "Weights in int8: mean KL divergence" in result.out
    manifest = read(tmp_path / "q")
    assert manifest.options.weights == "int8"
    assert manifest.parity is not None and manifest.parity.passed
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q"]
    assert "Weights" in (tmp_path / "q" / "report.html").read_text()


def test_weights_that_are_not_finite_are_named_before_the_model_is_traced(
    factories: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(factories.source("language_model"))
    with torch.no_grad():
        loaded.module.get_parameter("embedding.weight")[7, 0] = torch.nan
    monkeypatch.setattr(trace, "trace", None)
    named = r"embedding.weight has 1 NaN of \d+ values"
    with pytest.raises(UnsupportedModelError, match=named):
        pipeline.convert_checked(loaded, tmp_path / "q", ConvertOptions(weights="int4"), Checks())
    assert not list(tmp_path.iterdir())


def test_text_that_is_not_there_is_missed_before_the_model_is_loaded(
    cli: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "announced", None)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "module.py").write_text("import math")
    options = ("--weights", "int4", "--data", tmp_path / "texts")
    result = cli("convert", "model.pt", "-o", tmp_path / "q", *options)
    assert result.code == 2 and "has no text: expected .txt files in it" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--weights", "int3"),
            "--weights is 'int3'; expected one of float32, fp16, bf16, int8, int4, fp8, auto, "
            "keep.",
        ),
        (("--max-kld", "0"), "--max-kld is 0.0; expected a positive number of nats."),
        (("--data", "nowhere.txt"), "--data nowhere.txt cannot be read"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(
    cli: Callable[..., Result],
    exact: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    result = cli("quantize", exact, "-o", tmp_path / "q", *arguments)
    assert result.code == 2 and message in " ".join(result.err.split())
    assert not list(tmp_path.iterdir())


def test_inspect_says_how_weights_are_stored(
    cli: Callable[..., Result], quantised: Callable[[str], Path]
) -> None:
    said = " ".join(cli("inspect", quantised("int4")).out.split())
    assert "weights in int4: 12 in 4 bits, 1 in 8 bits" in said and "mean KL divergence" in said
    assert cli("inspect", quantised("int4"), "--json").json()["quantisation"]["weights"] == "int4"


def test_what_is_quantised_already_is_refused(
    quantised: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="has int8 weights already"):
        linexport.quantize(quantised("int8"), tmp_path / "q")


def test_an_artifact_for_another_target_is_refused(
    converted: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="tensorrt-rtx and tensorrt; found target onnx27"):
        linexport.quantize(converted("small", target="onnx27"), tmp_path / "q")


@pytest.mark.parametrize("choice", ["int4", "auto"])
def test_portable_artifacts_have_standard_operators_that_onnx_runtime_joins(
    choice: str, converted: Callable[..., Path], tmp_path: Path
) -> None:
    """With activations in float32 the file computes the float32 graph with the stored weights."""
    source = converted("language_model", target="onnx")
    limit = {"max_kld": 1.0} if choice == "auto" else {}
    manifest = linexport.quantize(source, tmp_path / "q", weights=choice, threads=1, **limit)
    record = manifest.quantisation
    assert record and record.passed and record.model_bytes < 0.3 * record.float32_bytes
    path = tmp_path / "q" / "model.onnx"
    model = onnx.load_model(str(path))
    onnx.checker.check_model(model)
    assert {o.domain: o.version for o in model.opset_import}[""] == 21
    kinds = Counter(node.op_type for node in model.graph.node)
    assert not {n.domain for n in model.graph.node} - {"", "linexport"}
    assert kinds["DequantizeLinear"] == kinds["MatMul"] + 1
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "joined.onnx")
    for name, value in FLOAT_PRODUCTS.items():
        options.add_session_config_entry(name, value)
    session = onnxruntime.InferenceSession(str(path), options)
    joined = Counter(n.op_type for n in onnx.load(options.optimized_model_filepath).graph.node)
    assert joined["MatMulNBits"] == kinds["MatMul"] and not joined["MatMul"]
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    exact = onnx.load_model(str(source / "model.onnx"))
    values = {t.name: numpy_helper.to_array(t) for t in quantisable.floating_weights(exact)}
    for weight in quantisable.find(exact, values)[0]:
        if f"{weight.name}/values" not in stored:
            continue
        parts = [stored.get(name) for name in weight.parts]
        q, s = (np.asarray(part, np.float64) for part in parts[:2])
        z = np.zeros_like(s) if parts[2] is None else np.asarray(parts[2], np.float64)
        block = np.arange(len(q)) // weight.block
        matrix = ((q - z[block]) * s[block]).T.astype(np.float32)
        for use in weight.uses:
            own = matrix.T if use.rows_are_inputs else matrix
            tensor = next(t for t in exact.graph.initializer if t.name == use.weight)
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(own), use.weight))
    opened = linexport.load(tmp_path / "q", threads=1)
    for wrong in (-1, 256):
        with pytest.raises(UsageError):
            opened.run(np.asarray([[wrong]]))
    feeds = opened.feeds(np.arange(40, dtype=np.int64)[None])
    expected = onnxruntime.InferenceSession(exact.SerializeToString())
    for value, wanted in zip(session.run(None, feeds), expected.run(None, feeds), strict=True):
        np.testing.assert_allclose(value, wanted, atol=2e-5 * np.abs(wanted).max())


def test_weights_of_what_is_no_language_model(
    converted: Callable[..., Path], tmp_path: Path
) -> None:
    manifest: Manifest = linexport.quantize(
        converted("heavy"), tmp_path / "q", weights="int8", threads=1
    )
    record = manifest.quantisation
    assert record is not None and record.divergence is None
    assert record.output_error is not None and 0 < record.output_error < 0.02
    with pytest.raises(UsageError, match="it is for language models"):
        linexport.quantize(converted("heavy"), tmp_path / "auto", weights="auto")
    with pytest.raises(UsageError, match=r"max_kld limits the divergence .* max_drop"):
        linexport.quantize(converted("heavy"), tmp_path / "limit", weights="int8", max_kld=0.1)


def test_experts_with_negative_shares_are_read_by_products(
    converted: Callable[..., Path], tmp_path: Path
) -> None:
    """ONNX Runtime's kernel for experts leaves them out: an error of 0.14."""
    manifest = linexport.quantize(
        converted("signed_experts"), tmp_path / "q", weights="int8", threads=1
    )
    record = manifest.quantisation
    assert record and record.output_error is not None and 0 < record.output_error < 0.02
    assert {"up", "down"} <= {t.name.rpartition(".")[2] for t in record.tensors}
    kinds = Counter(n.op_type for n in onnx.load(str(tmp_path / "q" / "model.onnx")).graph.node)
    assert kinds["MatMulNBits"] == 2 * 4 and not kinds["QMoE"]


def test_the_users_own_score_is_of_both_artifacts_and_may_drop_no_further(
    cli: Callable[..., Result],
    converted: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The score is the mean of the outputs for one input, which the test computes as well."""
    (tmp_path / "scores_of_heavy.py").write_text(
        "import numpy as np\n"
        "def spread(model):\n"
        "    sizes = [d if isinstance(d, int) else 3 for d in model.manifest.inputs[0].shape]\n"
        "    x = np.linspace(-1, 1, int(np.prod(sizes)), dtype=np.float32).reshape(sizes)\n"
        "    return np.abs(model.run(x)[model.manifest.outputs[0].name]).mean()\n"
        "def broken(model):\n"
        "    return 'much'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    given = ("quantize", converted("heavy"), "--weights", "int4", "--evaluate")
    result = cli(*given, "scores_of_heavy:spread", "-o", "good", "--max-drop", "1e3")
    assert result.code == 0, result.err
    assert "scores_of_heavy:spread" in result.out
    record = read(tmp_path / "good").quantisation
    assert record and record.metric and record.max_drop == 1e3
    from scores_of_heavy import spread

    expected = [spread(linexport.load(path)) for path in (converted("heavy"), "good")]
    assert [record.metric.before, record.metric.after] == pytest.approx(expected, rel=1e-5)
    assert record.metric.drop == pytest.approx(expected[0] - expected[1], abs=1e-6)
    worse = replace(record, metric=replace(record.metric, drop=2e3))
    assert not worse.passed
    sentence = verdict(replace(read(tmp_path / "good"), quantisation=worse)).sentence
    assert "drop of scores_of_heavy:spread 2.0e+03, above the 1.0e+03 allowed" in sentence
    sign = "" if record.metric.drop > 0 else "--lower-is-better"
    limits = ("--max-drop", "0", *([sign] if sign else []))
    result = cli(*given, "scores_of_heavy:spread", "-o", "bad", *limits)
    assert result.code == 3 and "above the 0 allowed" in " ".join(result.out.split())
    result = cli(*given, "scores_of_heavy:broken", "-o", "none")
    assert result.code == 2 and "returned str; expected a number" in " ".join(result.err.split())
    assert not (tmp_path / "none").exists()
    result = cli("quantize", converted("heavy"), "-o", "none", "--max-drop", "1")
    assert result.code == 2 and "--max-drop needs --evaluate" in result.err
    for command in (given, ("linearize", "small_models:small", "--data", "none", "--evaluate")):
        result = cli(*command, "scores_of_heavy:spread", "-o", "none", "--max-drop", "-1")
        assert result.code == 2 and "expected a number that is not negative" in " ".join(
            result.err.split()
        )
