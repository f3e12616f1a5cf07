"""``validate`` compares quantised weights on the text that they were judged on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import linexport
from linexport.manifest import Manifest
from tests.support.command_line import Result

pytestmark = pytest.mark.usefixtures("one_thread")

LIBRARY = "source of Python's standard library"


def test_validate_takes_the_text_of_the_conversion_again(
    cli: Callable[..., Result],
    exact: Path,
    factories: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("A text of one's own. " * 80)
    source = factories.source("language_model")
    before = linexport.quantize(exact, "q", weights="bf16", data="texts", threads=1)
    again = linexport.validate("q", source=source, threads=1)
    assert compared(before) == compared(again) == ("texts", 420)

    (tmp_path / "other.txt").write_text("Other text, which is shorter. " * 40)
    other = linexport.validate("q", source=source, threads=1, data="other.txt", record=True)
    assert compared(other) == ("other.txt", 300)
    assert compared(linexport.validate("q", source=source, threads=1)) == ("other.txt", 300)

    (tmp_path / "other.txt").write_text("Changed. " * 40)
    result = cli("validate", "q", "--source", source, "--threads", "1", "--record")
    assert result.code == 0
    said = f"on {LIBRARY}, not other.txt as before, which has changed; --data names text"
    assert said in " ".join(result.out.split())
    assert "not other.txt as before, which has changed" in (Path("q") / "report.html").read_text()
    (tmp_path / "other.txt").unlink()
    gone = linexport.validate("q", source=source, threads=1)
    assert compared(gone)[0] == (
        f"{LIBRARY}, not other.txt as before, which cannot be read; --data names text"
    )


def compared(manifest: Manifest) -> tuple[str, int]:
    """Return what was compared on, and the number of tokens."""
    record = manifest.quantisation
    assert record and record.divergence
    return record.data, record.divergence.tokens
