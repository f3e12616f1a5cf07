"""manifest -> a sentence saying whether the artifact may be trusted, and one line per check."""

from __future__ import annotations

import math
from dataclasses import dataclass

from linexport.manifest import Manifest
from linexport.manifest.engines import EngineRecord
from linexport.manifest.measured import LatencyRow
from linexport.manifest.placement import PlacementRecord
from linexport.manifest.proof import CaseRecord, LibraryRecord, ParityRecord, ToleranceRecord
from linexport.manifest.quantisation import QuantisationRecord
from linexport.manifest.records import PredictorRecord
from linexport.report import quantisation
from linexport.report.text import NO_REASON, amount, count, error, format_speedup

# The harder baseline first: it is the one worth quoting.
BASELINES = (("plain_export", "a plain export"), ("pytorch", "eager PyTorch"))
MEASURED = ("Latency", "Decode", "Memory")
HOW_TO_MEASURE = "linexport bench measures an artifact"
SKIPPED = f"it was skipped; {HOW_TO_MEASURE}"
NOT_IN_SHORT = "it is left out of a short measurement; --bench full has it"


@dataclass(frozen=True)
class Verdict:
    """A sentence and its tone: "good", "bad" or "open" (unknown)."""

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
    """Return whether the status says so, unless it is that of a part, or the parity record."""
    in_pieces = manifest.streaming is not None and manifest.streaming.passed is False
    of_part = engine_failed(manifest) or predictor_failed(manifest) or in_pieces
    return (manifest.parity is not None and not manifest.parity.passed) or (
        manifest.status == "parity_failed" and not of_part
    )


def engine_failed(manifest: Manifest) -> bool:
    """Return whether an engine was run and is not equal to the original."""
    return any(engine.checked is False for engine in manifest.engines)


def predictor_failed(manifest: Manifest) -> bool:
    """Return whether the head for multi-token prediction is not equal to the original's."""
    return manifest.mtp is not None and not manifest.mtp.passed


def worst_case(parity: ParityRecord) -> CaseRecord | None:
    """The failed case to look at first: wrong NaN or Inf before the largest error."""

    def severity(case: CaseRecord) -> tuple[bool, float]:
        worst = case.max_relative_error
        return stray(case) != "", math.inf if worst is None else worst

    return max((c for c in parity.cases if not c.passed), key=severity, default=None)


def stray(case: CaseRecord) -> str:
    """Where NaN or Inf counts of the two sides differ or are an error, the words for it."""
    for sides, name in ((case.nan, "NaN"), (case.inf, "infinite")):
        if sides.expected != sides.got:
            got, expected = count(sides.got), count(sides.expected)
            return f"it gives {got} {name} values where the original gives {expected}"
    if case.reason and (case.nan.got or case.inf.got):
        return f"its output is {case.reason}"
    return ""


def headline_row(manifest: Manifest) -> LatencyRow | None:
    """The latency row to quote: nearest the length the artifact was made for, else 1,024."""
    length = manifest.dims.get("seq")
    opt = (length and length.opt) or 1024

    def distance(row: LatencyRow) -> tuple[bool, bool, float, int]:
        alone = [not theirs for _, theirs in _baselines(row, manifest)]
        return alone[0], alone[-1], abs(math.log(row.length / opt)), row.batch

    rows = (r for r in manifest.latency or () if r.artifact_ms and r.length > 0)
    return min(rows, key=distance, default=None)


def speed(row: LatencyRow, manifest: Manifest) -> str:
    """9.1 ms against 2.4 ms -> "runs 3.8× as fast as a plain export at 1,024 tokens".

    The baseline of a linear form is the softmax model that it was made of: not its own features in
    PyTorch, which nobody would run.
    """
    where = f"at {count(row.length)} tokens"
    if row.batch > 1:
        where += f" in batches of {count(row.batch)}"
    ours = row.artifact_ms
    for name, theirs in _baselines(row, manifest):
        if not theirs or not ours:
            continue
        if 0.95 <= theirs / ours <= 1.05:
            return f"runs about as fast as {name} {where}"
        if theirs > ours:
            return f"runs {format_speedup(theirs, ours)} as fast as {name} {where}"
        return f"takes {format_speedup(ours, theirs)} as long as {name} {where}"
    if manifest.source.linearized is not None:
        where += "; its softmax original was not measured there on this machine"
    return f"takes {amount(ours)} ms {where}"


