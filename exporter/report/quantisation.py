"""The quantisation record -> a sentence, one line of the summary, and tables."""

from __future__ import annotations

from collections import Counter

from linexport.manifest.proof import MetricRecord
from linexport.manifest.quantisation import QuantisationRecord
from linexport.report.tables import Cell, Table, make_table
from linexport.report.text import amount, count, error

MEGABYTE = 1e6


def stored(record: QuantisationRecord) -> str:
    """Say how weights are stored, in words that follow "weights"."""
    if record.checkpoint is None:
        return f"in {record.weights}"
    return f"as the checkpoint has them ({record.checkpoint.format})"


def effect(record: QuantisationRecord) -> str:
    """Say what quantisation changed, with its numbers."""
    return "; ".join([_difference(record), *([score(record.metric)] if record.metric else [])])


def excess(record: QuantisationRecord) -> str:
    """Name the numbers that are past their limits."""
    past = [limit for limit in record.limits if not limit.passed]
    return "; ".join(
        f"{p.name} {error(p.found)}, above the {error(p.allowed)} {p.whose}" for p in past
    )


def advice(record: QuantisationRecord) -> str:
    """Say which weights or which limit would hold, where the divergence is past its limit."""
    limit, found = record.max_kld, record.divergence
    if limit is None or found is None or found.mean <= limit:
        return ""
    tried = [f"{a.weights} has about {error(a.divergence)}" for a in record.alternatives]
    enough = [a.weights for a in record.alternatives if a.divergence <= limit]
    own = f"--max-kld {1.1 * found.mean:.2g} would hold for {record.weights}"
    if enough:
        names = "auto or --weights int8" if enough[0] == "int8" else enough[0]
        return f"--weights {names} would hold: {tried[-1]}; {own}"
    if tried:
        return f"No other weights of linexport would hold: {', '.join(tried)}; {own}"
    return own


def score(metric: MetricRecord) -> str:
    """Return the user's own score on both sides."""
    return f"{metric.name} {amount(metric.before)} in float32, {amount(metric.after)} now"


def _difference(record: QuantisationRecord) -> str:
    found = record.divergence
    if found is not None:
        spread = "" if found.standard_error is None else f" ± {error(found.standard_error)}"
        return (
            f"mean KL divergence {error(found.mean)}{spread} from {record.reference}, same top "
            f"token {100 * found.same_top:.1f} %, perplexity × {found.perplexity_ratio:.4f}"
        )
    if record.output_error is not None:
        return f"relative output error {error(record.output_error)} from {record.reference}"
    return "not compared"


def size(record: QuantisationRecord) -> str:
    """Return bits per weight and the model's size, with that before."""
    return (
        f"{record.bits_per_weight:.2f} bits a weight, {record.model_bytes / MEGABYTE:.2f} MB for "
        f"{record.float32_bytes / MEGABYTE:.2f} MB before"
    )


def summary(record: QuantisationRecord) -> str:
    """Return how weights are stored, their sizes, and what that changes, in one sentence."""
    return f"weights {stored(record)}: {bits(record)}; {size(record)}; {effect(record)}"


