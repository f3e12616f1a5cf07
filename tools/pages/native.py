"""Tables of the CPU library's speed, from docs/data/cpu/: one for each machine."""

from __future__ import annotations

from typing import Any

from pages import NONE, ROOT, table
from pages.measured import record, with_circumstances

OTHERS = {
    "function": "function",
    "kernel": "ONNX Runtime's kernel",
    "torch.compile": "torch.compile",
    "OpenVINO": "OpenVINO",
    "eager": "eager PyTorch",
    "one thread": "on one thread",
}
"""Titles of the others, as records name them; those of a record that were measured are shown."""


FLOAT32 = "float32"


def cpu() -> str:
    """Where each record of docs/data/cpu/ was measured, and its ratios."""
    paths = sorted((ROOT / "docs/data/cpu").glob("*.json"))
    return "\n\n".join(_machine(record(f"cpu/{path.stem}")) for path in paths)


def _machine(found: dict[str, Any]) -> str:
    measured = {who for row in found["result"]["rows"] for who in row["times_library"]}
    others = [who for who in OTHERS if who in measured]
    titles = ["layer", "tokens", *(OTHERS[who] for who in others), "bound", "load"]
    rows = [_row(row, others) for row in found["result"]["rows"]]
    return with_circumstances(found, table(titles, rows))


def _row(row: dict[str, Any], others: list[str]) -> list[str]:
    """Return no times, as other programs ran on such machines as well."""
    times = [_times(row["times_library"].get(who)) for who in others]
    bound, load = f"{1 / row['library_over_bound']:.2f}", f"{row['load']:.1f}"
    return [row["case"], f"{row['length']:,}", *times, bound, load]


def _times(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}"


def products() -> str:
    """Speeds of products with weights of few bits, over float32's; see bench_products.py."""
    found = record("products")
    result = found["result"]
    forms = [form for form in result["rows"][0]["ms"] if form != FLOAT32]
    rows = [
        [f"{row['tokens']:,}", *(f"{row['ms'][FLOAT32] / row['ms'][form]:.2f}" for form in forms)]
        for row in result["rows"]
    ]
    rows.append(["1, of a copy's speed", *(f"{result['of_memory'][form]:.2f}" for form in forms)])
    return with_circumstances(found, table(["tokens", *map(_form, forms)], rows))


def _form(form: str) -> str:
    """Write "4/32 library" for people."""
    stored, _, own = form.partition(" ")
    bits, block = stored.split("/")
    return f"{bits} bits in blocks of {block}, {own or 'ONNX Runtime'}"


PARTS = {"measured-cpu": cpu, "measured-products": products}
