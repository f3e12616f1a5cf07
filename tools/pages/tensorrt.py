"""Versions of TensorRT whose headers the plugin library compiles with, from docs/data/."""

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


PARTS = {"tensorrt-headers": headers}
