"""Facts of TensorRT found without a GPU, from docs/data/: headers, and memory for logits."""

from __future__ import annotations

from typing import Any

from pages.measured import record


def headers() -> str:
    """Return which versions compile, by which compiler, and those that do not."""
    found = record("tensorrt_headers")
    result = found["result"]
    right = [one for one in result["versions"] if not one["failure"]]
    counts = " or ".join(sorted({str(one["creators"]) for one in right}))
    text = (
        f"The plugin library and `run.cpp` compile without warnings (`-Wall -Wextra -Werror`, "
        f"{result['compiler']}) with the headers of {len(right)} versions of TensorRT: "
        f"{_listed(right)}. Each library hands TensorRT {counts} creators of plugins. Run "
        f"{found['date']} by `{found['command']}`."
    )
    wrong = [one for one in result["versions"] if one["failure"]]
    return f"{text} They do not compile with {_listed(wrong)}." if wrong else text


def _listed(versions: list[dict[str, Any]]) -> str:
    return ", ".join(one["version"] for one in versions)


def logits() -> str:
    """Return the memory of an engine for all logits, and for those that are read."""
    found = record("engine_logits")
    result = found["result"]
    dims = ", ".join(f"{name} to {most:,}" for name, most in result["dims"].items())
    lines = [
        f"| {result['words']:,} words, {dims}, fp16 | logits of the largest call | their "
        "half-precision form, allocated in a call | other activations |",
        "|---|--:|--:|--:|",
    ]
    for key, name in (("all", "of all tokens"), ("kept", "of those at `logits_at`")):
        row = result[key]
        sizes = (row[f"{part}_bytes"] for part in ("logits", "allocated", "activation"))
        cells = " | ".join(f"{size / 1e9:.2f} GB" for size in sizes)
        lines.append(f"| {name}, {row['tokens']:,} a row at most | {cells} |")
    said = (
        f"Built {found['date']} by TensorRT-RTX {result['version']}, by `{found['command']}`; "
        "nothing was run."
    )
    return "\n".join([*lines, "", said])


PARTS = {"tensorrt-headers": headers, "engine-logits": logits}