def _baselines(row: LatencyRow, manifest: Manifest) -> list[tuple[str, float | None]]:
    """Names and times of what an artifact is compared with, the first known one of all."""
    original = manifest.source.linearized
    if original is None:
        return [(name, row.median(key)) for key, name in BASELINES]
    times = dict(zip(original.lengths, original.milliseconds, strict=True))
    same = row.batch == 1 and original.cpu == manifest.environment["cpu"]
    return [("its softmax original", times.get(row.length) if same else None)]


def verdict(manifest: Manifest) -> Verdict:
    """The header of the report, written from the numbers."""
    it = "This ONNX model" if manifest.target == "ort" else "This artifact"
    whose = "the original ONNX file" if manifest.source.kind == "onnx" else "the PyTorch original"
    if manifest.engines or manifest.prepared:
        it = "The ONNX model of this artifact"
    if parity_failed(manifest):
        return Verdict("bad", f"{it} does not equal {whose}: {_failure(manifest)}.")
    row = headline_row(manifest)
    fast = speed(row, manifest) if row else "its speed was not measured"
    parity = manifest.parity
    if parity is None:
        start = "Parity was not measured: it is unknown whether "
        start += f"{it[0].lower()}{it[1:]} equals {whose}"
        return Verdict("open", f"{start}; {'it ' + fast if row else fast}.")
    checks = len(parity.cases)
    over = f" over {count(checks)} check{'s' * (checks != 1)}" if checks else ""
    numbers = f"{_largest(parity)}{over}"
    if manifest.quantisation is not None and not predictor_failed(manifest):
        return _quantised(manifest.quantisation, fast, f"this model equals {whose} ({numbers})")
    sentence = f"{it} equals {whose} ({numbers}) and {fast}"
    if manifest.streaming is not None and manifest.streaming.passed is False:
        return Verdict("bad", f"{sentence}, but must not be streamed: fed in pieces, it differs.")
    if engine_failed(manifest):
        return Verdict("bad", f"{sentence}, but an engine made of it does not.")
    if predictor_failed(manifest):
        said = "but its head for multi-token prediction does not: convert it with --no-mtp."
        return Verdict("bad", f"{sentence}, {said}")
    if manifest.not_built and not manifest.engines:
        return Verdict("open", f"{sentence}; {manifest.not_built}.")
    if not all(engine.checked for engine in manifest.engines):
        return Verdict("open", f"{sentence}; its engines were not run, so their parity is unknown.")
    return Verdict("good", f"{sentence}.")


def _quantised(record: QuantisationRecord, fast: str, equals: str) -> Verdict:
    stored = f"Weights {quantisation.stored(record)}"
    if record.passed:
        return Verdict("good", f"{stored}: {quantisation.effect(record)}; {fast}.")
    sentences = [
        f"{stored} are past their limit: {quantisation.excess(record)}",
        f"In float32 {equals}",
        f"Of the quantised weights: {quantisation.effect(record)}",
        quantisation.advice(record),
    ]
    return Verdict("bad", "".join(f"{s}. " for s in sentences if s).rstrip())


def _failure(manifest: Manifest) -> str:
    parity = manifest.parity
    case = worst_case(parity) if parity else None
    if parity is not None and case is None and parity.greedy and not parity.greedy.passed:
        greedy = parity.greedy
        wrong, tokens = greedy.different - greedy.ties, greedy.steps * greedy.rows
        return f"{count(wrong)} of {count(tokens)} tokens of greedy decoding differ"
    if parity is None or case is None:
        return "its parity check failed, and the manifest names no failed case"
    failed = sum(not other.passed for other in parity.cases)
    where = f"batch {count(case.batch)}, {count(case.length)} tokens"
    what = stray(case) or _excess(case, parity.tolerance)
    checks = f"{failed} of {len(parity.cases)} checks failed"
    return f"{checks}, worst “{case.name}” ({where}), where {what}{_first(parity)}"


def _first(parity: ParityRecord) -> str:
    """Return where the two differ first, and whether a plain export does as well."""
    found = parity.first_divergence
    if found is None:
        return ""
    place = "" if found.position is None else f" at token {count(found.position)}"
    layer = found.layer or found.line
    text = f". The first value that differs is {found.tensor}{place}"
    text += f" ({found.op}{', ' + layer if layer else ''})"
    if found.plain_failure is not None:
        return f"{text}; PyTorch's own ONNX export does not run: {found.plain_failure}"
    if found.plain_relative_error is None:
        return text
    same = found.plain_relative_error > parity.tolerance.relative
    how = "differs as well" if same else "does not differ"
    return f"{text}; PyTorch's own ONNX export {how}: {error(found.plain_relative_error)}"


