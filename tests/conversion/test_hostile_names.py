"""Names of strangers in everything that is generated: code, configuration and pages.

Every generator is given each name, and what it wrote is read by a reader of its language, which
must find that name and the same structure as with a plain one.
"""

from __future__ import annotations

import ast
import csv
import dataclasses
import io
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
import yaml
from google.protobuf import text_format
from markdown_it import MarkdownIt
from onnx import TensorProto as T
from onnx import helper, numpy_helper
from selenium.webdriver.common.by import By

import linexport
from linexport.ci import github, junit
from linexport.ci.outcome import CheckResult
from linexport.graph.dims import DimRange
from linexport.graph.interface import input_records, tensor_records
from linexport.graph.states import State
from linexport.manifest import Manifest
from linexport.manifest.inspected import (
    DrawnNode,
    FoundCandidate,
    GraphPart,
    SourceInspection,
)
from linexport.manifest.records import InputRecord, SourceRecord, StateRecord, TensorRecord
from linexport.package import hub, ray, triton
from linexport.package.destination import Packaging
from linexport.package.triton_config import config, warmup
from linexport.plugins.tensorrt.flavour import TENSORRT
from linexport.report import page
from linexport.report.findings import findings_page
from linexport.system import escape
from linexport.system.terminal import printable, visible_text
from linexport.targets.base import Converted, Options
from linexport.targets.trt import prepared
from linexport.timing import throughput_table
from tests.support import ROOT
from tests.support.browser import browser as opened_browser
from tests.support.serving import eventually, served

PLAIN = "name"
NAMES = (
    'y");std::system("touch CANARY");//',
    "'); __import__('os').system('touch CANARY') #",
    '$(touch CANARY) `touch CANARY` ${HOME} "; touch CANARY; "',
    "*/ abort(); /* // \\",
    "%s%n%d {0} {x!r} {{}} @OUTPUT@ @INPUT@ @CALLS@",
    "a\nb\r\nc: |\n  - d\t",
    "</script></title></svg><img src=x onerror=alert(1)>&lt;",
    "[a](javascript:alert(1)) ![b](c) **d** _e_ | f | `g` <b>",
    "\u202egnp.exe\u2066\u2069\u200b",
    "\x1b[2J\x1b]0;owned\x07\x7f\x9b31m\x00",
    "??/ ??) \\u0022 \\",
    "日本語 😀 ﷽",
    "::error title=a,b::c%0A%25",
    "",
)
GENERATORS = {
    "exporter/debugging/overlay.py": "JSON",
    "exporter/debugging/repro.py": "JSON, and a program without names",
    "exporter/passes/dump.py": "test_differences_of_graphs_are_printable",
    "exporter/targets/trt/prepared.py": "test_a_prepared_folder",
    "exporter/package/folder.py": "JSON",
    "exporter/package/hub.py": "test_a_model_card",
    "exporter/package/ray.py": "test_serve_yaml",
    "exporter/package/transformers_js.py": "JSON",
    "exporter/package/triton.py": "test_triton, JSON and a program without names",
    "exporter/artifact/genai.py": "JSON",
    "exporter/artifact/write.py": "texts of the others",
    "exporter/sources/gguf/__init__.py": "JSON",
    "exporter/system/control_groups.py": "numbers",
    "exporter/system/sandbox.py": "numbers",
    "exporter/timing/peak_memory.py": "a number",
    "plugins/kernels/worker.py": "JSON and machine code",
}
"""Modules that write text files, and what reads these here."""

each_name = pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))


def test_every_module_that_writes_text_is_known_here() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("exporter", "plugins")
        for path in (ROOT / folder).rglob("*.py")
        if ".write_text(" in path.read_text()
    }
    assert found == GENERATORS.keys()


