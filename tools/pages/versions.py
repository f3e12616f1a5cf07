"""Tables of the page "Versions": releases that are tested, and what was run with each of them."""

from __future__ import annotations

import json
from typing import Any

from pages import NONE, ROOT, table


def runs() -> list[dict[str, Any]]:
    """Return the runs of ``docs/data/versions.json``, the newest releases first."""
    from linexport.system.versions import numbers

    found: list[dict[str, Any]] = json.loads((ROOT / "docs/data/versions.json").read_text())["runs"]
    return sorted(
        found,
        key=lambda run: [numbers(run["releases"][name]) for name in ("transformers", "torch")],
        reverse=True,
    )


def windows() -> str:
    """Return the releases of each library that are tested."""
    from linexport.system.versions import WINDOWS

    return table(
        ["library", "oldest", "newest"],
        [[f"`{w.package}`", w.oldest, w.newest] for w in WINDOWS],
    )


def _cell(said: str | None) -> str:
    if said is None:
        return NONE
    return {"streams": "yes"}.get(said, said.partition(":")[0])


def types() -> str:
    """Return what became of a tiny model of each type, by the release of transformers."""
    by_release: dict[str, dict[str, str]] = {}
    for run in runs():
        for name, said in run["types"].items():
            by_release.setdefault(run["releases"]["transformers"], {}).setdefault(name, said)
    names = dict.fromkeys(name for found in by_release.values() for name in found)
    rows = [[f"`{n}`", *(_cell(found.get(n)) for found in by_release.values())] for n in names]
    return table(["model type", *by_release], rows)


def environments() -> str:
    """Return the environments in which model types were converted, and what else was run."""
    rows = []
    for run in runs():
        said = list(run["types"].values())
        streams = said.count("streams")
        refused = sum(s.startswith("refused") for s in said)
        kind = "exported and run in pieces" if run["quick"] else "converted"
        what = [f"{streams} of {len(said)} types {kind}"] if said else []
        what += [f"{refused} refused"] if refused else []
        what += [f"{name}: {outcome}" for name, outcome in run["also"].items()]
        releases = [run["releases"][n] for n in ("transformers", "torch", "onnx", "onnxruntime")]
        rows.append([run["date"], run["python"], *releases, "; ".join(what)])
    titles = ["date", "Python", "transformers", "torch", "onnx", "ONNX Runtime", "what was run"]
    return table(titles, rows)


def internals() -> str:
    """Return the names of torch that it does not promise, and what is done without them."""
    from linexport.system.torch_internals import all_internals

    rows = [
        [f"`{i.module}.{i.name}`", i.purpose, i.without or "refused, with the release"]
        for i in sorted(all_internals(), key=lambda i: (i.module, i.name))
    ]
    return table(["name", "linexport", "without it"], rows)


PARTS = {
    "version-windows": windows,
    "version-types": types,
    "version-runs": environments,
    "torch-internals": internals,
}