def _largest(parity: ParityRecord) -> str:
    """Return the largest error, with the tolerance where it is wider than in float32.

    In half precision an error may also be as large as that of the original in the same precision:
    the text then says so, and gives the errors against that original separately.
    """
    text, limits = f"largest relative error {error(parity.max_relative_error)}", parity.tolerance
    if limits.dtype in ("float32", "float64"):
        return text
    limit = f"{error(limits.relative)} allowed in {limits.dtype}"
    errors = [(case.reference == limits.dtype, case.max_relative_error) for case in parity.cases]
    own = max((e for same, e in errors if same and e is not None), default=0.0)
    others = max((e for same, e in errors if not same and e is not None), default=0.0)
    if not parity.passed or max(own, others) <= limits.relative:
        return f"{text} of the {limit}"
    text = f"largest relative error {error(others)}"
    if others > limits.relative:
        return f"{text}, as far as rounding moves the original itself, or {limit}"
    return f"{text} of the {limit}, whose rounding moves the original itself by {error(own)}"


def _excess(case: CaseRecord, tolerance: ToleranceRecord) -> str:
    kind, reached, allowed = "relative", case.max_relative_error, tolerance.relative
    if reached is not None and reached <= allowed:
        kind, reached, allowed = "absolute", case.max_absolute_error, tolerance.absolute
    text = f"the {kind} error reaches {error(reached)} and {error(allowed)} is allowed"
    return f"{text}: {case.reason}" if case.reason else text


def checks(manifest: Manifest) -> list[Check]:
    """Parity, streaming, every engine, latency, decode and memory: one line each."""
    return [
        parity_check(manifest),
        streaming_check(manifest),
        *([predictor_check(manifest.mtp)] if manifest.mtp else []),
        *([_provider_check(manifest.placement)] if manifest.placement else []),
        *([_library_check(manifest.library)] if manifest.library else []),
        *([_weights_check(manifest.quantisation)] if manifest.quantisation else []),
        *(_engine_check(engine) for engine in manifest.engines),
        *([_prepared_check(manifest.not_built)] if manifest.not_built else []),
        _latency_check(manifest),
        _decode_check(manifest),
        _memory_check(manifest),
    ]


def parity_check(manifest: Manifest) -> Check:
    """Passed or failed, how many cases, and the largest error against the allowed one."""
    parity, failed = manifest.parity, parity_failed(manifest)
    if parity is None:
        tone, word = ("bad", "failed") if failed else ("open", "not measured")
        return Check("Parity", "parity", tone, word, NO_REASON)
    good = sum(case.passed for case in parity.cases)
    graph = "the float32 graph: " if manifest.quantisation else ""
    if parity.layers:
        right = sum(layer.passed for layer in parity.layers)
        graph = f"{right} of {len(parity.layers)} float32 layers, each by itself: "
    counted = len(parity.cases) - good if failed else good
    detail = f"{graph}{counted} of {len(parity.cases)} checks, {_largest(parity)}"
    smallest = parity.smallest_denominator
    if smallest:
        detail += f"; smallest |denominator| {error(smallest.denominator)}"
        detail += f" ({smallest.name}, {count(smallest.length)} tokens)"
    tone, word = ("bad", "failed") if failed else ("good", "passed")
    return Check("Parity", "parity", tone, word, detail)


def streaming_check(manifest: Manifest) -> Check:
    """Passed, failed, or not applicable and why."""
    streaming = manifest.streaming
    if streaming is None:
        return Check("Streaming", "streaming", "open", "not measured", NO_REASON)
    reason = streaming.reason or NO_REASON
    if streaming.passed is None:
        word = "not applicable" if streaming.reason else "not measured"
        return Check("Streaming", "streaming", "open", word, reason)
    tried = len(streaming.splits)
    graph = "the float32 graph: " if manifest.quantisation else ""
    if manifest.parity is not None and manifest.parity.layers:
        graph = "the float32 layers, each by itself: "
    detail = f"{graph}{tried} split{'s' * (tried != 1)}"
    if tried:
        detail += f" to {count(max(map(sum, streaming.splits)))} tokens"
    detail += f", largest relative error {error(streaming.max_relative_error)}"
    detail += f"; not tried: {streaming.skipped}" if streaming.skipped else ""
    if streaming.passed:
        return Check("Streaming", "streaming", "good", "passed", detail)
    return Check("Streaming", "streaming", "bad", "failed", f"{reason}; {detail}")