# Code ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``folders(name)``: a folder prepared for TensorRT, of a model with names like that."""

    def prepare(name: str) -> Path:
        folder = tmp_path_factory.mktemp("prepared")
        names = (f"in{name}", f"past{name}", f"out{name}", f"present{name}")
        taken, past, made, present = names
        infos = [helper.make_tensor_value_info(one, T.FLOAT, ["batch", "seq", 8]) for one in names]
        nodes = [
            helper.make_node("MatMul", [taken, "w"], [made]),
            helper.make_node("Identity", [past], [present]),
        ]
        weight = numpy_helper.from_array(np.eye(8, dtype=np.float32), "w")
        graph = helper.make_graph(nodes, "g", infos[:2], infos[2:], [weight])
        opsets = [helper.make_opsetid("", 20)]
        onnx.save(helper.make_model(graph, opset_imports=opsets), folder / "model.onnx")
        shape = ("batch", "seq", 8)
        converted = Converted(
            folder / "model.onnx",
            {
                "batch": DimRange(1, 1, 4, batch=True),
                "seq": DimRange(1, 16, 64),
            },
            tuple(InputRecord(one, "float32", shape) for one in names[:2]),
            tuple(TensorRecord(one, "float32", shape) for one in names[2:]),
            (StateRecord(past, present, "float32", shape, "op"),),
        )
        prepared.assemble(TENSORRT, Options(sms=(89,)), converted)
        return folder

    return prepare


CPP_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"')


