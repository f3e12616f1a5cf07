"""Help on a terminal of 80 columns: panels, whole names, examples that parse, words completed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer.main

from linexport.cli import app
from linexport.cli import options as cli_options
from linexport.cli.help import ONE_PANEL, options_by_panel
from linexport.errors import UsageError
from linexport.manifest.options import Panel, declared

Cli = Callable[..., Any]

ROOT = typer.main.get_command(app)


def _walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name in getattr(command, "commands", {}):
        yield from _walk(command.get_command(None, name), (*words, name))


COMMANDS = dict(_walk(ROOT, ()))


def visible(command: Any) -> list[Any]:
    return [p for p in command.params if p.param_type_name == "option" and not p.hidden]


def parse(command: Any, words: list[str], parent: Any = None) -> None:
    """Parse a command line without running it.

    Raises:
        typer.TyperException: it has a word that the command does not take.
    """
    context = command.make_context(words[0], words[1:], parent=parent)
    rest = [*context._protected_args, *context.args]
    if rest:
        name, inner, _ = command.resolve_command(context, rest)
        parse(inner, [name, *rest[1:]], context)


@pytest.fixture
def help_lines(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """``help_lines(*words)``: what --help of a command prints at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *words: str(cli(*words, "--help").out).splitlines()


def test_every_command_is_looked_at() -> None:
    expected = {("convert",), ("serve",), ("maps", "choose"), ("plugins", "build"), ("verify",)}
    assert expected < set(COMMANDS)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_fits_80_columns_with_whole_names(
    words: tuple[str, ...], help_lines: Callable[..., list[str]]
) -> None:
    lines = help_lines(*words)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "…" not in text and "<str>" not in text
    shown = set(text.replace("│", " ").replace(",", " ").split())
    for option in visible(COMMANDS[words]):
        assert {*option.opts, *option.secondary_opts} <= shown
        assert option.help


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_long_lists_of_options_are_in_panels(words: tuple[str, ...]) -> None:
    command = COMMANDS[words]
    panels = options_by_panel(command)
    assert sum(map(len, panels.values())) == len(visible(command))
    if len(visible(command)) > ONE_PANEL:
        assert set(panels) <= set(Panel)
        assert [panel for panel in Panel if panel in panels] == list(panels)
    else:
        assert list(panels) in ([], ["Options"])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_ends_with_three_examples_that_parse(
    words: tuple[str, ...], help_lines: Callable[..., list[str]]
) -> None:
    lines = [line for line in help_lines(*words) if line.strip()]
    assert lines[-4] == "Examples:"
    for line in lines[-3:]:
        example = shlex.split(line)
        assert tuple(example[: len(words) + 1]) == ("linexport", *words)
        parse(ROOT, example)


def test_an_example_with_a_word_that_is_not_taken_is_found() -> None:
    for line in ("linexport convert m.pt --wieghts int4", "linexport plugins path", "linexport no"):
        with pytest.raises(typer.TyperException):
            parse(ROOT, line.split())


def test_the_first_screen_of_convert_is_what_most_users_need(
    help_lines: Callable[..., list[str]],
) -> None:
    screen = "\n".join(help_lines("convert")[:40])
    for name in ("SOURCE", "--output", "--target", "--weights", "--no-bench", "--overwrite"):
        assert name in screen
    assert "--isolated" not in screen


# Few words


def accepted() -> dict[str, set[str]]:
    """The words that a conversion takes, from the places that refuse others."""
    from linexport.quantization.choose_bits import CHOICES
    from linexport.quantization.forecast import LAYERS, WHOLE
    from linexport.sources.hugging_face.choose_head import POOLINGS
    from linexport.targets import DTYPES
    from linexport.timing.latency import EXTENTS

    return {
        "precision": set(DTYPES),
        "weights": {"float32", *CHOICES},
        "pooling": set(POOLINGS),
        "proof": {WHOLE, LAYERS},
        "bench": {"none", *EXTENTS},
    }


def test_words_offered_are_those_accepted() -> None:
    from linexport.cli import linearize, package
    from linexport.models.feed_forward import linearize as forms
    from linexport.package import destinations

    offered = {name: set(one.words) for name, one in declared().items() if one.words}
    assert offered == accepted()
    assert set(package.SYSTEMS) == set(destinations())
    assert set(linearize.FORMS) - {"keep"} <= set(forms.FORMS)


def test_words_offered_are_in_the_help() -> None:
    for one in declared().values():
        assert all(word in one.help for word in one.words)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("linexport convert m.pt --target tensorrt", "tensorrt tensorrt-rtx"),
        ("linexport convert m.pt --precision ", "fp32 fp16 bf16"),
        ("linexport convert m.pt --pooling l", "last"),
        ("linexport quantize a --weights int", "int8 int4"),
        ("linexport serve a --provider c", "cpu cuda"),
        ("linexport package a --for tr", "transformers.js triton"),
        ("linexport bench a --format ", "md json csv"),
        ("linexport convert a --bench ", "none short full"),
        ("linexport generate a --draft n", "ngram"),
        ("linexport plugins path c", "cpu cuda"),
    ],
)
def test_words_are_completed(
    line: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = line.split(" ")
    monkeypatch.setenv("_LINEXPORT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    with pytest.raises(SystemExit):
        ROOT.main(args=[], prog_name="linexport")
    assert capsys.readouterr().out.split() == expected.split()


def test_completion_imports_no_heavy_library() -> None:
    script = (
        "import sys; from linexport.cli.options import option; "
        "from linexport.cli import app; import typer.main; "
        "found = typer.main.get_command(app).commands['convert']; "
        "print([w for p in found.params for w in p.shell_complete(None, '')]); "
        "print(sorted({'torch', 'onnx', 'onnxruntime', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize("name", ["target", "precision", "weights", "pooling", "proof"])
def test_another_word_is_answered_with_those_expected(name: str, cli: Cli, tmp_path: Any) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    words = cli_options.target_names() if name == "target" else declared()[name].words
    more = {"precision": ("--target", "ort-cuda"), "proof": ("--weights", "int4")}.get(name, ())
    result = cli("convert", path, "-o", tmp_path / "out", f"--{name}", "wrongword", *more)
    assert result.code == UsageError.exit_code
    assert "'wrongword'" in result.err
    assert all(word in result.err for word in words)


# Colours


@pytest.mark.parametrize("value", ["", "1"])
def test_messages_have_no_colour_where_users_want_none(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from linexport.cli import output

    monkeypatch.setenv("NO_COLOR", value)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    output.echo("Error: ", fg="red", bold=True, err=True)
    written = capsys.readouterr().err
    assert written == ("Error: \n" if value else "\x1b[31m\x1b[1mError: \x1b[0m\n")


@pytest.mark.parametrize(
    "words", [("convert",), ("convert", "x", "--nonsense"), ("plugins", "path")]
)
def test_a_mistake_shows_the_usage_of_the_help(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "linexport", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    shown = [sys.executable, "-m", "linexport", *words[: 1 + (words[0] == "plugins")], "--help"]
    first = subprocess.run(shown, capture_output=True, text=True).stdout.splitlines()[0]
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].strip() == first.strip()
    assert "Missing argument" not in done.stderr or re.search("argument '[A-Z]+'", done.stderr)
