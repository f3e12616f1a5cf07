"""module, expected parity -> its artifact, and lines on how it differs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from linexport.conversion.context import Checks
from linexport.conversion.pipeline import convert_checked
from linexport.debugging import debug
from linexport.errors import UsageError
from linexport.manifest import ConvertOptions, Manifest
from linexport.manifest.proof import CaseRecord
from linexport.parity.cases import ChosenSizes
from linexport.sources.objects import load_object
from linexport.system.json_object import JsonObject


@dataclass(frozen=True)
class ExpectedParity:
    """Keywords of the fixture; see ``linexport.testing.ParityTest``."""

    lengths: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    tolerance: float | None = None
    streaming: bool = False
    target: str = "ort"

    @classmethod
    def of(cls, given: JsonObject) -> ExpectedParity:
        """Return keywords as they were written, checked.

        Raises:
            UsageError: an unknown one, or a value of another kind.
        """
        unknown = sorted(given.keys() - {f.name for f in fields(cls)})
        if unknown:
            raise UsageError(
                f"linexport_parity has no keyword {unknown[0]!r}; expected one of "
                f"{', '.join(f.name for f in fields(cls))}."
            )
        batch = given.get("batch", ())
        found = {
            **given,
            "lengths": tuple(given.get("lengths", ())),
            "batch": (batch,) if isinstance(batch, int) else tuple(batch),
        }
        for name in ("lengths", "batch"):
            if not all(isinstance(n, int) and n > 0 for n in found[name]):
                raise UsageError(
                    f"linexport_parity: {name} are positive integers, not {given[name]}."
                )
        if found.get("tolerance") is not None and not found["tolerance"] > 0:
            raise UsageError(f"linexport_parity: tolerance {given['tolerance']} is not above 0.")
        return cls(**found)


def problems(result: Any, place: Path, expected: ExpectedParity) -> tuple[Manifest, list[str]]:
    """Convert a module and say how the artifact differs from it.

    Args:
        result: the module, its example arguments and, if given, its dynamic shapes.
        place: folder of the artifact.
        expected: what it is compared on.

    Returns:
        The manifest, and lines; none where nothing differs.
    """
    loaded, name = load_object(result), type(result[0]).__name__
    checks = Checks(ChosenSizes(expected.lengths, expected.batch), expected.tolerance)
    config = ConvertOptions(target=expected.target, bench=False)
    manifest = convert_checked(loaded, place, config, checks)
    streams = manifest.streaming is not None and manifest.streaming.passed is True
    lines: list[str] = []
    if manifest.status != "ok":
        assert manifest.parity is not None
        wrong = [case for case in manifest.parity.cases if not case.passed]
        lines.append(f"The ONNX model of {name} differs from it.")
        lines += [f"  {_case(case)}" for case in wrong[:4]]
        found = debug(manifest.artifact, source=loaded, tolerance=expected.tolerance)
        lines += [f"  {topic:<12}  {text}" for topic, text in found.lines()]
    elif expected.streaming and not streams:
        lines = [f"The ONNX model of {name} does not stream: {manifest.why_stateless}"]
    return manifest, lines


def _case(case: CaseRecord) -> str:
    sizes = ", ".join(f"{name} {size}" for name, size in case.sizes.items())
    if case.max_relative_error is None:
        how = "not finite" if case.reason is None else case.reason
    else:
        how = f"relative error {case.max_relative_error:.1e}"
    return f"{case.output} against {case.reference}, {case.name} inputs, {sizes}: {how}"