def test_a_prepared_folder_has_the_same_code_whatever_the_names(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    plain, literals = folders(PLAIN), []
    for name in NAMES:
        folder = folders(name)
        for file in ("run.cpp", "linexport_engine.h"):
            text, before = (f / file for f in (folder, plain))
            assert CPP_LITERAL.sub('""', text.read_text()) == CPP_LITERAL.sub(
                '""', before.read_text()
            )
            assert text.read_text().isascii()
        found = CPP_LITERAL.findall((folder / "run.cpp").read_text())
        literals += [(f"in{name}", found[1]), (f"out{name}", found[2])]
        _check_python((folder / "run.py").read_text(), [f"in{name}"], (plain / "run.py"))
        script = folder / "build.sh"
        assert script.exists() == bool(prepared.PLAIN.fullmatch(f"in{name}past{name}"))
    assert _said_by_cpp([literal for _, literal in literals], tmp_path) == [
        name.encode() for name, _ in literals
    ]


def test_a_program_in_cpp_runs_with_any_names(tmp_path: Path) -> None:
    """Programs with the names in every place are compiled as one, and run on a stand-in."""
    names = [name for name in NAMES if name and "\0" not in name]
    folders = []
    for i in range(len(names)):
        folder = tmp_path / str(i)
        folder.mkdir()
        folders.append(folder)
        _prepare(folder, names[i:] + names[:i])
    include = '#include "linexport_engine.h"\n'
    programs = [
        (folder / "run.cpp")
        .read_text()
        .replace("int main(", f"int program{i}(")
        .replace(include, "")
        for i, folder in enumerate(folders)
    ]
    calls = "\n".join(f"    program{i}(count, words);" for i in range(len(names)))
    ends = [program.rindex("}") for program in programs]  # main alone needs no return
    parts = [f"{p[:end]}    return 0;\n{p[end:]}" for p, end in zip(programs, ends, strict=True)]
    main = f"int main(int count, char** words) {{\n{calls}\n}}\n"
    (folders[0] / "all.cpp").write_text("\n".join([include, *parts, main]))
    command = ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-trigraphs"]
    command += ["-isystem", str(ROOT / "tests/support/cpp/tensorrt_stand_in"), "all.cpp"]
    subprocess.run([*command, "-o", "run"], cwd=folders[0], check=True)
    lines = [f"in {quote(f'x{n}', safe='')} 1 -1 8\n" for n in names]
    lines += [f"out {quote(f'y{n}', safe='')} 1 -1 8\n" for n in names]
    lines += [f"in {quote(f'past_{n}', safe='')} 1 4\n" for n in names]
    lines += [f"out {quote(f'present_{n}', safe='')} 1 4\n" for n in names]
    (folders[0] / "engine").write_text("".join(lines))
    before = sorted(folders[0].iterdir())
    done = subprocess.run(["./run", "engine"], cwd=folders[0], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert sorted(folders[0].iterdir()) == before  # no canary
    for name in names:
        said = f"16 tokens: {printable(f'y{name}')} has 128 values\n"
        assert done.stdout.count(said.encode()) == 1, name


def _prepare(folder: Path, names: Sequence[str]) -> None:
    """Prepare a folder of a model with an input, an output and a state of each name."""

    def info(name: str, *shape: str | int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, T.FLOAT, shape)

    tokens = ("batch", "seq", 8)
    taken = [info(f"x{n}", *tokens) for n in names] + [info(f"past_{n}", "batch", 4) for n in names]
    made = [info(f"y{n}", *tokens) for n in names]
    made += [info(f"present_{n}", "batch", 4) for n in names]
    graph = helper.make_graph([], "g", taken, made)
    onnx.save(helper.make_model(graph), folder / "model.onnx")
    dims = {"batch": DimRange(1, 1, 4, batch=True), "seq": DimRange(1, 16, 64)}
    states = [
        StateRecord(f"past_{n}", f"present_{n}", "float32", ("batch", 4), "op") for n in names
    ]
    given = input_records(graph.input, {}), tensor_records(graph.output), tuple(states)
    prepared.assemble(TENSORRT, Options(sms=(89,)), Converted(folder / "model.onnx", dims, *given))


def _check_python(text: str, names: list[str], plain: Path | None = None) -> None:
    """Check that a program has these names as constants, and nothing else than the plain one."""
    tree = ast.parse(text)
    constants = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    assert set(names) <= constants
    if plain is not None:
        kinds = [[type(n) for n in ast.walk(ast.parse(t))] for t in (text, plain.read_text())]
        assert kinds[0] == kinds[1]


def _said_by_cpp(literals: list[str], folder: Path) -> list[bytes]:
    """Return the bytes that string literals have, by a compiler that knows trigraphs."""
    entries = ", ".join(f"{{{text}, sizeof({text}) - 1}}" for text in literals)
    (folder / "said.cpp").write_text(
        "#include <cstdio>\nstruct S { char const* text; unsigned long size; };\n"
        f"S const all[] = {{{entries}}};\n"
        "int main() { for (S const& s : all) {\n"
        '    std::printf("%lu ", s.size); std::fwrite(s.text, 1, s.size, stdout); } }\n'
    )
    program = folder / "said"
    command = ["g++", "-std=c++17", "-trigraphs", "-o", str(program), str(folder / "said.cpp")]
    subprocess.run(command, check=True)
    said, found = subprocess.run([program], capture_output=True, check=True).stdout, []
    while said:
        size, _, rest = said.partition(b" ")
        found.append(rest[: int(size)])
        said = rest[int(size) :]
    return found


@each_name
def test_a_word_of_a_shell_is_one_word_or_refused(name: str) -> None:
    try:
        word = escape.shell_word(name)
    except ValueError:
        assert printable(name) != name or "\n" in name
        return
    said = subprocess.run(["sh", "-c", f"printf %s {word}"], capture_output=True, check=True)
    assert said.stdout == name.encode()


# Configuration ------------------------------------------------------------------------------------


@each_name
def test_triton(name: str, sample_manifest: Manifest, tmp_path: Path) -> None:
    def strings(called: str) -> tuple[list[str], list[str]]:
        inputs = (InputRecord(f"in{called}", "float32", ("batch", "seq", 8)),)
        outputs = (TensorRecord(f"out{called}", "float32", ("batch", "seq", 8)),)
        manifest = replace(sample_manifest, inputs=inputs, outputs=outputs, states=())
        job = Packaging(tmp_path, manifest, tmp_path, called)
        state = State(f"past{called}", f"present{called}", "float32", ("batch", 4), "op", None, 1.0)
        lines = [*config(job, "tensorrt", [state], 4, 60), *warmup(inputs)]
        tokens = text_format.Tokenizer(lines)
        found, others = [], []
        while not tokens.AtEnd():
            if tokens.token[:1] in ('"', "'"):
                found.append(tokens.ConsumeString())
            else:
                others.append(tokens.token)
                tokens.NextToken()
        return found, others

    found, others = strings(name)
    assert others == strings(PLAIN)[1]
    assert {f"in{name}", f"out{name}", f"past{name}", f"present{name}", name} <= set(found)


@each_name
def test_serve_yaml(name: str, sample_manifest: Manifest, tmp_path: Path) -> None:
    options = {"artifact": f"/models/{name}"}
    ray.DESTINATION.write(Packaging(tmp_path, sample_manifest, tmp_path, name, options))
    text = (tmp_path / "serve.yaml").read_text()
    (application,) = yaml.safe_load(text)["applications"]
    assert application["name"] == application["args"]["name"] == name
    assert application["args"]["artifact"] == str(Path(f"/models/{name}"))
    assert application.keys() == {"name", "route_prefix", "import_path", "args", "deployments"}
    assert text.isascii()


def test_a_state_of_the_python_model_is_data(sample_manifest: Manifest, tmp_path: Path) -> None:
    for name in NAMES:
        inputs = (InputRecord(name, "float32", ("batch", 8)),)
        job = Packaging(tmp_path, replace(sample_manifest, inputs=inputs, states=()), tmp_path, "m")
        triton._write_python(job, tmp_path, [], False, None)
        assert json.loads((tmp_path / "states.json").read_text())["inputs"][0]["name"] == name
        ast.parse((tmp_path / "model.py").read_text())


# Pages --------------------------------------------------------------------------------------------


class _Reader(HTMLParser):
    """Collects tags with their attributes, and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.texts: list[str] = []
        self.values: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "wbr":  # long names may wrap
            self.tags.append((tag, tuple(key for key, _ in attrs)))
        else:
            self.texts.append("\0")
        self.values += [value or "" for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts).replace("\0", "")


def _read(page: str) -> _Reader:
    reader = _Reader()
    reader.feed(page)
    reader.close()
    return reader


def _named(manifest: Manifest, name: str) -> Manifest:
    """Return a manifest with the name wherever a stranger's text may be."""
    source = SourceRecord("onnx", f"location{name}", "0" * 64, f"description{name}")
    rejected = manifest.rejected and tuple(
        replace(r, where=f"where{name}", reason=f"reason{name}", line=f"line{name}")
        for r in manifest.rejected
    )
    return replace(
        manifest,
        artifact=f"artifact{name}",
        source=source,
        warnings=(f"warning{name}",),
        inputs=tuple(replace(i, name=f"{i.name}{name}") for i in manifest.inputs),
        outputs=tuple(replace(o, name=f"{o.name}{name}") for o in manifest.outputs),
        states=(),
        rejected=rejected,
        environment={**manifest.environment, "machine": f"machine{name}"},
    )


@each_name
def test_a_report_has_the_same_elements_whatever_the_names(
    name: str, sample_manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "drawings", lambda *_: {})  # they have no names, and take a second
    reader = _read(page.artifact_page(_named(sample_manifest, name)))
    assert reader.tags == _read(page.artifact_page(_named(sample_manifest, PLAIN))).tags
    shown = printable(name)
    texts = [f"{part}{shown}" for part in ("location", "warning", "reason")]
    for text in (*texts, SourceRecord("onnx", "", "0" * 64, f"description{name}").description):
        assert " ".join(text.split()) in " ".join(reader.text.split())
    assert all(c.isprintable() or c in "\n" for c in reader.text)
    codes = [t for t in reader.texts if "np.zeros" in t]
    assert codes
    given = [f"{i.name}{name}" for i in sample_manifest.inputs]
    for code in codes:
        _check_python(code, given[:1])


def _inspection(name: str) -> SourceInspection:
    nodes = (
        DrawnNode(f"x{name}", f"Op{name}", f"note{name}", f"shape{name}", "input"),
        DrawnNode(f"y{name}", f"Op{name}", "", "", "node"),
    )
    part = GraphPart(nodes, ((f"x{name}", f"y{name}"),))
    found = {f.name: () for f in dataclasses.fields(SourceInspection)}
    return SourceInspection(
        **{
            **found,
            "token_flow": None,
            "source": SourceRecord("onnx", f"location{name}", "0" * 64, f"description{name}"),
            "unmatched": (FoundCandidate(f"where{name}", f"reason{name}", f"line{name}", part),),
            "traced": 3,
            "rewritten": 2,
            "warnings": (f"warning{name}",),
        }
    )


@each_name
def test_findings_and_their_drawings(name: str) -> None:
    reader = _read(findings_page(_inspection(name)))
    assert reader.tags == _read(findings_page(_inspection(PLAIN))).tags
    assert " ".join(printable(f"Reason{name}").split()) in " ".join(reader.text.split())
    assert all(c.isprintable() or c in "\n" for c in reader.text)


OWNED = (
    '"><script>window.owned = 1</script><img src=x onerror="window.owned = 1">',
    "' onmouseover='window.owned = 1' autofocus onfocus='window.owned = 1' x='",
    "javascript:window.owned=1",
    '--></style></svg><svg onload="window.owned = 1">{{7*7}}${window.owned = 1}',
)
"""Names that set a variable where a browser takes them for more than text."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_browser() as found:
        yield found


@pytest.mark.services
def test_no_name_runs_in_a_browser(browser: Any, sample_manifest: Manifest, tmp_path: Path) -> None:
    def opened(text: str) -> tuple[int, list[str]]:
        (tmp_path / "page.html").write_text(text)
        browser.get((tmp_path / "page.html").as_uri())
        return _loaded(browser)

    for name in (*OWNED, "".join(NAMES + OWNED)):
        report = page.artifact_page(_named(sample_manifest, name))
        assert opened(report) == opened(page.artifact_page(sample_manifest))
        assert opened(findings_page(_inspection(name))) == opened(findings_page(_inspection(PLAIN)))


def _loaded(browser: Any) -> tuple[int, list[str]]:
    """Return what a page loads and runs: elements that do, and complaints about them."""
    time.sleep(0.05)  # of events
    assert browser.execute_script("return window.owned === undefined")
    loads = "return document.querySelectorAll('script, img, iframe, object, embed').length"
    messages = [entry["message"] for entry in browser.get_log("browser")]
    return browser.execute_script(loads), messages


@pytest.mark.services
def test_no_name_of_a_model_runs_on_the_page_of_a_server(
    browser: Any, converted: Callable[..., Path]
) -> None:
    opened = linexport.load(converted("language_model"), threads=1)
    for name in ("".join(OWNED), NAMES[9]):
        with served(opened, name=name) as server:
            browser.get(server.url)
            eventually(lambda: browser.find_element(By.ID, "mode").text)
            place = browser.find_element(By.ID, "model")
            assert place.get_property("childElementCount") == 0
            shown = place.get_property("textContent")
            assert len(shown) >= len(name) and shown.isprintable()
            assert _loaded(browser) == (1, [])


# Continuous integration ---------------------------------------------------------------------------


def _checks(name: str) -> list[CheckResult]:
    return [CheckResult("parity", f"check{name}", f"found{name}", f"allowed{name}", False)]


@each_name
def test_reports_for_continuous_integration(name: str) -> None:
    checks = _checks(name)
    root = ElementTree.fromstring(junit.junit(f"artifact{name}", checks))
    (case,) = root.iter("testcase")
    assert case.attrib["name"] == printable(f"check{name}")
    (line,) = github.workflow_commands(f"artifact{name}", checks)
    assert line.isprintable() and line.startswith("::error title=linexport artifact")
    title, _, message = line.removeprefix("::error title=").partition("::")
    assert "," not in title and ":" not in title
    assert (
        message.replace("%0A", "\n")
        .replace("%25", "%")
        .startswith(printable(f"check{name}".replace("\r\n", "\n")))
    )
    text = github.summary(f"artifact{name}", checks)
    found, others = _markdown(text)
    plain = _markdown(github.summary(f"artifact{PLAIN}", _checks(PLAIN)))[1]
    assert others == plain
    assert " ".join(printable(f"check{name}").split()) in found


def _markdown(text: str) -> tuple[list[str], list[str]]:
    """Return the texts of inline elements of Markdown, and the types of all elements."""
    found, kinds = [], []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        kinds.append(token.type)
        if token.type == "inline":
            found.append("".join(c.content for c in token.children or ()))
            kinds += sorted({c.type for c in token.children or ()} - {"text_special"})
    return found, kinds


@each_name
def test_a_model_card(name: str, sample_manifest: Manifest, tmp_path: Path) -> None:
    def card(text: str) -> tuple[Any, list[str], list[str]]:
        source = replace(
            sample_manifest.source, kind="factory", location=f"at{text}", description=f"of{text}"
        )
        manifest = replace(
            sample_manifest,
            source=source,
            target=f"for{text}",
            linexport=f"by{text}",
            warnings=(f"warned{text}",),
            environment={**sample_manifest.environment, "cpu": f"on{text}"},
        )
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        hub.DESTINATION.write(Packaging(tmp_path, manifest, folder, "model", {}))
        written = (folder / "README.md").read_text()
        _, head, body = written.split("---\n", 2)
        return yaml.safe_load(head), *_markdown(body)

    head, found, kinds = card(name)
    plain_head, _, plain = card(PLAIN)
    assert (head, kinds) == (plain_head, plain)
    for text in (f"warned{name}", f"on{name}"):
        assert " ".join(printable(text).split()) in found


@each_name
def test_tables_of_throughput(name: str, sample_manifest: Manifest) -> None:
    rows = [
        throughput_table.ThroughputRow(
            *("artifact", f"pp{name}", "pp", 1, 0, None, None, None, None), reason=f"no{name}"
        )
    ]
    found, kinds = _markdown(throughput_table.markdown(rows))
    plain = [replace(rows[0], test=f"pp{PLAIN}", reason=f"no{PLAIN}")]
    assert kinds == _markdown(throughput_table.markdown(plain))[1]
    assert " ".join(printable(f"no{name}").split()) in found
    (read,) = csv.DictReader(io.StringIO(throughput_table.csv(rows), newline=""))
    assert read["reason"] == f"no{name}"


# Terminals ----------------------------------------------------------------------------------------


@each_name
def test_a_terminal_obeys_no_name(name: str) -> None:
    assert all(c.isprintable() or c == "\n" for c in printable(name))
    shown = visible_text(name)
    assert not set("\x1b\x07\x7f\x9b\0\r\u202e\u2066") & set(shown)
    assert "日本語" not in name or shown == name


def test_commands_print_through_one_function() -> None:
    direct = []
    for path in (ROOT / "exporter/cli").glob("*.py"):
        if path.name == "output.py":
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in (
                *("typer.echo", "print", "Console", "typer.secho"),
            ):
                direct.append(f"{path.name}: {ast.unparse(call)[:40]}")
    assert sorted(direct) == [
        "__init__.py: typer.echo(context.get_help())",
        "__init__.py: typer.echo(f'linexport {__version__}')",
    ]
