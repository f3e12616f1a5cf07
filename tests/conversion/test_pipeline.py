"""The whole way: what models of every kind become, the report, and what is shipped."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import linexport
from linexport import models
from linexport.artifact import write
from linexport.errors import UsageError
from linexport.manifest import Manifest, describe_files, to_json
from linexport.manifest.records import DimRecord, StateRecord
from linexport.sources import load_model
from linexport.timing.latency import SHORT
from linexport.trace import trace

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def made(
    converted: Callable[..., Path], manifest_of: Callable[[Path], Manifest]
) -> Callable[..., Manifest]:
    return lambda name, **options: manifest_of(converted(name, **options))


def test_a_short_measurement_says_that_it_is_one(
    factories: SimpleNamespace, tmp_path: Path
) -> None:
    source = factories.source("small")
    manifest = linexport.convert(source, tmp_path / "a", lengths=(8,), threads=1)
    assert manifest.options.bench == manifest.measurement.extent == "short"
    assert manifest.measurement.repeats == SHORT.settings.repeats
    assert [row.length for row in manifest.latency] == [8] and manifest.latency[0].artifact_ms > 0
    assert manifest.decode.artifact_ms > 0
    assert manifest.memory is None
    page = (tmp_path / "a" / "report.html").read_text()
    assert "This is a short measurement" in page and "left out of a short measurement" in page


def test_a_measurement_of_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'fast'; expected one of none, short, full"):
        linexport.convert("absent.pt", tmp_path / "a", bench="fast")


def test_an_artifact_is_three_files_that_describe_each_other(
    converted: Callable[..., Path], made: Callable[..., Manifest]
) -> None:
    folder, manifest = converted("small"), made("small")
    assert {p.name for p in folder.iterdir()} == {"model.onnx", "manifest.json", "report.html"}
    model = onnx.load_model(folder / "model.onnx")
    onnx.checker.check_model(model)
    assert [i.name for i in model.graph.input] == [i.name for i in manifest.inputs]
    assert [o.name for o in model.graph.output] == [o.name for o in manifest.outputs]
    assert manifest.files == describe_files(folder)
    assert manifest.states == tuple(
        StateRecord(
            past=f"past_{name}_0",
            present=f"present_{name}_0",
            dtype="float32",
            shape=("batch", *shape),
            op="LinearAttention",
            grows=None,
            initial=0.0,
        )
        for name, shape in (("state", (2, 4, 4)), ("normalizer", (2, 4)))
    )
    assert manifest.environment["torch"] == torch.__version__.partition("+")[0] or (
        manifest.environment["torch"] == torch.__version__
    )
    assert manifest.latency is manifest.decode is manifest.memory is None


def test_a_language_model_is_fused_whole(made: Callable[..., Manifest]) -> None:
    manifest = made("language_model")
    assert manifest.status == "ok"
    assert manifest.fused == {"CausalConvWithState": 2, "FeatureMap": 4, "LinearAttention": 2}
    assert [c.op for c in manifest.lowerings] == [
        "CausalConvWithState",
        "LinearAttention",
    ] * 2
    assert manifest.streaming.passed is True
    assert manifest.streaming.max_relative_error < 5e-5
    assert len(manifest.states) == 6
    assert manifest.warnings == ()


@pytest.mark.parametrize("target", ["ort", "ort-cuda", "onnx", "onnx27"])
def test_every_target_converts(made: Callable[..., Manifest], target: str) -> None:
    manifest = made("small", target=target)
    assert (manifest.status, manifest.target) == ("ok", target)
    assert manifest.streaming.passed is True


def test_tuning_is_recorded(made: Callable[..., Manifest]) -> None:
    options: dict[str, Any] = {"tune": True, "dims": ("seq=1:32:512",)}
    [choice] = made("small", **options).lowerings
    assert {t.lowering for t in choice.tuned} == {"native_padded", "native", "portable"}
    fastest = min(choice.tuned, key=lambda t: t.median_ms)
    assert choice.lowering == fastest.lowering
    assert choice.reason == "fastest when measured here"
    assert all(t.median_ms > 0 for t in choice.tuned)


def test_the_users_range_is_recorded_and_kept_to(
    made: Callable[..., Manifest], converted: Callable[..., Path]
) -> None:
    options: dict[str, Any] = {"dims": ("seq=2:32:64", "batch=1:1:4")}
    manifest = made("small", **options)
    assert manifest.dims["seq"] == DimRecord(min=2, opt=32, max=64, batch=False, traced=16)
    assert manifest.dims["batch"].max == 4
    assert set(manifest.parity.lengths) == {16, 32, 37, 64}
    artifact = linexport.load(converted("small", **options), threads=1)
    with pytest.raises(UsageError, match="at most 64"):
        artifact.run(np.zeros((1, 65, 8), np.float32))


def test_a_seed_is_recorded_and_the_outcome_repeats(
    factories: SimpleNamespace, tmp_path: Path, made: Callable[..., Manifest]
) -> None:
    options: dict[str, Any] = {"bench": False, "threads": 1}
    again = linexport.convert(factories.source("small"), tmp_path / "a", **options)
    assert again.seed == 0
    first = made("small")
    assert again.model_sha256 == first.model_sha256
    assert [c.seed for c in again.parity.cases] == [c.seed for c in first.parity.cases]
    other = linexport.convert(factories.source("small"), tmp_path / "b", seed=50, **options)
    assert other.seed == 50 and other.parity.cases[0].seed == 50


# State


def test_what_mixes_tokens_makes_a_model_stateless_and_is_named(
    made: Callable[..., Manifest],
) -> None:
    manifest = made("averaging")
    assert manifest.status == "ok" and manifest.parity.passed is True
    assert manifest.parity.lengths == (1, 16, 37, 150, 4097)
    assert manifest.states == ()
    assert [i.name for i in manifest.inputs] == ["x"]
    assert manifest.fused == {"LinearAttention": 1}
    assert not manifest.streaming.passed
    reason = manifest.streaming.reason
    assert reason.startswith("exported without state: ")
    assert "ReduceMean mean reduces over all tokens of a call (in small_models.py:" in reason
    assert "What would stream: a mean over the last w tokens needs a state" in reason
    (node,) = manifest.token_flow.nodes
    assert (node.op, node.kind) == ("ReduceMean", "mixing") and manifest.token_flow.mixing == 1


def test_positions_and_causal_convolutions_get_states(made: Callable[..., Manifest]) -> None:
    manifest = made("streaming")
    assert manifest.status == "ok"
    assert manifest.streaming.passed is True
    assert manifest.fused == {"LinearAttention": 1, "CausalConvWithState": 2}
    assert [(s.past, s.op) for s in manifest.states][-1] == ("past_length", "Positions")
    assert manifest.states[-1].shape == (1,)


def test_lengths_at_which_the_original_fails_are_told_and_not_counted(
    made: Callable[..., Manifest],
) -> None:
    manifest = made("short_position")
    assert manifest.status == "ok"
    assert manifest.parity.lengths == (1, 16, 37, 150)
    told = [w for w in manifest.warnings if "original itself fails" in w]
    assert len(told) == 2 and all("4097" in w for w in told)


@pytest.mark.parametrize("name", ["returns_state", "own_state"])
def test_a_model_that_handles_state_itself_keeps_its_inputs_and_outputs(
    factories: SimpleNamespace,
    made: Callable[..., Manifest],
    converted: Callable[..., Path],
    name: str,
) -> None:
    manifest, loaded = made(name), load_model(factories.source(name))
    assert manifest.status == "ok"
    artifact = linexport.load(converted(name), threads=1)
    with torch.no_grad():
        expected = loaded.module(*loaded.args)
    found = artifact.run(*(x.numpy() for x in loaded.args))
    assert len(found) == len(expected)
    for got, wanted in zip(found.values(), expected, strict=True):
        np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "dims"), [("fixed_batch", {"seq"}), ("all_fixed", set())])
def test_dimensions_may_be_fixed(made: Callable[..., Manifest], name: str, dims: set[str]) -> None:
    manifest = made(name)
    assert manifest.status == "ok"
    assert set(manifest.dims) == dims
    assert manifest.inputs[0].shape == (3, "seq" if dims else 16, 8)
    assert bool(manifest.streaming.passed) is bool(dims)


def test_a_model_without_linear_attention_is_converted_with_a_warning(
    made: Callable[..., Manifest],
) -> None:
    manifest = made("epsilon")
    assert manifest.status == "ok"
    assert manifest.fused == {}
    assert (
        "No linear attention was fused. What was withdrawn, or nearly found, is listed as refused, "
        "with the reason."
    ) in manifest.warnings


# Sources


def test_a_checkpoint_and_a_program_convert_like_their_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = models.build("language_model", {"dim": 32, "num_heads": 4, "layers": 1}).eval()
    models.save(model, tmp_path / "model.pt")
    args = model.example_inputs(2, 16, 0)
    program = torch.export.export(model, args, dynamic_shapes=model.dynamic_shapes())
    torch.export.save(program, tmp_path / "model.pt2")
    tokens = np.random.default_rng(0).integers(256, size=(2, 40))
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).numpy()
    for kind, file in (("checkpoint", "model.pt"), ("exported_program", "model.pt2")):
        out = tmp_path / kind
        manifest = linexport.convert(tmp_path / file, out, bench=False, threads=1)
        assert manifest.status == "ok"
        assert manifest.source.kind == kind
        assert re.fullmatch("[0-9a-f]{64}", manifest.source.sha256)
        assert manifest.streaming.passed is True
        [got] = linexport.load(out, threads=1).run(tokens).values()
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5)
        assert linexport.validate(out, threads=1).status == "ok"


# Report


def test_the_report_needs_nothing_from_elsewhere_and_says_the_numbers(
    converted: Callable[..., Path], made: Callable[..., Manifest]
) -> None:
    text = (converted("language_model") / "report.html").read_text()
    parity = made("language_model").parity
    outside = r"(?:src|href|action|data)\s*=\s*[\"']?\s*(?:[a-z]+:)?//|url\(\s*[\"']?(?!data:|#)"
    assert not re.search(outside, text, re.IGNORECASE)
    assert not re.search(
        r"@import|<link(?![^>]*href=.data:)|<iframe|\bfetch\(|<script[^>]+src", text, re.IGNORECASE
    )
    urls = set(re.findall(r"https?://[^\s\"'<)]+", text))
    assert all(u.startswith("http://www.w3.org/") for u in urls)
    plain = re.sub(r"<[^>]+>", " ", text)
    assert f"{parity.max_relative_error:.1e}".split("e")[0] in plain
    assert all(f"{n:,}" in plain or str(n) in plain for n in parity.lengths)
    assert "passed" in plain


def test_a_failed_report_says_so(
    factories: SimpleNamespace, miscompile: Callable[..., None], tmp_path: Path
) -> None:
    from dataclasses import replace

    miscompile("onnx", lambda n: replace(n, attributes={**n.attributes, "scale": 1.01}))
    out = tmp_path / "out"
    linexport.convert(factories.source("small"), out, target="onnx", bench=False, threads=1)
    plain = re.sub(r"<[^>]+>", " ", (out / "report.html").read_text())
    assert "fail" in plain.lower()
    assert "LinearAttention" in plain


# Large weights


def test_large_weights_lie_beside_the_model_and_are_written_once(
    factories: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "EXTERNAL_ABOVE", 100_000)
    source = factories.source("heavy")
    manifest = linexport.convert(source, tmp_path / "out", bench=False, threads=1)
    assert set(manifest.files) == {"model.onnx", "model.onnx.data"}
    assert 256 * 256 * 4 <= manifest.files["model.onnx.data"].bytes < 300_000
    shutil.move(tmp_path / "out", tmp_path / "moved")
    x = np.random.default_rng(0).normal(size=(1, 3, 256)).astype(np.float32)
    got = linexport.load(tmp_path / "moved", threads=1).run(x)["output"]
    module = load_model(source).module
    with torch.no_grad():
        expected = module(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_weights_written_a_second_time_replace_the_first(
    factories: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a model that does not stream is lowered again without state."""
    monkeypatch.setattr(write, "EXTERNAL_ABOVE", 100_000)
    model = trace(load_model(factories.source("heavy"))).model
    sizes = []
    for _ in range(2):
        fresh = onnx.ModelProto()
        fresh.CopyFrom(model)
        write.save_model(fresh, tmp_path)
        sizes.append((tmp_path / "model.onnx.data").stat().st_size)
    assert sizes[0] == sizes[1]


