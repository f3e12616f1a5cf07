"""manifest -> the HTML page: words and tables of the other files poured into conversion.html."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from linexport.report import measured, snippet, tables
from linexport.report.charts import error_histogram, latency_chart
from linexport.report.text import (
    ABSENT,
    count,
    error,
    items,
    mapping,
    number,
    plain,
    positive,
    target,
)
from linexport.report.verdict import SKIPPED, checks, parity_failed, streaming_check, verdict

NO_BENCH = f"not measured: {SKIPPED}"
SHORT_NAME = 28
WIDTHS = {"wide": 960, "narrow": 340}

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


def page(manifest: Mapping[str, Any]) -> str:
    """The document as text."""
    context = _described(manifest) | _checked(manifest) | _timed(manifest)
    return template("conversion.html").render(context).lstrip()


@cache
def template(name: str) -> Template:
    """One of the pages beside this file."""
    environment = Environment(
        loader=PackageLoader("linexport.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": _breakable, "unbroken": _unbroken}
    return environment.get_template(name)


def _breakable(name: str) -> Markup:
    """A long name that may wrap after the marks which part its words; a short one as it is."""
    if len(name) <= SHORT_NAME:
        return escape(name)
    return Markup("<wbr>").join(re.split(r"(?<=[/._:])(?=\w)", name))


def _unbroken(sentence: str) -> Markup:
    """The sentence with numbers such as 3.1e-06 kept from wrapping at their sign."""
    parts = re.split(r"(\S*\d+e-\d+\S*)", sentence)
    spans = (
        Markup("<span>{}</span>").format(part) if at % 2 else escape(part)
        for at, part in enumerate(parts)
    )
    return Markup("").join(spans)


def _described(manifest: Mapping[str, Any]) -> dict[str, Any]:
    nodes = mapping(manifest.get("nodes"))
    before, after = number(nodes.get("exported")), number(nodes.get("artifact"))
    change = f"{100 * (after / before - 1):+.0f} %" if before and after is not None else ""
    return {
        "verdict": verdict(manifest),
        "checks": checks(manifest),
        "source": plain(mapping(manifest.get("source")).get("description")),
        "target": target(manifest),
        "facts": tables.facts(manifest),
        "warnings": items(manifest.get("warnings")),
        "fused": tables.fused(manifest),
        "lowerings": tables.lowerings(manifest),
        "engines": tables.engines(manifest),
        "tuned": tables.any_tuned(manifest),
        "refused": tables.refused(manifest),
        "known": {name: manifest.get(name) is not None for name in ("fused", "nodes", "refused")},
        "nodes": {
            "before": count(nodes.get("exported")),
            "after": count(nodes.get("artifact")),
            "change": change.replace("-", "−"),
        },
        "interface": tables.interface(manifest),
        "dims": tables.dims(manifest),
        "environment": tables.environment(manifest),
        "ours": snippet.with_linexport(manifest),
        "plain_code": snippet.with_onnxruntime(manifest),
        "glossary": GLOSSARY,
        "absent": ABSENT,
        "no_bench": NO_BENCH,
    }


def _checked(manifest: Mapping[str, Any]) -> dict[str, Any]:
    parity = mapping(manifest.get("parity"))
    tolerance = mapping(parity.get("tolerance"))
    edges, counts = measured.bins(mapping(parity.get("histogram")))
    limit = positive(tolerance.get("relative"))
    streaming = mapping(manifest.get("streaming"))
    return {
        "parity": {
            "known": bool(parity),
            "failed": parity_failed(manifest),
            "cases": measured.cases(parity),
            "lengths": ", ".join(map(count, items(parity.get("lengths")))) or ABSENT,
            "divergence": _divergence(mapping(parity.get("first_divergence"))),
            "relative": error(parity.get("max_relative_error")),
            "absolute": error(parity.get("max_absolute_error")),
            "tolerance": {
                "dtype": plain(tolerance.get("dtype")),
                "relative": error(tolerance.get("relative")),
                "absolute": error(tolerance.get("absolute")),
                "why": plain(tolerance.get("why")),
            },
        },
        "histogram": {
            "charts": drawings(
                lambda ident, width: error_histogram(edges, counts, limit, ident, width), "errors"
            ),
            "table": measured.histogram(edges, counts),
        },
        "streaming": streaming_check(manifest),
        "splits": measured.splits(streaming),
    }


def _timed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    groups = measured.by_batch(manifest.get("latency"))
    return {
        "latency": [_group(batch, rows, len(groups)) for batch, rows in groups.items()],
        "measurement": _method(manifest),
        "decode": measured.decode(mapping(manifest.get("decode"))),
        "memory": measured.memory(manifest.get("memory")),
    }


def _group(batch: str, rows: Sequence[Mapping[str, Any]], groups: int) -> dict[str, Any]:
    lines = measured.series(rows)
    return {
        "title": f"Batch {batch}" if groups > 1 or batch != "1" else "",
        "charts": drawings(
            lambda ident, width: latency_chart(lines, ident, width), f"latency-{batch}"
        ),
        "table": measured.latency(rows),
    }


def drawings(draw: Callable[[str, int], str], ident: str) -> dict[str, Markup]:
    """The same drawing for a screen and for a phone; the style sheet shows one of them."""
    drawn = {name: Markup(draw(f"{ident}-{name}", width)) for name, width in WIDTHS.items()}
    return {name: svg for name, svg in drawn.items() if svg}


def _method(manifest: Mapping[str, Any]) -> str:
    how = mapping(manifest.get("measurement"))
    if not how:
        return "How the times were taken is not recorded."
    turns = "in turns" if how.get("interleaved") else "one after the other"
    own = how.get("threads") == 0
    threads = (
        "on each one's own choice of threads" if own else f"on {count(how.get('threads'))} threads"
    )
    longest = how.get("longest_call_seconds")
    allowed = f" One call of a competitor may take {count(longest)} s." if longest else ""
    return (
        f"{count(how.get('repeats'))} timed runs after {count(how.get('warmup'))} to warm up, "
        f"{threads}, the competitors {turns}.{allowed}"
    )


def _divergence(found: Mapping[str, Any]) -> dict[str, str]:
    """The first value out of tolerance; empty where none was named."""
    return {key: str(found.get(key, ABSENT)) for key in ("tensor", "op", "node")} if found else {}
