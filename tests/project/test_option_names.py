"""Options in messages: flags on a command line, keywords in Python."""

from __future__ import annotations

import ast
import re
import threading
from pathlib import Path

import pytest

import linexport
from linexport import option_names
from linexport.errors import UsageError
from linexport.manifest.options import ConvertOptions, command, declared, defaults
from linexport.option_names import shown, shown_as_flags

ROOT = Path(__file__).resolve().parents[2]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


@pytest.mark.parametrize(
    ("flags", "keywords"),
    [
        ("Pass --overwrite to replace it.", "Pass overwrite=True to replace it."),
        ("Leave it or --isolated out.", "Leave it or isolated=True out."),
        ("Try it with --no-bench.", 'Try it with bench="none".'),
        ("Convert it with --no-mtp.", "Convert it with mtp=False."),
        ("--weights is 'int3'", "weights is 'int3'"),
        ("Use --weights int8 or int4.", 'Use weights="int8" or int4.'),
        ("Use --target ort-cuda, and --sm 89.", 'Use target="ort-cuda", and sms=[89].'),
        ("--dim seq: no such dimension", "dims seq: no such dimension"),
        ("Pass --source.", "Pass source."),
        ("pip install --upgrade onnx", "pip install --upgrade onnx"),
        (
            "Do this: linexport validate a.b --record --source x:y. Pass --source.",
            "Do this: linexport validate a.b --record --source x:y. Pass source.",
        ),
        (
            "Name it:\n  linexport convert net.py:Net --state-dict w.pt --input 'x=bool[2]'\nor",
            'Name it:\n  linexport.convert("net.py:Net", state_dict="w.pt", '
            'inputs=["x=bool[2]"])\nor',
        ),
    ],
)
def test_an_error_names_options_as_its_reader_has_them(flags: str, keywords: str) -> None:
    assert str(UsageError(flags)) == shown(flags) == keywords
    with shown_as_flags():
        assert str(UsageError(flags)) == flags
    assert str(UsageError(flags)) == keywords


def test_a_thread_shows_options_as_its_own_reader_has_them() -> None:
    """A notebook's conversion goes on while a command runs in another thread."""
    found, inside, read = [], threading.Event(), threading.Event()

    def command() -> None:
        with shown_as_flags():
            inside.set()
            assert read.wait(10)
            found.append(shown("Pass --overwrite."))

    thread = threading.Thread(target=command)
    thread.start()
    assert inside.wait(10)
    found.append(shown("Pass --overwrite."))
    read.set()
    thread.join()
    assert found == ["Pass overwrite=True.", "Pass --overwrite."]


def test_all_threads_of_the_command_line_show_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(option_names, "_programs", [])
    found: list[str] = []
    option_names.own_process()
    thread = threading.Thread(target=lambda: found.append(shown("Pass --overwrite.")))
    thread.start()
    thread.join()
    assert found == ["Pass --overwrite."]


def test_every_option_of_convert_has_its_keyword() -> None:
    for name, option in declared().items():
        assert shown(f"Leave out {option.flag}.").startswith(f"Leave out {name}")
        if isinstance(defaults()[name], bool):
            other = ConvertOptions(**{name: not defaults()[name]})
            word = command("m.pt", "a", other).split()[-1]
            assert shown(f"Pass {word}.") == f"Pass {name}={not defaults()[name]}."


def test_a_conversion_in_python_names_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"linexport": 1}')
    for given, said in (
        ({"state_dict": "w.pt"}, "state_dict goes with"),
        ({"data": "x.txt"}, "data, max_kld, evaluate, max_drop and proof are for"),
        ({"stop_after": "simplify"}, "stop_after leaves its result in the folder of dump_passes"),
        ({"bench": "fast"}, "bench is 'fast'"),
    ):
        with pytest.raises(UsageError, match=said) as caught:
            linexport.convert(tmp_path, tmp_path / "out", **given)
        assert not FLAG.search(str(caught.value))


PYTHON = ("sources", "conversion", "parity", "targets", "quantization", "graph", "trace")
"""Folders whose errors a caller of ``linexport.convert`` meets."""


def test_flags_in_errors_of_a_conversion_are_all_known() -> None:
    unknown = set()
    for folder in PYTHON:
        for path in (ROOT / "exporter" / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Raise) and node.exc is not None:
                    texts = [
                        n.value
                        for n in ast.walk(node.exc)
                        if isinstance(n, ast.Constant) and isinstance(n.value, str)
                    ]
                    unknown |= {(path.name, flag) for flag in FLAG.findall(shown("".join(texts)))}
    assert {flag for _, flag in unknown} <= {
        "--upgrade",  # of pip
        "--merge",  # of llama-gguf-split
        "--prefill",  # of linexport bench, which Python gives as a workload
        "--decode",
        "--depth",
    }, unknown
