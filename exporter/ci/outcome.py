"""manifest, comparison with a baseline -> one list of checks, which every format writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from linexport.ci.regression import Change
from linexport.manifest import Manifest
from linexport.manifest.proof import CaseRecord
from linexport.manifest.quantisation import DIVERGENCE, QuantisationRecord


@dataclass(frozen=True)
class CheckResult:
    """One thing that was checked.

    Attributes:
        group: "parity", "streaming", "quantisation", "engine" or "baseline".
        name: which one.
        found: what came of it, for people.
        allowed: what was allowed, for people; "" where nothing says.
        passed: None where it was not checked.
    """

    group: str
    name: str
    found: str
    allowed: str
    passed: bool | None


def checks(manifest: Manifest, changes: Sequence[Change] = ()) -> list[CheckResult]:
    """Return every check of a manifest, then the comparisons with a baseline."""
    found = [
        *_parity(manifest),
        *_streaming(manifest),
        *_quantisation(manifest.quantisation),
        *_engines(manifest),
    ]
    return [*found, *(_change(change) for change in changes)]


def _parity(manifest: Manifest) -> Iterator[CheckResult]:
    if manifest.parity is None:
        return
    allowed = f"{manifest.parity.tolerance.relative:.0e}"
    for case in manifest.parity.cases:
        yield CheckResult("parity", _case(case), _error(case), allowed, case.passed)
    head = manifest.parity.head
    if head is not None:
        error = (
            "not finite" if head.max_relative_error is None else f"{head.max_relative_error:.1e}"
        )
        name = f"logits at {head.positions:,} of {head.tokens:,} tokens"
        yield CheckResult("parity", name, error, allowed, head.passed)
    greedy = manifest.parity.greedy
    if greedy is not None:
        wrong = greedy.different - greedy.ties
        name = f"greedy decoding of {greedy.steps} tokens in {greedy.rows} rows"
        yield CheckResult("parity", name, f"{wrong} tokens differ", "0", greedy.passed)


def _case(case: CaseRecord) -> str:
    sizes = ", ".join(f"{name} {size}" for name, size in case.sizes.items())
    return f"{case.output} against {case.reference}: {case.name}, {sizes or 'fixed sizes'}"


def _error(case: CaseRecord) -> str:
    return case.reason or _size(case.max_relative_error)


def _size(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.1e}"


def _streaming(manifest: Manifest) -> Iterator[CheckResult]:
    streaming, parity = manifest.streaming, manifest.parity
    if streaming is None:
        return
    error = streaming.max_relative_error
    found = streaming.reason or ("" if error is None else f"{error:.1e}")
    allowed = f"{parity.tolerance.relative:.0e}" if parity else ""
    yield CheckResult(
        "streaming", "pieces against whole sequences", found, allowed, streaming.passed
    )


def _quantisation(record: QuantisationRecord | None) -> Iterator[CheckResult]:
    """Yield every number that has a limit, then the divergence where nobody limited it."""
    if record is None:
        return
    for limit in record.limits:
        allowed = f"{limit.allowed:.1e}"
        allowed += "" if limit.whose == "allowed" else f" {limit.whose}"
        yield CheckResult("quantisation", limit.name, f"{limit.found:.1e}", allowed, limit.passed)
    if record.divergence is not None and record.max_kld is None:
        found = f"{record.divergence.mean:.1e}; --max-kld limits it"
        yield CheckResult("quantisation", DIVERGENCE, found, "", None)


def _engines(manifest: Manifest) -> Iterator[CheckResult]:
    for engine in manifest.engines:
        error = engine.max_relative_error
        found = engine.reason or ("" if error is None else f"{error:.1e}")
        yield CheckResult("engine", engine.file, found, "", engine.checked)
    if manifest.not_built:
        yield CheckResult("engine", "engines to be built", manifest.not_built, "", None)


def _change(change: Change) -> CheckResult:
    passed = {"regressed": False, "not compared": None}.get(change.verdict, True)
    return CheckResult(
        "baseline", change.name, f"{change.described()}: {change.verdict}", "", passed
    )
