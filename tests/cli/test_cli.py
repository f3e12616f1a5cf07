"""The command line: exit codes, JSON alone on standard output, messages without tracebacks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import linexport
from tests.support import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")

COMMANDS = ("convert", "validate", "bench", "inspect", "doctor")
QUICK = ("--no-bench", "--threads", 1)

MODULES = ROOT / "tests" / "support" / "scripts" / "modules_of_a_conversion.py"

Cli = Callable[..., Any]


def refused(result: Any, code: int) -> str:
    """The message of an error that was told in JSON."""
    found = result.json()
    assert result.code == code
    assert set(found) == {"status", "exit_code", "message"}
    assert (found["status"], found["exit_code"]) == ("error", code)
    assert "Traceback" not in result.err
    return str(found["message"])


# Starting


@pytest.mark.smoke
def test_help_is_answered_without_the_heavy_libraries() -> None:
    script = (
        "import sys; sys.argv = ['linexport', *sys.argv[1:]]\n"
        "from linexport.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'onnxscript', 'onnx_graphsurgeon', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    for arguments in (["--help"], ["convert", "--help"], ["--version"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True
        )
        assert done.returncode == 0
        assert done.stderr.strip() == "[]"
        assert done.stdout


def test_help_names_every_command(cli: Cli) -> None:
    for arguments in ((), ("--help",), ("-h",)):
        assert all(command in cli(*arguments).out for command in COMMANDS)
    for command in COMMANDS:
        result = cli(command, "--help")
        assert result.code == 0 and "--json" in result.out


def test_help_lists_targets_without_importing_any() -> None:
    code = (
        "import sys; from linexport.cli.options import target_names; names = target_names();"
        "print(names, [m for m in sys.modules if m in ('torch', 'onnx', 'linexport.targets.ort')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        done.stdout.strip()
        == "['onnx', 'onnx27', 'ort', 'ort-cuda', 'tensorrt', 'tensorrt-rtx'] []"
    )


def test_the_version(cli: Cli) -> None:
    assert cli("--version").out == f"linexport {linexport.__version__}\n"


def test_it_is_a_module_and_a_program() -> None:
    program = Path(sys.executable).parent / "linexport"
    for command in ([sys.executable, "-m", "linexport"], [str(program)]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True)
        assert done.stdout == f"linexport {linexport.__version__}\n"


# Output that nobody reads


def unread(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program with standard output, and errors, in a pipe whose reader has left."""
    reading, writing = os.pipe()
    os.close(reading)
    streams = {"stdout": writing, "stderr": writing}
    if "--help" in arguments:
        streams["stderr"] = subprocess.PIPE
    try:
        command = [sys.executable, "-m", "linexport", *arguments]
        return subprocess.run(command, text=True, **streams)
    finally:
        os.close(writing)


