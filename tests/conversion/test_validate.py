"""``validate`` changes nothing unless it is to record, and knows its original by the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import linexport
from linexport.errors import UsageError
from linexport.manifest import read

pytestmark = pytest.mark.usefixtures("one_thread")

SOURCE = """
import torch
from torch import nn


class Mix(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.p, self.factor = nn.Linear(8, 24), factor

    def forward(self, x):
        q, k, v = self.p(x).chunk(3, -1)
        return ((q.exp() @ k.exp().mT).tril() @ v) * self.factor


def make():
    return Mix(), (torch.randn(2, 6, 8),)


def other_code():
    return Mix(1.01), (torch.randn(2, 6, 8),)


def other_weights():
    torch.manual_seed(9)
    return make()
"""


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """An artifact whose weights a seed has drawn, and the module that its source is in."""
    monkeypatch.chdir(tmp_path)
    name = f"validated_{tmp_path.name.replace('-', '_')}"
    Path(f"{name}.py").write_text(SOURCE)
    linexport.convert(f"{name}:make", "out", bench=False, threads=1, seed=5)
    return Path("out"), name


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_seed_of_the_conversion_draws_the_weights_again(artifact: tuple[Path, str]) -> None:
    folder, name = artifact
    assert read(folder).source.weights_sha256 is not None
    before = content(folder)
    found = linexport.validate(folder, source=f"{name}:make", threads=1, seed=3)
    assert found.status == "ok" and found.seed == 3 and content(folder) == before


def test_a_source_of_other_weights_is_told_as_that(
    artifact: tuple[Path, str], cli: Callable[..., Any]
) -> None:
    folder, name = artifact
    before = content(folder)
    done = cli("validate", folder, "--source", f"{name}:other_weights", "--record", "--json")
    assert done.code == 2 and "gives other weights" in done.json()["message"]
    assert content(folder) == before
    linexport.load(folder, threads=1)


def test_a_failure_is_written_only_where_it_is_to_be_recorded(
    artifact: tuple[Path, str], cli: Callable[..., Any]
) -> None:
    folder, name = artifact
    before = content(folder)
    given = ("validate", folder, "--source", f"{name}:other_code", "--threads", 1)
    done = cli(*given)
    assert done.code == 3 and content(folder) == before
    assert "--record" in done.out
    linexport.load(folder, threads=1)
    assert cli(*given, "--record").code == 3
    assert read(folder).status == "parity_failed"


def test_the_library_is_compared_anew_after_a_failure_that_was_not_its_own(
    artifact: tuple[Path, str],
) -> None:
    """By the right original it passes, and no reason is given that is not so."""
    folder, name = artifact
    if read(folder).library is None or not read(folder).library.passed:
        pytest.skip("the CPU library is not built here")
    linexport.validate(folder, source=f"{name}:other_code", threads=1, record=True)
    assert read(folder).library.passed is False
    again = linexport.validate(folder, source=f"{name}:make", threads=1, record=True)
    assert again.status == "ok" and again.library.passed is True
    assert again.library.against == "functions"
    assert linexport.load(folder, threads=1)._session.native
    third = linexport.validate(folder, source=f"{name}:make", threads=1)
    assert third.library.passed is True and third.library.against == "original"


def test_what_is_known_of_the_library_stays_where_it_is_switched_off(
    artifact: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, name = artifact
    known = read(folder).library
    monkeypatch.setenv("LINEXPORT_CPU_LIBRARY", "0")
    found = linexport.validate(folder, source=f"{name}:make", threads=1).library
    assert found == known or not (known and known.passed)


def test_old_manifests_without_the_digest_of_weights_are_validated(
    artifact: tuple[Path, str],
) -> None:
    folder, name = artifact
    path = folder / "manifest.json"
    text = path.read_text()
    digest = read(folder).source.weights_sha256
    path.write_text(text.replace(f'"{digest}"', "null"))
    assert linexport.validate(folder, source=f"{name}:make", threads=1).status == "ok"
    path.write_text(text.replace(f'"{digest}"', '"no digest"'))
    with pytest.raises(UsageError, match="weights_sha256"):
        read(folder)