def numbers(record: QuantisationRecord) -> Table | None:
    """All numbers of the comparison, each with its name."""
    rows = [("Weights", record.weights), ("Size", size(record)), ("Compared on", record.data)]
    if record.checkpoint is not None:
        kept = f"{count(record.checkpoint.matrices)}, each equal to the float32 weights"
        rows.append(
            (f"Matrices with the integers of the checkpoint, {record.checkpoint.format}", kept)
        )
    if record.max_kld is not None:
        rows.append(("Largest mean divergence allowed", f"{error(record.max_kld)} nats"))
    found = record.divergence
    if found is not None:
        rows += [
            ("Tokens", f"{count(found.tokens)} in {count(found.windows)} windows"),
            (
                "KL divergence, mean",
                f"{error(found.mean)} ± {error(found.standard_error)} nats",
            ),
            ("Median", error(found.median)),
            ("99 %", error(found.p99)),
            ("99.9 %", error(found.p999)),
            ("Maximum", error(found.maximum)),
            ("Same top token", f"{100 * found.same_top:.2f} %"),
            (
                "Perplexity",
                f"{found.perplexity:.4f} for {found.reference_perplexity:.4f}, ratio "
                f"{found.perplexity_ratio:.4f} ± {error(found.perplexity_ratio_error)}",
            ),
        ]
        rows += [
            (
                f"Mean at positions {p.first} to {p.last - 1}",
                f"{error(p.mean)} ± {error(p.standard_error)}",
            )
            for p in found.by_position
        ]
    rows += [
        (f"KL divergence, mean, of {a.weights}", f"{error(a.divergence)} nats")
        for a in record.alternatives
    ]
    if record.output_error is not None:
        rows.append(("Relative output error (root mean square)", error(record.output_error)))
    if record.metric is not None:
        rows.append(("The score", score(record.metric)))
    if record.max_drop is not None:
        rows.append(("Largest drop of the score allowed", amount(record.max_drop)))
    theirs = record.original_divergence
    if theirs is not None:
        mean = f"{error(theirs.mean)} ± {error(theirs.standard_error)} nats"
        rows.append((f"The original in {record.weights}: mean", mean))
    if record.original_output_error is not None:
        rows.append((f"The original in {record.weights}", error(record.original_output_error)))
    drift = record.drift
    if drift is not None:
        rows += [
            ("Split sequences, activations in float32: relative error", error(drift.streaming)),
            ("Split sequences, as the artifact runs", error(drift.streaming_integer)),
        ]
        rows += [
            (f"State {name}, from float32", error(value)) for name, value in drift.states.items()
        ]
        rows += [
            (f"State {name}, split sequence", error(value))
            for name, value in drift.split_states.items()
        ]
    return make_table(
        "What quantisation changed", ["Quantity", "Value"], [[Cell(a), Cell(b)] for a, b in rows]
    )


def tensors(record: QuantisationRecord) -> Table | None:
    """Return the quantised weights, then those that are kept as they were, with reasons."""
    labels = ["Weight", "#Outputs", "#Inputs", "#Bits", "Method", "#Bytes", "#Divergence alone"]
    rows = [
        [
            Cell(t.name, tone="code"),
            Cell(count(t.outputs)),
            Cell(count(t.inputs)),
            Cell(str(t.bits)),
            Cell(t.method if t.block is None else f"{t.method}, blocks of {t.block}"),
            Cell(count(t.bytes)),
            Cell("" if t.divergence is None else error(t.divergence)),
        ]
        for t in record.tensors
    ]
    rows += [
        [
            Cell(k.name, tone="code"),
            Cell(f"as it was: {k.reason}", span=4),
            Cell(count(k.bytes)),
            Cell(""),
        ]
        for k in record.kept
    ]
    return make_table("Weights of matrix products and tables", labels, rows)


def pareto(record: QuantisationRecord) -> Table | None:
    """Sizes and divergences that the choice of bits went through."""
    labels = ["#Bytes of weights", "#Divergence, predicted", "#Measured", "#Step in ms", ""]
    rows = [
        [
            Cell(count(p.bytes)),
            Cell(error(p.predicted)),
            Cell("" if p.measured is None else error(p.measured)),
            Cell("" if p.step_ms is None else amount(p.step_ms)),
            Cell("chosen" if p.chosen else ""),
        ]
        for p in record.pareto
    ]
    return make_table("Size and divergence", labels, rows)


def bits(record: QuantisationRecord) -> str:
    """Return how many weights have how many bits."""
    found = Counter(t.bits for t in record.tensors)
    parts = [f"{much} in {n} bits" for n, much in sorted(found.items())]
    if record.kept:
        parts.append(f"{len(record.kept)} as they were")
    return ", ".join(parts)
