"""Content of a baseline file: what an artifact needs of time and memory, and how far it errs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from linexport.artifact import write
from linexport.errors import UsageError

FORMAT = 1


@dataclass(frozen=True)
class Timing:
    """Calls of one kind: median milliseconds, the median ratio to the yardstick, its error."""

    milliseconds: float
    ratio: float
    standard_error: float
    calls: int


@dataclass(frozen=True)
class Figures:
    """Content of a baseline file.

    Attributes:
        format: version of the file.
        linexport: version that measured.
        created: when, in UTC.
        cpu: model of the processor; latencies of two processors are not compared.
        threads: 0 for the runtime's choice.
        target: of the artifact.
        error: largest relative error of all parity cases; None if one is not finite.
        tolerance: relative error allowed.
        latency: by name, such as "prefill 512".
        memory: peak megabytes of one run; None where the system does not say.
    """

    format: int
    linexport: str
    created: str
    cpu: str
    threads: int
    target: str
    error: float | None
    tolerance: float
    latency: dict[str, Timing]
    memory: float | None


def save_figures(figures: Figures, path: Path) -> None:
    """Write a baseline file in one step.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        write.replace_text(path, json.dumps(asdict(figures), indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {error.strerror}. Name another file.") from None


def read_figures(path: Path) -> Figures:
    """Read a baseline file.

    Raises:
        UsageError: there is none, or it is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"Cannot read the baseline {path}: {error.strerror}. Make one from a state of the "
            "project that is good: linexport validate ARTIFACT --write-baseline FILE."
        ) from None
    except ValueError as error:
        raise UsageError(f"{path} is not a baseline: {error}.") from None
    return _checked(path, found)


def _checked(path: Path, found: Any) -> Figures:
    if isinstance(found, dict) and found.get("format") != FORMAT:
        raise UsageError(
            f"{path} is a baseline of format {found.get('format')}; this version reads {FORMAT}. "
            "Write it again with --write-baseline."
        )
    try:
        return TypeAdapter(Figures).validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise UsageError(f"{path} is not a baseline: {place}: {first['msg']}.") from None
