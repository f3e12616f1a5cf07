"""Inspection of a model or an artifact: matched attention, unmatched candidates, and ops."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx

from linexport import manifest as manifests
from linexport import passes, trace
from linexport.artifact import opening
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.graph import sequence_axis
from linexport.inspection import subgraph
from linexport.loaders import load_model
from linexport.plugins.ops.registry import linexport_nodes

REACH = 7
"""Steps above an unmatched candidate that are drawn: queries, keys and values meet within them."""


def inspect(path: str | Path, *, drawings: bool = False) -> dict[str, Any]:
    """A description of an artifact folder, or of a source as it would be converted.

    Args:
        path: the folder or source.
        drawings: with the graph around each match before and after, and around each unmatched
            candidate, as ``subgraph.around`` describes it.

    Returns:
        Of a source: ``matches`` (what was fused), ``unmatched`` and ``rejected`` (what was not,
        with the reason), ``mixing`` (operations that keep it from streaming), ``ops`` and ``nodes``
        before and after. Of an artifact: what its manifest says, and its ``ops``.

    Raises:
        LinexportError: neither can be read; see ``load_model``, ``trace`` and ``checked_graph``.
    """
    folder = Path(path)
    if manifests.has_manifest(folder):  # a damaged one is an error that says how
        return _artifact(folder)
    loaded = load_model(path, run=False)
    traced = trace.trace(loaded)
    model = traced.model
    plain, rewritten = passes.run(model, passes.STATELESS[:1]), passes.rewrite(model)
    findings = rewritten.findings
    found: dict[str, Any] = {
        "kind": loaded.source.kind,
        "source": vars(loaded.source),
        "dims": {n: vars(limits) for n, limits in traced.dims.items()},
        "nodes": {
            "traced": len(model.graph.node),
            "rewritten": len(rewritten.model.graph.node),
        },
        "matches": [asdict(match) for match in findings.matches],
        "unmatched": [asdict(candidate) for candidate in findings.unmatched],
        "rejected": [asdict(match) for match in findings.rejected],
        "mixing": sequence_axis.mixing(rewritten.model),
        "ops": _ops(rewritten.model),
        "warnings": list(loaded.warnings),
    }
    if drawings:
        for match in found["matches"]:
            match["before"] = subgraph.around(plain, match["replaced"])
            match["after"] = subgraph.around(rewritten.model, match["added"])
        for candidate in found["unmatched"]:
            candidate["before"] = subgraph.around(plain, candidate["nodes"], REACH)
    return found


def _artifact(folder: Path) -> dict[str, Any]:
    manifest = manifests.read(folder)
    content = manifests.to_json(manifest)
    try:
        model = opening.checked_graph(folder / manifests.MODEL)
    except EnvironmentProblemError as error:
        raise UsageError(f"{folder} cannot be read. {error}") from None
    chosen = {c.node: c.lowering for c in manifest.lowerings}
    ops = [{**op, "lowering": chosen.get(op["node"])} for op in _ops(model)]
    kept = (
        "status",
        "target",
        "source",
        "inputs",
        "outputs",
        "states",
        "dims",
        "nodes",
        "rejected",
    )
    return {"kind": "artifact", **{k: content[k] for k in kept}, "ops": ops}


def _ops(model: onnx.ModelProto) -> list[dict[str, Any]]:
    found = []
    for node, op, seen in linexport_nodes(model):
        entry = {"node": node.name, "op": op.name, **seen.attributes, **op.sizes(seen)}
        found.append({**entry, "details": op.describe(seen)})
    return found