def predictor_check(record: PredictorRecord) -> Check:
    """Return whether the head for multi-token prediction equals the original's."""
    parity, streaming = record.parity, record.streaming
    if parity is None or streaming is None or record.hidden_passed is None:
        return Check("MTP head", "parity", "open", "not measured", NO_REASON)
    good = sum(case.passed for case in parity.cases)
    detail = f"{record.file}: {good} of {len(parity.cases)} checks, largest relative error "
    detail += f"{error(parity.max_relative_error)}; in pieces {error(streaming.max_relative_error)}"
    detail += f"; hidden states it reads {error(record.hidden_error)}"
    detail += f"; {record.placement.described()}" if record.placement else ""
    tone, word = ("good", "passed") if record.passed else ("bad", "failed")
    return Check("MTP head", "parity", tone, word, detail)


def _provider_check(record: PlacementRecord) -> Check:
    """Return on which execution provider the artifact was compared, and what the CPU ran of it."""
    tone = "open" if record.on_cpu else "plain"
    return Check("Provider", "parity", tone, record.provider, record.described())


def _library_check(record: LibraryRecord) -> Check:
    """Return whether the CPU library, too, gives what was proven of the functions."""
    if record.passed is None:
        return Check(
            "Library", "parity", "open", "not run", f"proven by functions; {record.reason}"
        )
    detail = f"CPU library against the {record.against}: {count(record.cases)} checks, "
    detail += f"largest relative error {error(record.max_relative_error)}"
    if record.passed:
        return Check("Library", "parity", "good", "passed", detail)
    return Check("Library", "parity", "bad", "failed", f"not used: {record.reason}; {detail}")


def _weights_check(record: QuantisationRecord) -> Check:
    detail = f"{quantisation.bits(record)}; {quantisation.size(record)}; on {record.data}"
    if record.passed:
        return Check("Weights", "weights", "good", "compared", detail)
    return Check("Weights", "weights", "bad", "failed", f"{quantisation.excess(record)}; {detail}")


def _engine_check(engine: EngineRecord) -> Check:
    """One engine: whether it was run and compared, and what is in it."""
    detail = (
        f"{engine.file}: compute capability {engine.sm / 10:.1f}, {engine.precision}, "
        f"{len(engine.plugins)} plugins among {len(engine.layers)} layers, "
        f"{amount(engine.scratch_bytes / 1e6)} MB scratch"
    )
    reason = engine.reason
    if engine.checked is None:
        return Check("Engine", "engines", "open", "not checked", f"{reason or NO_REASON}; {detail}")
    tone, word = ("good", "passed") if engine.checked else ("bad", "failed")
    return Check("Engine", "engines", tone, word, f"{detail}{f'; {reason}' if reason else ''}")


def _prepared_check(what: str) -> Check:
    """Engines that are still to be built, and by which command."""
    detail = f"{what}; on the machine of the GPU: linexport build FOLDER"
    return Check("Engine", "prepared", "open", "not built", detail)


def _latency_check(manifest: Manifest) -> Check:
    row = headline_row(manifest)
    if row is None:
        return Check("Latency", "latency", "open", "not measured", SKIPPED)
    word = f"{amount(row.artifact_ms)} ms"
    detail = f"{speed(row, manifest)}{_measured_on(manifest)}"
    return Check("Latency", "latency", "plain", word, detail)


def _measured_on(manifest: Manifest) -> str:
    """Return the execution provider that the artifact was measured on, "" for the CPU."""
    placement = manifest.measurement and manifest.measurement.placement
    return f"; {placement.described()}; the baselines on the CPU" if placement else ""


def _decode_check(manifest: Manifest) -> Check:
    decode = manifest.decode
    if decode is None or decode.artifact_ms is None:
        reason = (decode and decode.reasons.get("artifact")) or SKIPPED
        return Check("Decode", "decode", "open", "not measured", reason)
    word = f"{amount(decode.artifact_ms)} ms"
    return Check("Decode", "decode", "plain", word, "median time of one more token")


def why_no_memory(manifest: Manifest) -> str:
    """Return why the peak memory of an artifact was not measured."""
    short = manifest.measurement is not None and manifest.measurement.extent == "short"
    return NOT_IN_SHORT if short else SKIPPED


def _memory_check(manifest: Manifest) -> Check:
    rows = [row for row in manifest.memory or () if row.artifact_mb is not None]
    if not rows:
        return Check("Memory", "memory", "open", "not measured", why_no_memory(manifest))
    row = max(rows, key=lambda row: row.length)
    detail = f"peak at {count(row.length)} tokens"
    return Check("Memory", "memory", "plain", f"{amount(row.artifact_mb)} MB", detail)
