"""Every model in every runtime, as an artifact and as packaged: its error, or the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from linexport.package import find_destination, package
from tests.runtimes.cases import Call, calls, error
from tests.runtimes.models import MODELS
from tests.runtimes.runtimes import Job, run

FORMS = ("artifact", "packaged")
"""``model.onnx`` of an artifact, with functions, and that of ``package --for onnx``."""


@dataclass(frozen=True)
class Tried:
    """One model in one runtime.

    Attributes:
        error: largest of all outputs, relative to the largest value of each; None where refused.
        refused: what the runtime said.
    """

    runtime: str
    form: str
    model: str
    error: float | None
    refused: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Subject:
    """A model in one form, and what its original gives."""

    model: str
    form: str
    path: Path
    calls: list[Call]


def subjects(folder: Path) -> Iterator[Subject]:
    """Convert every model, in an empty folder, and yield both forms of each."""
    for name, write in MODELS.items():
        place = folder / name.replace(" ", "_")
        artifact, packaged = place / "artifact", place / "packaged"
        place.mkdir()
        source = write(artifact)
        package(artifact, find_destination("onnx"), packaged)
        asked = calls(source, artifact)
        for form, there in zip(FORMS, (artifact, packaged), strict=True):
            yield Subject(name, form, there / "model.onnx", asked)


def tried(runtime: str, environment: Path, chosen: list[Subject], folder: Path) -> list[Tried]:
    """Run all subjects in one runtime, in an empty folder."""
    jobs = [Job(s.path, [c.to_json() for c in s.calls]) for s in chosen]
    found = []
    for subject, result in zip(chosen, run(runtime, environment, jobs, folder), strict=True):
        worst = None
        if result.outputs is not None:
            worst = max(error(c, o) for c, o in zip(subject.calls, result.outputs, strict=True))
        found.append(Tried(runtime, subject.form, subject.model, worst, result.refused))
    return found
