"""manifest -> a sentence saying whether the artifact may be trusted, and one line per check."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from linexport.report.text import (
    NO_REASON,
    amount,
    count,
    error,
    items,
    mapping,
    number,
    objects,
    plain,
    positive,
    times,
)

Manifest = Mapping[str, Any]
# The harder rival first: it is the one worth quoting.
COMPETITORS = (("plain_export", "a plain export"), ("pytorch", "eager PyTorch"))
SKIPPED = "the manifest has no such results; convert leaves them out with --no-bench"


@dataclass(frozen=True)
class Verdict:
    """A sentence and its tone: "good", "bad" or "open" (nobody knows)."""

    tone: str
    sentence: str


@dataclass(frozen=True)
class Check:
    """One line of the summary: what was checked, its tone, one word, and the numbers."""

    name: str
    anchor: str
    tone: str
    word: str
    detail: str


def parity_failed(manifest: Manifest) -> bool:
    """Whether either the status or the parity block says so: the pessimist wins, unless the status
    is that of an engine."""
    return mapping(manifest.get("parity")).get("passed") is False or (
        manifest.get("status") == "parity_failed" and not engine_failed(manifest)
    )


def engine_failed(manifest: Manifest) -> bool:
    """Whether an engine was run and is not equal to the original."""
    return any(e.get("checked") is False for e in objects(manifest.get("engines")))


def worst_case(parity: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The failed case to look at first: wrong NaN or Inf before the largest error."""
    failed = [case for case in objects(parity.get("cases")) if case.get("passed") is False]

    def badness(case: Mapping[str, Any]) -> tuple[bool, float]:
        worst = number(case.get("max_relative_error"))
        return stray(case) != "", math.inf if worst is None else worst

    return max(failed, key=badness, default=None)


def stray(case: Mapping[str, Any]) -> str:
    """Where NaN or Inf counts of the two sides differ or are an error, the words for it."""
    for key, name in (("nan", "NaN"), ("inf", "infinite")):
        sides = mapping(case.get(key))
        if sides.get("expected") != sides.get("got"):
            got, expected = count(sides.get("got")), count(sides.get("expected"))
            return f"it gives {got} {name} values where the original gives {expected}"
    if case.get("reason") and any(mapping(case.get(k)).get("got") for k in ("nan", "inf")):
        return f"its output is {case['reason']}"
    return ""


def headline_row(manifest: Manifest) -> Mapping[str, Any] | None:
    """The latency row to quote: nearest the length the artifact was made for, else 1,024."""
    opt = positive(mapping(mapping(manifest.get("dims")).get("seq")).get("opt")) or 1024.0
    rows = [
        row
        for row in objects(manifest.get("latency"))
        if positive(row.get("artifact_ms")) and positive(row.get("length"))
    ]

    def distance(row: Mapping[str, Any]) -> tuple[bool, bool, float, float]:
        unrivalled = [positive(row.get(f"{key}_ms")) is None for key, _ in COMPETITORS]
        far = abs(math.log(row["length"] / opt))
        return unrivalled[0], unrivalled[1], far, number(row.get("batch")) or 0.0

    return min(rows, key=distance, default=None)


def speed(row: Mapping[str, Any]) -> str:
    """9.1 ms against 2.4 ms -> "runs 3.8× as fast as a plain export at 1,024 tokens"."""
    batch = number(row.get("batch")) or 1
    where = f"at {count(row.get('length'))} tokens"
    if batch > 1:
        where += f" in batches of {count(batch)}"
    ours = row["artifact_ms"]
    for key, name in COMPETITORS:
        theirs = positive(row.get(f"{key}_ms"))
        if theirs is None:
            continue
        if 0.95 <= theirs / ours <= 1.05:
            return f"runs about as fast as {name} {where}"
        if theirs > ours:
            return f"runs {times(theirs, ours)} as fast as {name} {where}"
        return f"takes {times(ours, theirs)} as long as {name} {where}"
    return f"takes {amount(ours)} ms {where}"


def verdict(manifest: Manifest) -> Verdict:
    """The header of the report, written from the numbers."""
    it = "This ONNX model" if manifest.get("target") == "ort" else "This artifact"
    graph = mapping(manifest.get("source")).get("kind") == "onnx"
    whose = "the original ONNX file" if graph else "the PyTorch original"
    engines = objects(manifest.get("engines"))
    if engines:
        it = "The ONNX model of this artifact"
    if parity_failed(manifest):
        return Verdict("bad", f"{it} does not equal {whose}: {_failure(manifest)}.")
    row = headline_row(manifest)
    fast = speed(row) if row else "its speed was not measured"
    parity = mapping(manifest.get("parity"))
    if parity.get("passed") is not True:
        start = "Parity was not measured, so nobody knows whether "
        start += f"{it[0].lower()}{it[1:]} equals {whose}"
        return Verdict("open", f"{start}; {'it ' + fast if row else fast}.")
    checks = len(objects(parity.get("cases")))
    over = f" over {count(checks)} check{'s' * (checks != 1)}" if checks else ""
    numbers = f"largest relative error {error(parity.get('max_relative_error'))}{over}"
    sentence = f"{it} equals {whose} ({numbers}) and {fast}"
    if mapping(manifest.get("streaming")).get("passed") is False:
        return Verdict("bad", f"{sentence}, but must not be streamed: fed in pieces, it differs.")
    if engine_failed(manifest):
        return Verdict("bad", f"{sentence}, but an engine made of it does not.")
    if not all(engine.get("checked") for engine in engines):
        return Verdict("open", f"{sentence}; nobody knows this of its engines, which were not run.")
    return Verdict("good", f"{sentence}.")


