"""manifest -> the HTML page: words and tables of the other files poured into conversion.html."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from linexport.manifest import Manifest
from linexport.manifest.measured import LatencyRow
from linexport.manifest.proof import ParityRecord
from linexport.manifest.quantisation import QuantisationRecord
from linexport.report import matches, measured, quantisation, snippet, tables, token_flow
from linexport.report.error_histogram import error_histogram
from linexport.report.figures import WIDTHS
from linexport.report.length_chart import LATENCY, length_chart
from linexport.report.pareto_chart import pareto_chart
from linexport.report.text import ABSENT, count, error, positive, target_name
from linexport.report.verdict import (
    SKIPPED,
    checks,
    parity_failed,
    streaming_check,
    verdict,
    why_no_memory,
)
from linexport.system.escape import html
from linexport.system.json_object import JsonObject

NO_BENCH = f"not measured: {SKIPPED}"
SHORTLY = " This is a short measurement; --bench full takes more lengths, more runs and the memory."
SHORT_NAME = 28
PARETO = {"bytes": "Divergence by size", "step_ms": "Divergence by time of a step"}

GLOSSARY = {
    "Fused op": "One operator that stands for many: linexport found a group of nodes that together "
    "compute linear attention and put a single, faster node in their place.",
    "Lowering": "The concrete way in which a fused op is carried out on the target, for example by "
    "the runtime's own kernel or by standard operators in chunks. All lowerings of an op give the "
    "same result; they differ in speed.",
    "Parity": "The converted model and the original, given the same inputs, give the same "
    "outputs up to rounding. The tolerance says how much rounding is allowed.",
    "Plain export": "The same model converted by torch.onnx alone, with nothing fused: what one "
    "would have without linexport.",
    "Prefill": "Reading a whole prompt in one call. Its time grows with the length of the prompt.",
    "Decode": "Producing one more token after the prompt. With linear attention its time does not "
    "depend on how many tokens came before.",
    "State": "The fixed-size memory that the model carries from one call to the next, in place of "
    "a cache that grows. Inputs named past hold it, outputs named present return it.",
    "p50 and p90": "Half of the timed runs were at most as slow as p50 (the median), nine tenths "
    "at most as slow as p90. A wide gap between them means a noisy machine.",
}


def artifact_page(manifest: Manifest) -> str:
    """The document as text."""
    context = _described(manifest) | _checked(manifest) | _timed(manifest)
    return template("conversion.html").render(context).lstrip()


@cache
def template(name: str) -> Template:
    """Return a page template of this package."""
    environment = Environment(
        loader=PackageLoader("linexport.report", ""),
        autoescape=True,
        finalize=_finalized,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": _breakable, "unbroken": _unbroken}
    return environment.get_template(name)


def _finalized(value: object) -> Any:
    """Return a value of a template as HTML; what is HTML already as it is."""
    return Markup(html(value)) if type(value) is str else value


def _breakable(name: str) -> Markup:
    """A long name that may wrap after the marks which part its words; a short one as it is."""
    if len(name) <= SHORT_NAME:
        return _finalized(name)
    return Markup("<wbr>").join(map(_finalized, re.split(r"(?<=[/._:])(?=\w)", name)))


def _unbroken(sentence: str) -> Markup:
    """The sentence with numbers such as 3.1e-06 kept from wrapping at their sign."""
    parts = re.split(r"(\S*\d+e-\d+\S*)", sentence)
    spans = (
        Markup("<span>{}</span>").format(_finalized(part)) if at % 2 else _finalized(part)
        for at, part in enumerate(parts)
    )
    return Markup("").join(spans)


def _described(manifest: Manifest) -> dict[str, object]:
    nodes = manifest.nodes
    change = f"{100 * (nodes.artifact / nodes.exported - 1):+.0f} %" if nodes.exported else ""
    return {
        "verdict": verdict(manifest),
        "checks": checks(manifest),
        "source": manifest.source.description,
        "target": target_name(manifest.target),
        "facts": tables.facts(manifest),
        "warnings": manifest.warnings,
        "fused": tables.fused(manifest),
        "matches": matches.matches(manifest),
        "passes": tables.passes(manifest),
        "lowerings": tables.lowerings(manifest),
        "engines": tables.engines(manifest),
        "prepared": tables.prepared(manifest),
        "not_built": manifest.not_built,
        "tuned": tables.any_tuned(manifest),
        "kept": tables.kept(manifest),
        "kernels": tables.kernels(manifest),
        "rejected": tables.rejected(manifest),
        "nodes": {
            "before": count(nodes.exported),
            "after": count(nodes.artifact),
            "change": change.replace("-", "−"),
        },
        "interface": tables.interface(manifest),
        "dims": tables.dims(manifest),
        "environment": tables.environment(manifest.environment),
        "ours": snippet.with_linexport(manifest),
        "plain_code": snippet.with_onnxruntime(manifest),
        "glossary": GLOSSARY,
        "absent": ABSENT,
        "no_bench": NO_BENCH,
    }


def _checked(manifest: Manifest) -> JsonObject:
    parity, streaming = manifest.parity, manifest.streaming
    return {
        "parity": parity and _parity(manifest, parity),
        "streaming": streaming_check(manifest),
        "quantised": manifest.quantisation and _quantised(manifest.quantisation),
        "splits": streaming and measured.splits(streaming),
        "flow": manifest.token_flow and token_flow.sentence(manifest.token_flow),
        "flow_nodes": token_flow.table(manifest.token_flow),
    }


def _quantised(record: QuantisationRecord) -> dict[str, object]:
    return {
        "numbers": quantisation.numbers(record),
        "tensors": quantisation.tensors(record),
        "pareto": quantisation.pareto(record),
        "charts": [
            (title, drawings(partial(pareto_chart, record.pareto, over), f"pareto-{over}"))
            for over, title in PARETO.items()
        ],
    }


def _parity(manifest: Manifest, parity: ParityRecord) -> dict[str, object]:
    edges, counts = parity.histogram.log10_edges, parity.histogram.counts
    tolerance = parity.tolerance
    return {
        "failed": parity_failed(manifest),
        "cases": measured.cases(parity),
        "layers": measured.layers(parity),
        "lengths": ", ".join(map(count, parity.lengths)) or ABSENT,
        "divergence": parity.first_divergence,
        "relative": error(parity.max_relative_error),
        "absolute": error(parity.max_absolute_error),
        "tolerance": {
            "dtype": tolerance.dtype,
            "relative": error(tolerance.relative),
            "absolute": error(tolerance.absolute),
            "why": tolerance.why,
        },
        "charts": drawings(
            partial(error_histogram, edges, counts, positive(tolerance.relative)), "errors"
        ),
        "histogram": measured.histogram(edges, counts),
    }


def _timed(manifest: Manifest) -> dict[str, object]:
    groups = measured.by_batch(manifest.latency or ())
    return {
        "latency": [_group(batch, rows, len(groups)) for batch, rows in groups.items()],
        "measurement": _method(manifest),
        "decode": measured.decode(manifest.decode),
        "memory": measured.memory(manifest.memory or ()),
        "no_memory": f"not measured: {why_no_memory(manifest)}",
    }


def _group(batch: str, rows: Sequence[LatencyRow], groups: int) -> dict[str, object]:
    lines = measured.series(rows)
    return {
        "title": f"Batch {batch}" if groups > 1 or batch != "1" else "",
        "charts": drawings(partial(length_chart, lines, LATENCY), f"latency-{batch}"),
        "table": measured.latency(rows),
    }


def drawings(draw: Callable[[str, int], str], ident: str) -> dict[str, Markup]:
    """One drawing in two widths, for a screen and a phone; the style sheet shows one of them."""
    drawn = {name: Markup(draw(f"{ident}-{name}", width)) for name, width in WIDTHS.items()}
    return {name: svg for name, svg in drawn.items() if svg}


def _method(manifest: Manifest) -> str:
    how = manifest.measurement
    if how is None:
        return "How the times were taken is not recorded."
    turns = "in turns" if how.interleaved else "one after the other"
    own = how.threads == 0
    threads = "on each one's own choice of threads" if own else f"on {count(how.threads)} threads"
    return (
        f"{count(how.repeats)} timed runs after {count(how.warmup)} to warm up, {threads}, the "
        f"artifact and its baselines {turns}. One call of a baseline may take "
        f"{count(how.longest_call_seconds)} s.{SHORTLY if how.extent == 'short' else ''}"
    )
