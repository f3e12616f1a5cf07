"""Words of ``linexport convert`` that become options of a conversion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from linexport.cli import app
from linexport.errors import UsageError
from linexport.manifest import ConvertOptions


@pytest.fixture
def options_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., ConvertOptions | None]:
    """Options that a command line gives; None where it is refused."""
    monkeypatch.chdir(tmp_path)
    seen: list[ConvertOptions] = []

    def convert(source: str, output: Path, progress: Any, **given: Any) -> None:
        seen.append(ConvertOptions(**given))
        raise UsageError("that is enough")

    monkeypatch.setattr("linexport.conversion.pipeline.convert", convert)

    def parse(*words: str) -> ConvertOptions | None:
        seen.clear()
        with pytest.raises(SystemExit):
            app(["convert", "net.py:Net", *words])
        return seen[0] if seen else None

    return parse


def test_a_file_named_as_weights_is_that_of_the_state_dict(
    options_of: Callable[..., ConvertOptions | None],
) -> None:
    Path("weights.pt").touch()
    assert options_of("--weights", "weights.pt") == ConvertOptions(state_dict="weights.pt")
    both = options_of("--state-dict", "weights.pt", "--weights", "int4")
    assert both == ConvertOptions(state_dict="weights.pt", weights="int4")


def test_a_file_of_weights_that_is_not_there_is_named(
    options_of: Callable[..., ConvertOptions | None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert options_of("--weights", "wieghts.pt") is None
    assert "--weights wieghts.pt: the file does not exist" in " ".join(
        capsys.readouterr().err.split()
    )
    Path("weights.pt").touch()
    assert options_of("--weights", "weights.pt", "--state-dict", "other.pt") is None
    assert "both name a file" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "bench"),
    [
        ((), "short"),
        (("--bench", "full"), "full"),
        (("--no-bench",), "none"),
        (("--bench", "none"), "none"),
    ],
)
def test_how_much_is_measured(
    options_of: Callable[..., ConvertOptions | None], words: tuple[str, ...], bench: str
) -> None:
    assert options_of(*words) == ConvertOptions(bench=bench)


def test_inputs_may_be_repeated(options_of: Callable[..., ConvertOptions | None]) -> None:
    found = options_of("--input", "x=float32[2,16,64]", "--input", "mask=bool[2,16]")
    assert found == ConvertOptions(inputs=("x=float32[2,16,64]", "mask=bool[2,16]"))


def test_python_may_say_yes_or_no_to_measuring() -> None:
    assert [ConvertOptions(bench=given).bench for given in (True, False)] == ["short", "none"]