# Shipping


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built where no C++ compiler is found: the install of these tests has compiled already."""
    tmp_path = tmp_path_factory.mktemp("wheel")
    copy = tmp_path / "source"
    ignored = shutil.ignore_patterns(
        ".*", "*.egg-info", "__pycache__", "build", "tests", "shared", "results", "tools"
    )
    shutil.copytree(ROOT, copy, ignore=ignored)
    script = (
        "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=copy,
        capture_output=True,
        text=True,
        env={**os.environ, "CC": "false", "CXX": "false"},
    )
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    """A folder to import the package from, as pip installs it."""
    folder = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path, unpacked: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    tops = {n.split("/")[0] for n in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"linexport"}
    expected = {
        f"{package}/{path.relative_to(ROOT / folder)}"
        for package, folder in (
            ("linexport", "exporter"),
            ("linexport/models", "models"),
            ("linexport/plugins", "plugins"),
        )
        for pattern in ("*.py", "*.html", "*.css", "*.json", "py.typed")
        for path in (ROOT / folder).rglob(pattern)
    }
    assert {"linexport/py.typed", "linexport/report/base.html"} <= expected
    assert expected <= names
    [metadata] = (n for n in names if n.endswith("entry_points.txt"))
    with zipfile.ZipFile(wheel) as file:
        assert "linexport = linexport.__main__:main" in file.read(metadata).decode()
    script = "import linexport, sys; print(linexport.__file__, linexport.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(unpacked)!r}); {script}"],
        capture_output=True,
        text=True,
        cwd=unpacked.parent,
    )
    assert done.stdout.split() == [
        str(unpacked / "linexport" / "__init__.py"),
        linexport.__version__,
    ]


def test_the_pytest_plugin_of_an_installed_package_converts(unpacked: Path, tmp_path: Path) -> None:
    """pytest loads all modules of an installed plugin itself, to rewrite their assertions."""
    (tmp_path / "test_own.py").write_text(
        "import linexport, torch\n"
        "from linexport import models\n\n"
        "def test_equal(linexport_parity):\n"
        f"    assert linexport.__file__.startswith({str(unpacked)!r})\n"
        "    assert 'Rewriting' in type(linexport.__loader__).__name__\n"
        "    layer = models.build('linear_attention_layer', {'num_heads': 2, 'head_dim': 8})\n"
        "    linexport_parity(layer, tuple(torch.randn(3, 2, 8, 16)), lengths=(5,), batch=1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_own.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
    )
    assert "1 passed" in done.stdout, done.stdout


def test_a_manifest_is_returned_as_it_is_written(
    factories: SimpleNamespace, tmp_path: Path
) -> None:
    returned = linexport.convert(
        factories.source("small"), tmp_path / "out", bench=False, threads=1
    )
    written = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert written == to_json(returned)
