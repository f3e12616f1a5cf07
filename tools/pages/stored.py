"""Tables of measurements of artifacts whose weights are stored in fewer bits."""

from __future__ import annotations

from typing import Any

from pages import ms, table

MEMORY = ("file", "proof", "own", "stage", "limit")


def weights(result: Any) -> str:
    """Times and sizes of each kind of stored weights."""
    titles = ["model type", "", "eager", "float32", "int8", "int4", "int4 products alone"]
    stored = ("float32", "int8", "int4")
    rows = []
    for name, found in result["families"].items():
        step, prefill, size = found["step"], found["prefill"], found["bytes"]
        rows += [
            [
                f"`{name}`",
                "a step",
                *(ms(step[who]) for who in ("eager", *stored, "products int4")),
            ],
            ["", "512 tokens", *(ms(prefill[who]) for who in ("eager", *stored, "products int4"))],
            ["", "file, MB", "", *(f"{size[kind] / 1e6:,.0f}" for kind in stored), ""],
        ]
    clock = "processor time" if result["processor_time"] else "wall time"
    return f"{_size(result)}; {clock}, ms, threads: {result['threads']}.\n\n{table(titles, rows)}"


def memory(result: Any) -> str:
    """Memory of conversions with each kind of proof."""
    titles = ["checkpoint, MiB", "`--proof`", "own memory, MiB", "most while", "allowed, MiB"]
    rows = [
        [f"{run[key]:,}" if isinstance(run[key], int) else run[key] for key in MEMORY]
        for run in result["runs"]
    ]
    head = f"A `{result['family']}` with random weights, converted with `--weights int4`:"
    return f"{head}\n\n{table(titles, rows)}"


def int4(result: Any) -> str:
    """Times and sizes beside other programs' builds of 4 bits."""
    titles = ["model type", "weights", "a step", "512 tokens", "file, MB"]
    rows = []
    for family, found in result["families"].items():
        for name, row in found.items():
            cells = [ms(row["step"]), ms(row["prefill"]), f"{row['bytes'] / 1e6:,.0f}"]
            rows.append([f"`{family}`" if name == "int4" else "", name, *cells])
    return f"{_size(result)}; wall time, ms, threads: {result['threads']}.\n\n{table(titles, rows)}"


def llama(result: Any) -> str:
    """Times of public shapes in 4 bits beside llama.cpp and ik_llama.cpp."""
    titles = ["shape", "", "file, MB", "prompt, tokens", "prompt, ms", "a token after it, ms"]
    rows = []
    for run in result["runs"]:
        name, _, layers = run["shape"].partition(":")
        first = f"`{name}`, {layers} layers"
        for who, found in run["times"].items():
            size = f"{found['bytes'] / 1e6:,.0f}"
            for length, row in found["lengths"].items():
                cells = [f"{int(length):,}", ms(row["prompt"]), ms(row["step"])]
                rows.append([first, who, size, *cells])
                first = who = size = ""
    threads = result["runs"][0]["threads"]
    return f"Medians in wall time, threads: {threads}.\n\n{table(titles, rows)}"


def _size(result: Any) -> str:
    return (
        f"Width {result['width']:,}, {result['layers']} layers, vocabulary {result['vocabulary']:,}"
    )