def test_output_that_nobody_reads_changes_no_exit_code() -> None:
    """As of ``linexport validate artifact | head -3``."""
    done = unread("convert", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert unread("no-such-command").returncode == 2


# JSON and exit codes


ABSENT = (
    "linexport.plugins.tensorrt",
    "linexport.plugins.kernels",
    "linexport.targets.trt",
    "linexport.targets.tensorrt",
    "linexport.targets.tensorrt_rtx",
    "linexport.targets.onnx27",
    "linexport.targets.ort_cuda",
    "linexport.linearization",
    "linexport.maps",
    "linexport.models.feed_forward",
    "tensorrt",
    "tensorrt_rtx",
)
"""Triton is not among them: PyTorch imports it itself, where it is installed, to trace."""


@pytest.fixture(scope="module")
def whole(
    program: Cli, factories: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """A conversion in a process of its own, with everything measured."""
    folder = tmp_path_factory.mktemp("whole")
    out, modules = folder / "out", folder / "modules.json"
    options = ("-o", out, "--json", "--lengths", "8,33", "--bench", "full")
    result = program(
        *("convert", factories.source("small"), *options), program=(str(MODULES), str(modules))
    )
    return SimpleNamespace(result=result, out=out, modules=json.loads(modules.read_text()))


@pytest.mark.services
def test_a_conversion_to_ort_imports_what_it_needs(whole: SimpleNamespace) -> None:
    """Nothing of TensorRT, of kernels or of optional rooms."""
    assert "linexport.targets.ort" in whole.modules
    assert [
        m for m in whole.modules if m in ABSENT or m.startswith(tuple(f"{a}." for a in ABSENT))
    ] == []


@pytest.mark.services
def test_a_whole_conversion_in_a_process_of_its_own(whole: SimpleNamespace) -> None:
    """What scripts rely on."""
    result, out = whole.result, whole.out
    assert result.code == 0
    assert result.err == ""
    found = result.json()
    assert found == json.loads((out / "manifest.json").read_text())
    assert (found["status"], found["artifact"], found["target"]) == ("ok", str(out), "ort")
    assert found["fused"] == {"LinearAttention": 1}
    assert found["rejected"] == []
    assert found["parity"]["passed"] is True
    assert found["parity"]["max_relative_error"] > 0
    assert found["parity"]["lengths"] == [1, 16, 37, 150, 4097]
    assert found["streaming"]["passed"] is True and found["streaming"]["reason"] is None
    assert [(r["length"], r["batch"]) for r in found["latency"]] == [(8, 1), (33, 1)]
    for row in found["latency"]:
        for name in ("artifact_ms", "plain_export_ms", "pytorch_ms"):
            assert row[name] > 0 or name.removesuffix("_ms") in row["reasons"]
    assert found["decode"]["artifact_ms"] > 0
    assert set(found["decode"]["reasons"]) == {"plain_export", "pytorch"}
    assert [row["length"] for row in found["memory"]] == [33]
    for name in ("artifact", "plain_export", "pytorch"):
        assert found["memory"][0][f"{name}_mb"] is not None, found["memory"][0]["reasons"]
    assert [set(choice) for choice in found["lowerings"]] == [
        {"node", "op", "lowering", "reason", "tuned"}
    ]
    assert [s["name"] for s in found["stages"]] == [
        *("load", "trace", "rewrite", "lower", "write", "streaming", "parity", "library", "measure")
    ]


@pytest.mark.smoke
def test_nothing_but_json_is_on_standard_output_whatever_the_model_prints(
    cli: Cli, factories: SimpleNamespace, tmp_path: Path
) -> None:
    source = factories.source("printing")
    result = cli("convert", source, "-o", tmp_path / "out", "--json", *QUICK)
    assert result.code == 0
    assert result.json()["status"] == "ok"
    assert "{chatter of the model}" in result.err
    assert "{chatter of the factory}" in result.err
    assert cli("inspect", source, "--json").json()["kind"] == "factory"
    assert cli("validate", tmp_path / "out", "--source", source, "--json").json()["status"] == "ok"


def test_every_command_answers_in_json(
    cli: Cli, factories: SimpleNamespace, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linexport.timing.baselines.peak_megabytes", lambda *a: (1.0, None))
    original = ("--source", factories.source("small"))
    validated = cli("validate", artifact, *original, "--json", "--seed", 5)
    assert validated.code == 0
    assert (validated.json()["status"], validated.json()["seed"]) == ("ok", 5)
    assert {c["seed"] for c in validated.json()["parity"]["cases"]} == set(range(5, 17))
    measured = cli("bench", artifact, *original, "--json", "--lengths", "4", "--threads", 1)
    assert measured.code == 0
    assert [r["length"] for r in measured.json()["latency"]] == [4]
    assert measured.json()["measurement"]["threads"] == 1
    assert json.loads((artifact / "manifest.json").read_text()) == measured.json()
    assert "report.html" in {p.name for p in artifact.iterdir()}
    inspected = cli("inspect", artifact, "--json").json()
    assert inspected["kind"] == "artifact"
    op = inspected["ops"][0]
    assert (op["op"], op["d_k"], op["d_v"], op["lowering"]) == (
        *("LinearAttention", 4, 4, "native_padded"),
    )
    inspected = cli("inspect", factories.source("small"), "--json").json()
    assert inspected["kind"] == "factory" and len(inspected["ops"]) == 1
    examined = cli("doctor", "--json")
    assert examined.code == 0
    assert examined.json()["ok"] is True


def test_without_json_people_are_told_the_same(
    cli: Cli, factories: SimpleNamespace, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = cli("convert", factories.source("layer"), "-o", out, *QUICK)
    assert result.code == 0
    assert "equals the PyTorch original" in result.out.replace("\n", " ")
    assert f"artifact  {out}\n" in result.out
    assert f"report    {out / 'report.html'}\n" in result.out
    assert "Comparing it with the original" in result.err
    assert "LinearAttention" in cli("inspect", out).out
    found = " ".join(cli("inspect", factories.source("layer")).out.split())
    assert "heads of 20 x 20" in found and "dimension seq: 1 to any" in found
    assert cli("validate", out, "--source", factories.source("layer"), "--threads", 1).code == 0
    doctor = cli("doctor")
    assert doctor.code == 0 and "CPUExecutionProvider" in doctor.out


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("table", 4, "return doubled + self.table"),
        ("branch", 6, "if x.sum() > 0:"),
        ("absent", 2, "there is no 'absent'"),
    ],
)
def test_a_model_that_cannot_be_converted(
    cli: Cli, factories: SimpleNamespace, tmp_path: Path, name: str, code: int, message: str
) -> None:
    source = factories.source(name)
    result = cli("convert", source, "-o", tmp_path / "out", "--json", *QUICK)
    assert message in refused(result, code)
    result = cli("convert", source, "-o", tmp_path / "out", *QUICK)
    assert result.code == code
    assert result.out == ""
    assert result.err.count("Error: ") == 1 and message in result.err
    assert "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == []


OUT = ("-o", "OUT")
SOURCE = ("small_models:small",)

BAD_INPUT = [
    # What the parser of the command line refuses.
    (("convert",), "Missing"),
    (("convert", *SOURCE, *OUT, "--seed", "x"), "Invalid value for '--seed'"),
    (("convert", *SOURCE, *OUT, "--threads", "-1"), "Invalid value for '--threads'"),
    (("convert", *SOURCE, *OUT, "--colour", "red"), "No such option"),
    (("convert", *SOURCE, "more", *OUT), "unexpected extra argument"),
    (("conwert",), "No such command"),
    # What convert refuses.
    (("convert", *SOURCE, *OUT, "--target", "cuda"), "Unknown target 'cuda'; expected one of"),
    (("convert", *SOURCE, *OUT, "--dim", "seq"), "not of the form NAME=MIN:OPT:MAX"),
    (("convert", *SOURCE, *OUT, "--dim", "seq=1:2"), "not of the form NAME=MIN:OPT:MAX"),
    (("convert", *SOURCE, *OUT, "--dim", "seq=9:5:7"), "expected 1 <= MIN <= OPT <= MAX"),
    (("convert", *SOURCE, *OUT, "--dim", "seq=1:5:3"), "expected 1 <= MIN <= OPT <= MAX"),
    (("convert", *SOURCE, *OUT, "--dim", "len=1:2:3"), "no such dimension; it has batch, seq"),
    (("convert", *SOURCE, *OUT, "--dim", "seq=1:2:3", "--dim", "seq=1:2:3"), "given twice"),
    *(
        (("convert", *SOURCE, *OUT, "--lengths", text), "expected positive integers")
        for text in ("", ",", "64,", "0", "-3", "a", "64;128", "6.4")
    ),
    (("convert", "small_models", *OUT), "no file or folder"),
    (("convert", "small_models:", *OUT), "neither a file nor package.module:callable"),
    (("convert", "no_such_module:f", *OUT), "no module named no_such_module"),
    (("convert", "", *OUT), ""),
    # What the other commands refuse.
    (("validate", "OUT"), "not a folder"),
    (("bench", "OUT"), "not a folder"),
    (("bench", "OUT", "--lengths", "x"), "expected positive integers"),
    (("validate", "n" * 300), ""),
    (("inspect", "OUT"), "no file or folder"),
    (("inspect", "n" * 300), ""),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT, ids=lambda x: str(x)[:60])
def test_bad_input_is_a_usage_error(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(cli(*arguments, "--json"), 2)
    plain = cli(*arguments)
    assert plain.code == 2
    assert plain.out == "" and "Error" in plain.err and "Traceback" not in plain.err
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_kind_is_unsupported(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"not a model")
    refused(cli("inspect", path, "--json"), 4)
    refused(cli("convert", path, "-o", tmp_path / "out", "--json"), 4)


def test_an_environment_that_lacks_something_exits_5(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = linexport.system.environment.version
    monkeypatch.setattr(
        "linexport.system.environment.version", lambda n: None if n == "onnxscript" else right(n)
    )
    result = cli("doctor", "--json")
    assert result.code == 5
    assert result.json()["ok"] is False
    missing = {item["what"]: item["install"] for item in result.json()["missing"]}
    assert missing["onnxscript"] == "pip install onnxscript"
    assert cli("doctor").code == 5


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_provider_that_does_not_work_is_said(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    names = ["CPUExecutionProvider", "ImaginaryExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)
    first, second = cli("doctor", "--json").json()["providers"]
    assert first["works"] is True and second["works"] is False and second["error"]


def test_a_fault_of_linexport_exits_1_without_a_traceback(
    cli: Cli,
    factories: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    artifact: Path,
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError("of all things\nand more")

    monkeypatch.delenv("LINEXPORT_TRACEBACK", raising=False)
    monkeypatch.setattr("linexport.conversion.context.load_model", fail)
    result = cli("convert", factories.source("small"), "-o", tmp_path / "out", "--json")
    message = refused(result, 1)
    assert "ZeroDivisionError: of all things" in message and "LINEXPORT_TRACEBACK=1" in message
    monkeypatch.setenv("LINEXPORT_TRACEBACK", "1")
    monkeypatch.setattr(
        sys, "argv", ["linexport", "convert", factories.source("small"), "-o", str(tmp_path / "o")]
    )
    with pytest.raises(ZeroDivisionError):
        linexport.cli.main()


def test_an_interruption_exits_130(
    cli: Cli, factories: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("linexport.conversion.context.load_model", interrupt)
    result = cli("convert", factories.source("small"), "-o", tmp_path / "out", "--json")
    assert "Interrupted" in refused(result, 130)
    assert list(tmp_path.iterdir()) == []


# Checking again


def test_validating_something_else_is_refused(
    cli: Cli, factories: SimpleNamespace, artifact: Path
) -> None:
    model = artifact / "model.onnx"
    model.write_bytes(model.read_bytes() + b"\0")
    assert "is damaged" in refused(cli("validate", artifact, "--json"), 2)
    model.unlink()
    assert "model.onnx is missing" in refused(cli("bench", artifact, "--json"), 2)
    assert "model.onnx is missing" in refused(cli("inspect", artifact, "--json"), 2)
    model.write_bytes(b"\xff" * 100)
    assert "cannot be read" in refused(cli("inspect", artifact, "--json"), 2)


def test_validating_a_changed_original_is_refused(cli: Cli, tmp_path: Path) -> None:
    from linexport import models

    config = {"num_heads": 2, "head_dim": 8}
    path, out = tmp_path / "model.pt", tmp_path / "out"
    models.save(models.build("linear_attention_layer", config), path)
    assert cli("convert", path, "-o", out, *QUICK).code == 0
    path.rename(tmp_path / "moved.pt")
    refused(cli("validate", out, "--json"), 2)
    assert cli("validate", out, "--json", "--source", tmp_path / "moved.pt").code == 0
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    models.save(models.build("linear_attention_layer", {**config, "scale": 0.5}), path)
    message = refused(cli("validate", out, "--json"), 2)
    assert "is not the model the artifact was made from" in message
    assert re.search(r"[0-9a-f]{64}.*[0-9a-f]{64}", message)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_validating_finds_what_has_become_wrong(
    cli: Cli, artifact: Path, monkeypatch: pytest.MonkeyPatch, factories: SimpleNamespace
) -> None:
    module = sys.modules.get("small_models")
    assert module is not None
    monkeypatch.setattr(module.Attend, "forward", lambda self, x: module.attend(x)[0] * 1.001)
    original = ("--source", factories.source("small"))
    before = {path.name: path.read_bytes() for path in artifact.iterdir()}
    result = cli("validate", artifact, *original, "--json", "--threads", 1)
    assert result.code == 3 and result.json()["status"] == "parity_failed"
    assert {path.name: path.read_bytes() for path in artifact.iterdir()} == before
    linexport.load(artifact)
    result = cli("validate", artifact, *original, "--json", "--threads", 1, "--record")
    assert result.code == 3 and result.json()["status"] == "parity_failed"
    with pytest.raises(linexport.errors.ParityError):
        linexport.load(artifact)
    assert "parity" in (artifact / "report.html").read_text().lower()