def _failure(manifest: Manifest) -> str:
    parity = mapping(manifest.get("parity"))
    cases = objects(parity.get("cases"))
    case = worst_case(parity)
    if case is None:
        return "its parity check failed, and the manifest names no failed case"
    failed = sum(other.get("passed") is False for other in cases)
    name = f"“{plain(case.get('name'))}”"
    where = f"batch {count(case.get('batch'))}, {count(case.get('length'))} tokens"
    what = stray(case) or _excess(case, mapping(parity.get("tolerance")))
    return f"{failed} of {len(cases)} checks failed, worst {name} ({where}), where {what}"


def _excess(case: Mapping[str, Any], tolerance: Mapping[str, Any]) -> str:
    reached, allowed = case.get("max_relative_error"), tolerance.get("relative")
    kind, known = "relative", number(reached)
    if known is not None and known <= (number(allowed) or 0.0):
        kind, reached = "absolute", case.get("max_absolute_error")
        allowed = tolerance.get("absolute")
    return f"the {kind} error reaches {error(reached)} and {error(allowed)} is allowed"


def checks(manifest: Manifest) -> list[Check]:
    """Parity, streaming, every engine, latency, decode and memory: one line each."""
    return [
        parity_check(manifest),
        streaming_check(manifest),
        *(_engine_check(engine) for engine in objects(manifest.get("engines"))),
        _latency_check(manifest),
        _decode_check(manifest),
        _memory_check(manifest),
    ]


def parity_check(manifest: Manifest) -> Check:
    """Passed or failed, how many cases, and the largest error against the allowed one."""
    parity = mapping(manifest.get("parity"))
    failed = parity_failed(manifest)
    if not failed and parity.get("passed") is not True:
        return Check("Parity", "parity", "open", "not measured", NO_REASON)
    cases = objects(parity.get("cases"))
    good = sum(case.get("passed") is True for case in cases)
    detail = f"{good} of {len(cases)} checks, largest relative error "
    detail += error(parity.get("max_relative_error"))
    smallest = mapping(parity.get("smallest_denominator"))
    if smallest:
        detail += f"; smallest |denominator| {error(smallest.get('denominator'))}"
        detail += f" ({plain(smallest.get('name'))}, {count(smallest.get('length'))} tokens)"
    tone, word = ("bad", "failed") if failed else ("good", "passed")
    return Check("Parity", "parity", tone, word, detail)


def streaming_check(manifest: Manifest) -> Check:
    """Passed, failed, or not applicable and why."""
    streaming = mapping(manifest.get("streaming"))
    reason, passed = streaming.get("reason"), streaming.get("passed")
    if passed is None:
        word = "not applicable" if reason else "not measured"
        return Check("Streaming", "streaming", "open", word, str(reason or NO_REASON))
    tried = len(items(streaming.get("splits")))
    detail = f"{tried} split{'s' * (tried != 1)}, largest relative error "
    detail += error(streaming.get("max_relative_error"))
    if passed:
        return Check("Streaming", "streaming", "good", "passed", detail)
    return Check("Streaming", "streaming", "bad", "failed", f"{reason or NO_REASON}; {detail}")


def _engine_check(engine: Manifest) -> Check:
    """One engine: whether it was run and compared, and what is in it."""
    capability = (number(engine.get("sm")) or 0) / 10
    detail = (
        f"{plain(engine.get('file'))}: compute capability {capability:.1f}, "
        f"{plain(engine.get('precision'))}, {len(items(engine.get('plugins')))} plugins among "
        f"{len(items(engine.get('layers')))} layers, "
        f"{amount((number(engine.get('scratch_bytes')) or 0) / 1e6)} MB scratch"
    )
    checked, reason = engine.get("checked"), engine.get("reason")
    if checked is None:
        return Check("Engine", "engines", "open", "not checked", f"{reason or NO_REASON}; {detail}")
    tone, word = ("good", "passed") if checked else ("bad", "failed")
    return Check("Engine", "engines", tone, word, f"{detail}{f'; {reason}' if reason else ''}")


def _latency_check(manifest: Manifest) -> Check:
    row = headline_row(manifest)
    if row is None:
        return Check("Latency", "latency", "open", "not measured", SKIPPED)
    word = f"{amount(row.get('artifact_ms'))} ms"
    return Check("Latency", "latency", "plain", word, speed(row))


def _decode_check(manifest: Manifest) -> Check:
    decode = mapping(manifest.get("decode"))
    if positive(decode.get("artifact_ms")) is None:
        reason = mapping(decode.get("reasons")).get("artifact") or SKIPPED
        return Check("Decode", "decode", "open", "not measured", str(reason))
    word = f"{amount(decode['artifact_ms'])} ms"
    return Check("Decode", "decode", "plain", word, "median time of one more token")


def _memory_check(manifest: Manifest) -> Check:
    rows = [row for row in objects(manifest.get("memory")) if positive(row.get("artifact_mb"))]
    if not rows:
        return Check("Memory", "memory", "open", "not measured", SKIPPED)
    row = max(rows, key=lambda row: number(row.get("length")) or 0.0)
    detail = f"peak at {count(row.get('length'))} tokens"
    return Check("Memory", "memory", "plain", f"{amount(row['artifact_mb'])} MB", detail)
