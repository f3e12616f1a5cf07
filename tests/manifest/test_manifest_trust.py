"""A manifest from a stranger: damage is one error, nothing in it is called, the graph agrees."""

from __future__ import annotations

import copy
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import linexport
from linexport.errors import UsageError
from linexport.graph.interface import check_interface
from linexport.manifest import describe_files, from_json, json_text, read, to_json
from linexport.sources.onnx_file.skeleton import skeleton

SEED = 20261122
VALUES = (
    None, True, -1, 0, 3.5, 1e300, 2**62, -(2**62), "", "text", "NaN", "../x", "\0", [], {}, [None],
    {"a": {}}, [[[[[[]]]]]],
)  # fmt: skip


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every node and leaf of nested JSON, of long lists the first two items."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(min(2, len(value))))
    for key in keys:
        yield (*here, key)
        yield from places(value[key], (*here, key))


def mutants(content: dict[str, Any], step: int) -> Iterator[tuple[str, str]]:
    """What was done, and the text: values replaced, keys taken and added, nesting, bad numbers."""
    choose = random.Random(SEED)
    changes = (
        (path, value)
        for path in places(content)
        for value in (*choose.sample(VALUES, 3), "DEEP", "HUGE", "MISSING", "EXTRA")
    )
    for path, value in itertools.islice(changes, 0, None, step):
        mutant = copy.deepcopy(content)
        holder = mutant
        for key in path[:-1]:
            holder = holder[key]
        if value == "MISSING":
            holder.pop(path[-1])
        elif value == "EXTRA" and isinstance(holder[path[-1]], dict):
            holder[path[-1]]["unheard_of"] = 1
        else:
            holder[path[-1]] = value
        written = json.dumps(mutant)
        if value == "DEEP":
            written = written.replace('"DEEP"', "[" * 5000 + "]" * 5000)
        if value == "HUGE":
            written = written.replace('"HUGE"', "9" * 5000)
        yield f"{path}: {value!r}", written


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("streaming", 9),
        *(pytest.param(n, 1, marks=pytest.mark.slow) for n in ("small", "streaming")),
    ],
)
def test_every_mutation_loads_or_is_one_error(
    converted: Callable[..., Path], name: str, step: int
) -> None:
    """One of so many, all of them where there is time."""
    folder = converted(name)
    graph = skeleton(folder / "model.onnx")
    counts = {"loaded": 0, "refused": 0}
    for what, written in mutants(to_json(read(folder)), step):
        try:
            found = from_json(json_text.loads(written))
            check_interface(found, graph, "it")
        except (UsageError, ValueError):
            counts["refused"] += 1
            continue
        except Exception as error:
            pytest.fail(f"{what}: {type(error).__name__}: {error}")
        assert from_json(to_json(found)) == found
        counts["loaded"] += 1
    assert counts["refused"] > 1000 / step and counts["loaded"] > 100 / step


def edited(folder: Path, change: Callable[[Any], object]) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def growing(content: Any) -> None:
    content["states"][0] |= {"grows": 1}


def fewer_states(content: Any) -> None:
    content["states"].pop()


