"""Tables of measurements, drawn from docs/data/: what a benchmark's ``--json`` wrote.

A file may have ``notes`` beside what ``tools/measurement.py`` writes: sentences that stand below
its table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pages import NONE, ROOT, linearized, ms, served, stored, table


def record(name: str) -> dict[str, Any]:
    """Return the record ``docs/data/NAME.json``."""
    found: dict[str, Any] = json.loads((ROOT / "docs/data" / f"{name}.json").read_text())
    return found


def _part(name: str, rows: Callable[[Any], str]) -> Callable[[], str]:
    """Return a generator of a table with its command, date and machine."""

    def write() -> str:
        found = record(name)
        return with_circumstances(found, rows(found["result"]))

    return write


def with_circumstances(found: dict[str, Any], rows: str) -> str:
    """Return a table between how a record was measured and its notes."""
    notes = "\n".join(f"- {note}" for note in found.get("notes", ()))
    return "\n\n".join(filter(None, [circumstances(found), rows, notes]))


def circumstances(found: dict[str, Any]) -> str:
    """Return a sentence on when, where and by which command a record was measured."""
    machine = found["environment"]
    return (
        f"Measured {found['date']} on {machine['cores']} cores, {machine['cpu']}; ONNX "
        f"Runtime {machine['onnxruntime']}, torch {machine['torch']}; by `{found['command']}`."
    )


def _attention(result: Any) -> str:
    columns = {
        "native_kernel": "bare kernel",
        "ort": "artifact, `ort`",
        "onnx": "artifact, `onnx`",
        "cumsum": "cumulative sum, plain export",
        "masked_quadratic": "masked scores, plain export",
        "softmax": "softmax `MultiHeadAttention`",
    }
    rows = [
        [f"{row['length']:,}", *(ms(row["ms"].get(name)) for name in columns)]
        for row in result["by_length"]
    ]
    return table(["tokens", *columns.values()], rows)


TIMES = {
    "library": "library",
    "artifact": "functions",
    "eager": "eager",
    "plain": "plain export",
    "products": "GEMM floor",
}


def _families(result: Any) -> str:
    speeds = {name: found["speed"] for name, found in result.items() if "speed" in found}
    titles, columns = ["model type"], [[f"`{name}`" for name in speeds]]
    for call, title in (("prefill", "512 tokens"), ("decode", "a step")):
        times = [found[call] for found in speeds.values()]
        measured = [who for who in TIMES if any(who in one for one in times)]
        titles += [f"{title}: {TIMES[measured[0]]}", *(TIMES[who] for who in measured[1:])]
        columns += [[ms(one.get(who)) for one in times] for who in measured]
        others = measured[1:-1]
        titles.append("overhead of " + ", ".join(TIMES[who] for who in others))
        columns.append([_overheads(one, others) for one in times])
    return table(titles, [list(row) for row in zip(*columns, strict=True)])


def _overheads(times: dict[str, Any], baselines: list[str]) -> str:
    """Return how many times the first column's time beyond the GEMM floor each baseline's is."""
    ratios = [times["overhead"].get(who) for who in baselines]
    return ", ".join(NONE if ratio is None else f"{ratio:.1f}" for ratio in ratios)


def _language_model(result: Any) -> str:
    rows = [
        [
            f"{r['length']:,}",
            *(ms(r["ms"][who]) for who in ("artifact", "plain_export", "pytorch")),
        ]
        for r in result["rows"]
    ]
    return table(["tokens", "artifact", "plain export", "eager PyTorch"], rows)


def _decode(result: Any) -> str:
    return (
        f"One step of a four-layer model of width {result['dim']} takes {result['ratio']:.2f} "
        "times the sum of its matrix products."
    )


def _nodes(result: Any) -> str:
    titles = ["operator", "1 token: nodes, us", "operator, us", "times as fast"]
    titles += ["512 tokens: nodes, us", "operator, us", "times as fast"]
    rows = []
    for row in result:
        cells = [f"`{row['operator']}`" if " " not in row["operator"] else row["operator"]]
        for found in row["microseconds"].values():
            nodes, operator = found["nodes"], found["operator"]
            cells += [ms(nodes), ms(operator), f"{nodes / operator:.2f}"]
        rows.append(cells)
    return table(titles, rows)


def _maps(result: Any) -> str:
    long, favor = result["taylor2"], result["favor"]
    speed = long["ms"]["plain"] / long["ms"]["artifact"]
    head = (
        f"`taylor2` at {long['length']:,} tokens: {ms(long['ms']['artifact'])} ms, and "
        f"{ms(long['ms']['plain'])} ms for a plain export that materialises the features "
        f"({speed:.1f} times as long); {long['memory']:.1%} of the plain export's memory."
    )
    rows = [[name, f"{found['mean']:.3g}"] for name, found in favor.items() if name != "reason"]
    caption = (
        "Relative output error of random maps beside softmax attention, d = 64, 256 features, "
        "queries and keys of unit variance:"
    )
    return f"{head}\n\n{caption}\n\n" + table(["attention", "output error"], rows)


def _convert(result: Any) -> str:
    names = {
        "quadratic": "masked scores",
        "cumsum": "cumulative sum",
        "chunks": "chunks of 64 with a state",
    }
    titles = ["attention written as", "seconds", "of these, original and plain export"]
    titles += ["peak memory", "linexport's own", "the original's own"]
    rows = [
        [
            names[r["model"]],
            f"{r['seconds']:.0f}",
            f"{r['seconds_of_others']:.0f}",
            *(f"{r['times_the_weights'][who]:.1f} x" for who in ("peak", "own", "others")),
        ]
        for r in result
    ]
    return table(titles, rows)


def _formulations(result: Any) -> str:
    return (
        f"{result['count']} causal formulations at {result['length']:,} tokens: each is fused with "
        f"a dynamic length, and takes at most {result['largest_ratio']:.2f} times as long as "
        "linexport's own layer with the same surroundings."
    )


KINDS = {
    "streams": "fused, streams",
    "fused": "fused",
    "carried": "streams, not fused",
    "left": "correct, not fused",
    "refused": "refused",
    "crashed": "internal error",
    "wrong": "wrong",
}


def _third_party(result: Any) -> str:
    rows = [
        [r["formulation"].replace("_", " "), r["package"], KINDS[r["kind"]], _first_reason(r)]
        for r in result["rows"]
    ]
    linear = [r for r in result["rows"] if r["linear"]]
    good = sum(r["kind"] in ("streams", "fused") for r in linear)
    causal = [r for r in linear if r["causal"]]
    streaming = sum(r["kind"] == "streams" for r in causal)
    carried = sum(r["kind"] == "carried" for r in causal)
    wrong = sum(r["kind"] == "wrong" for r in result["rows"])
    head = (
        f"Of {len(linear)} modules that are linear in the tokens, {good} are fused; {wrong} are "
        f"wrong. The outputs of {len(linear) - len(causal)} depend on later tokens, so that they "
        f"cannot stream. Of the {len(causal)} causal ones, {streaming} are fused and stream, and "
        f"{carried} stream as a loop."
    )
    return f"{head}\n\n{table(['module', 'package', 'outcome', 'reason'], rows)}"


def _first_reason(row: Any) -> str:
    """Return the first line of the first reason, where something is in the way."""
    if row["kind"] in ("streams", "fused") or not row["reasons"]:
        return NONE
    text = row["reasons"][0].partition("\n")[0]
    return (text if len(text) <= 120 else text[:117] + "...").replace("|", "\\|")


def _zoo(result: Any) -> str:
    rows = [
        [r["model"], f"{r['ratio']:.2f}", "yes" if "plain" in r["equal"] else "no"] for r in result
    ]
    titles = ["model", "artifact's time over the plain export's", "is the plain export correct?"]
    return table(titles, rows)


def _runtimes(result: Any) -> str:
    models = list(dict.fromkeys(r["model"] for r in result))
    forms = {"artifact": "`--target onnx`", "packaged": "`package --for onnx`"}
    found = {(r["runtime"], r["form"], r["model"]): r["error"] for r in result}
    rows = [
        [runtime, title, *(_relative(found[runtime, form, model]) for model in models)]
        for runtime in dict.fromkeys(r["runtime"] for r in result)
        for form, title in forms.items()
    ]
    return table(["runtime", "file", *models], rows)


def _relative(error: float | None) -> str:
    return "refused" if error is None else f"{error:.0e}"


PARTS = {
    f"measured-{name.replace('_', '-')}": _part(name, rows)
    for name, rows in {
        "attention": _attention,
        "clients": served.clients,
        "convert": _convert,
        "decode": _decode,
        "draft": served.draft,
        "families": _families,
        "feed_forward": linearized.feed_forward,
        "formulations": _formulations,
        "int4": stored.int4,
        "language_model": _language_model,
        "llama": stored.llama,
        "linearize_digits": linearized.digits,
        "linearize_memory": linearized.memory,
        "linearize_search": linearized.search,
        "linearize_text": linearized.text,
        "linearize_verdicts": linearized.verdicts,
        "maps": _maps,
        "memory": stored.memory,
        "nodes": _nodes,
        "peers": served.peers,
        "pool": served.pool,
        "ray": served.replicas,
        "runtimes": _runtimes,
        "serve": served.requests,
        "third_party": _third_party,
        "weights": stored.weights,
        "zoo": _zoo,
    }.items()
}
