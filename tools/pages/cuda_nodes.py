"""The table of nodes a layer in artifacts of target ort-cuda."""

from __future__ import annotations

from pages import table
from pages.measured import record, with_circumstances


def _layers() -> str:
    found = record("cuda_nodes")
    rows = [
        [row["layer"], *(str(row[side][what]) for what in KINDS for side in ("before", "after"))]
        for row in found["result"]
    ]
    titles = ["a layer in fp16", *(f"{what}{form}" for what in KINDS for form in FORMS)]
    return with_circumstances(found, table(titles, rows))


KINDS, FORMS = ("nodes", "casts"), (" without these", "")

PARTS = {"cuda-nodes": _layers}