def renamed(content: Any, past: str, present: str) -> None:
    """Give a state other names, such as those of NumPy's parameters or a path."""
    state = content["states"][0]
    for name, new, records in (
        (state["past"], past, "inputs"),
        (state["present"], present, "outputs"),
    ):
        next(r for r in content[records] if r["name"] == name)["name"] = new
    state.update(past=past, present=present)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["states"][0].update(initial=1.5), r"is said to begin with 1\.5, not 0"),
        (growing, r"\$\.states\[0\]\.grows is 1"),
        (fewer_states, r"the state past_normalizer_0 is in the model alone"),
        (lambda c: c["states"].clear(), r"\$\.states is empty"),
        (lambda c: c["states"][0].update(past="x"), r"\$\.states\[0\]"),
        (lambda c: c["states"][0].update(present="output"), r"\$\.states\[0\]"),
        (lambda c: renamed(c, "file", "present_file"), r"not past_\.\.\. and present_"),
        (lambda c: renamed(c, "past_../x", "present_../x"), r"not past_\.\.\. and present_"),
        (lambda c: c["states"][0].update(shape=["batch", 2, 4, 5]), r"\$\.states\[0\] is float32"),
        (lambda c: c["inputs"][0].update(name="y"), r"the input (x|y) is in the m"),
        (lambda c: c["inputs"][0].update(dtype="float64"), "x is said to be float64"),
        (lambda c: c["inputs"].reverse(), "in this order"),
        (lambda c: c["outputs"][0].update(shape=["batch", "seq", 9]), "output is said to be"),
        (lambda c: c["inputs"][0]["shape"].__setitem__(0, 2**31 - 1), "x is said to be float32"),
        (lambda c: c["outputs"][0].update(shape=["batch", "batch", 8]), "output is said to be"),
        (lambda c: c["dims"].update(more=c["dims"]["seq"]), r"dims\.more is in the shape of no"),
        (lambda c: c["dims"].pop("seq"), r"\$\.dims has no 'seq'"),
        (lambda c: c["dims"]["seq"].update(min=9, max=8), "not in order"),
        (lambda c: c["files"].pop("model.onnx"), r"\$\.model_sha256 is not that of"),
        (lambda c: c["files"].update({"../x": c["files"]["model.onnx"]}), r"'\.\./x', which is"),
        (lambda c: c.update(model_sha256="0" * 64), r"\$\.model_sha256 is not that of"),
        (lambda c: c["source"].update(kind="checkpoint"), r"\$\.source\.sha256 is None"),
        (lambda c: c["source"].update(location="model.pt"), r"is not package\.module:callable"),
    ],
)  # fmt: skip
def test_what_contradicts_the_graph_is_refused_by_load(
    artifact: Path, change: Callable[[Any], object], words: str
) -> None:
    linexport.load(artifact, threads=1)
    edited(artifact, change)
    with pytest.raises(UsageError, match=words):
        linexport.load(artifact, threads=1)


def test_a_target_that_is_not_there_is_refused_by_every_command(
    artifact: Path, cli: Callable[..., Any]
) -> None:
    edited(artifact, lambda c: c.update(target="nonsense"))
    for command in ("inspect", "validate"):
        result = cli(command, str(artifact))
        assert result.code == 2
        assert "is for the target 'nonsense'; expected one of onnx, onnx27," in result.err


def test_a_description_is_one_line_of_printed_characters(
    artifact: Path, cli: Callable[..., Any]
) -> None:
    edited(artifact, lambda c: c["source"].update(description="a\x1b[31m\n\u202everified"))
    manifest = linexport.load(artifact, threads=1).manifest
    assert manifest.source.description == r"a\x1b[31m\n\u202everified"
    assert r"a\x1b[31m\n\u202everified, target" in repr(manifest)
    shown = cli("inspect", str(artifact)).out
    assert shown.startswith(r"a\x1b[31m\n\u202everified (artifact: ")


def test_a_file_beside_the_model_is_covered(artifact: Path) -> None:
    """Of the same size, its digest alone tells."""
    path = artifact / "tokenizer.json"
    path.write_bytes(b"{}")
    content = describe_files(artifact)
    edited(artifact, lambda c: c.update(files={n: vars(f) for n, f in content.items()}))
    linexport.load(artifact, threads=1)
    path.write_bytes(b"[]")
    for opened in (linexport.load, linexport.validate, linexport.bench):
        with pytest.raises(UsageError, match=r"tokenizer\.json is (damaged|not the file)"):
            opened(artifact)


@pytest.mark.parametrize("kind", ["factory", "checkpoint", "onnx"])
@pytest.mark.parametrize("command", ["validate", "bench"])
def test_a_function_that_a_manifest_names_is_not_called(
    artifact: Path,
    cli: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    command: str,
) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "payload.py").write_text(f"import pathlib\npathlib.Path({str(canary)!r}).touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    digest = None if kind == "factory" else "0" * 64
    edited(
        artifact,
        lambda c: c["source"].update(kind=kind, location="payload:make", sha256=digest),
    )
    result = cli(command, artifact)
    assert result.code == 2 and not canary.exists() and "payload" not in sys.modules
    assert "--source payload:make" in " ".join(result.err.split())


def test_a_function_that_the_user_names_is_called(
    artifact: Path, factories: SimpleNamespace
) -> None:
    with pytest.raises(UsageError, match="source small_models:small"):
        linexport.validate(artifact, threads=1)
    assert linexport.validate(artifact, source=factories.source("small"), threads=1).status == "ok"
