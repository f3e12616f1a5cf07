"""Tables of measurements of states, sessions and servers, from docs/data/."""

from __future__ import annotations

from typing import Any

import numpy as np

from pages import table

SPEED = {
    "tokens_per_second": "tokens/s",
    "median_gap_ms": "ms between tokens",
    "p99_gap_ms": "p99",
    "first_token_ms": "ms to the first",
    "processor_ms": "processor ms a token",
}
CLUSTER = {
    "tokens_per_second": "tokens/s",
    "cores_busy": "cores busy",
    "with_replicas": "of these with replicas",
}
ROUNDS = {
    "alone": "one session",
    "pool": "{} sessions of a pool",
    "turns": "{} streams in turns",
}


def _loaded(result: Any) -> str:
    """Say how loaded the machine was."""
    return f"Load average meanwhile: {result['load'][0]}."


def draft(result: Any) -> str:
    """Texts with and without drafts."""
    titles = ["draft", "temperature", "times as fast", "accepted of proposed", "calls", "same text"]
    rows = []
    for row in result["rows"]:
        share = "–"
        if row["proposed"]:
            share = f"{row['accepted']:,} of {row['proposed']:,}"
        speed, same = f"{row['times_as_fast']:.2f}", "yes" if row["equal"] else "no"
        rows.append(
            [row["draft"], str(row["temperature"]), speed, share, f"{row['calls']:,}", same]
        )
    one, nine = result["call_ms"]["1"], result["call_ms"]["9"]
    head = (
        f"A byte-level model of {result['layers']} layers, width {result['dim']}; its draft has "
        f"one layer of width 64. A call of nine tokens takes {nine / one:.2f} times as long as a "
        f"call of one. {_loaded(result)}"
    )
    return f"{head}\n\n{table(titles, rows)}"


def pool(result: Any) -> str:
    """Sessions together, in turns and alone; the first token after a known prefix."""
    titles = ["", "tokens/s", "times one session's", "ms between tokens", "p99", "times alone"]
    alone, rows = result["alone"], []
    for name, title in ROUNDS.items():
        found = result[name]
        rows.append(
            [
                title.format(result["sessions"]),
                f"{found['tokens_per_second']:,.0f}",
                f"{found['tokens_per_second'] / alone['tokens_per_second']:.2f}",
                f"{found['median_ms']:.3g}",
                f"{found['p99_ms']:.3g}",
                f"{found['p99_ms'] / alone['p99_ms']:.2f}",
            ]
        )
    first = result["first_token_ms"]
    known = (
        f"The logits after a prompt of {result['prefix'] + 1:,} tokens take "
        f"{first['computed']:,.0f} ms computed, and {first['known']:.3g} ms where all but the "
        f"last are a known prefix: {first['computed'] / first['known']:,.0f} times as fast."
    )
    head = f"A model of four layers, width {result['dim']}. {_loaded(result)}"
    return f"{head}\n\n{table(titles, rows)}\n\n{known}"


def peers(result: Any) -> str:
    """Servers of one model."""
    head = (
        f"A Mamba2 of four layers, width {result['dim']}, float32; threads of each: "
        f"{result['threads']}. {_loaded(result)}"
    )
    return f"{head}\n\n{_speeds(result['times'])}"


def clients(result: Any) -> str:
    """One client and sixteen of one server."""
    times = result["times"]
    one, many, _ = times.values()
    gain, tail = (many[key] / one[key] for key in ("tokens_per_second", "p99_gap_ms"))
    return (
        f"A model of four layers, width {result['dim']}. {_loaded(result)}\n\n{_speeds(times)}\n\n"
        f"Sixteen clients get {gain:.2f} times one client's tokens a second, and the 99th "
        f"percentile of the time between tokens is {tail:.2f} times that of one client."
    )


def replicas(result: Any) -> str:
    """Clusters of one and two replicas, and one that is killed."""
    rows = [
        [
            name.removesuffix(" replicas"),
            *(_three_digits(float(np.mean([run[key] for run in runs]))) for key in CLUSTER),
        ]
        for name, runs in result["runs"].items()
    ]
    kill = result["kill"]
    return (
        f"{_loaded(result)}\n\n{table(['replicas', *CLUSTER.values()], rows)}\n\n"
        f"{kill['streams']:,} streams while one of two replicas is killed: {kill['wrong']} wrong, "
        f"{kill['lost']} lost."
    )


def requests(result: Any) -> str:
    """Thousands of requests to one server, and what came of them."""
    soak, plain = result["soak"], result["plain"]
    counts = ", ".join(f"{n:,} {kind}" for kind, n in sorted(soak["answered"].items()))
    memory = ", ".join(f"{mebibytes:,.0f}" for mebibytes in soak["server_mib"])
    return (
        f"{soak['requests']:,} requests in {soak['seconds']:,.0f} s ({counts}): "
        f"{len(soak['wrong_or_lost'])} wrong or lost, {soak['slots_left_taken']} slots left taken. "
        f"Memory of the server after each eighth, MiB: {memory}. Between two tokens of a stream "
        f"{soak['p99_gap_ms']:.0f} ms passed at the 99th percentile, and {plain['p99_gap_ms']:.0f} "
        f"where no such request came; /health/live took {soak['p99_live_ms']:.0f} and "
        f"{plain['p99_live_ms']:.0f} ms, {soak['longest_live_ms']:.0f} at most. {_loaded(result)}"
    )


def _speeds(times: Any) -> str:
    shown = [key for key in SPEED if all(key in found for found in times.values())]
    rows = [[name, *(_three_digits(found[key]) for key in shown)] for name, found in times.items()]
    return table(["", *(SPEED[key] for key in shown)], rows)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
