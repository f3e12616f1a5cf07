"""Parts of the manifest that describe -> tables of ready text; nothing here knows HTML."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from linexport.manifest import Manifest
from linexport.manifest.records import BUFFER, IsolationRecord, StateRecord, TensorRecord
from linexport.manifest.rewriting import LoweringRecord
from linexport.plugins.ops.registry import all_ops
from linexport.report.text import (
    ABSENT,
    KEPT,
    NO_REASON,
    amount,
    count,
    error,
    moment,
    shape,
    target_name,
)


@dataclass(frozen=True)
class Cell:
    """Text, a smaller line beneath it, how many columns it takes, and a tone for its colour.

    Tones: "good", "bad", "open" (not measured), "code" (a name from the model), "strong".
    """

    text: str
    note: str = ""
    span: int = 1
    tone: str = ""


@dataclass(frozen=True)
class Column:
    """A heading, and whether its cells are numbers, which align to the right."""

    label: str
    numeric: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells; groups are headings over several columns, as (label, columns).

    Columns of an even table are of one width, whatever is in them.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    groups: tuple[tuple[str, int], ...] = ()
    even: bool = False


def headings(*labels: str) -> tuple[Column, ...]:
    """Headings; one that begins with # is of numbers."""
    return tuple(Column(label.removeprefix("#"), label.startswith("#")) for label in labels)


def make_table(
    caption: str, labels: Sequence[str], rows: Sequence[Sequence[Cell]], even: bool = False
) -> Table | None:
    """A table, or None where it would have no rows."""
    if not rows:
        return None
    return Table(caption, headings(*labels), tuple(tuple(row) for row in rows), even=even)


UNHASHED = {
    "factory": "none: a factory is code, not a file",
    "object": "none: it was an object in memory, not a file",
}
"""Why a source without weights has no digest, by its kind."""


def facts(manifest: Manifest) -> list[tuple[str, Cell]]:
    """Source, target, files, date, seed and duration, each with its name."""
    source = manifest.source
    unhashed = UNHASHED.get(source.kind, ABSENT)
    of_weights = "of the weights" if source.sha256 is None else ""
    known = source.sha256 or source.weights_sha256
    digest = Cell(known, of_weights, tone="code") if known else Cell(unhashed)
    return [
        ("Model", Cell(source.description)),
        ("Target", Cell(target_name(manifest.target), _capabilities(manifest))),
        ("Source", Cell(source.location, source.kind.replace("_", " "), tone="code")),
        ("SHA-256", digest),
        ("Files", Cell("model.onnx, manifest.json, report.html", "this page is report.html")),
        ("Created", Cell(moment(manifest.created), f"by linexport {manifest.linexport}")),
        ("Seed", Cell(str(manifest.seed), "of every random input below")),
        ("Time taken", _duration(manifest)),
        *([("Isolation", _isolation(manifest.isolation))] if manifest.isolation else []),
    ]


def _capabilities(manifest: Manifest) -> str:
    if manifest.packed is not None:
        return "packed batches: sequences side by side"
    sms = manifest.options.sms
    return f"compute capability {', '.join(f'{sm / 10:.1f}' for sm in sms)}" if sms else ""


def _isolation(record: IsolationRecord) -> Cell:
    lacking = ", ".join(record.unavailable)
    return Cell(", ".join(record.applied), f"not available here: {lacking}" if lacking else "")


def _duration(manifest: Manifest) -> Cell:
    if not manifest.stages:
        return Cell(ABSENT)
    parts = [f"{stage.name} {amount(stage.seconds)} s" for stage in manifest.stages]
    total = sum(stage.seconds for stage in manifest.stages)
    return Cell(f"{amount(total)} s", ", ".join(parts))


def fused(manifest: Manifest) -> Table | None:
    """Each kind of fused op, how many, and what it is; an op of another package may be absent."""
    known = {name: op.summary for name, op in all_ops().items()}
    rows = [
        [Cell(op, tone="code"), Cell(count(much)), Cell(known.get(op, ""))]
        for op, much in manifest.fused.items()
    ]
    return make_table("Fused ops", ["Op", "#Count", "What it is"], rows)


def passes(manifest: Manifest) -> Table | None:
    """Each run of a pass over the graph: its time, and the nodes before and after."""
    rows = [
        [
            Cell(one.name, one.stage, tone="code"),
            Cell(amount(1e3 * one.seconds)),
            Cell(count(one.nodes_before)),
            Cell(count(one.nodes_after)),
            Cell("yes" if one.changed else "no"),
        ]
        for one in manifest.passes
    ]
    return make_table("Passes", ["Pass", "#ms", "#Nodes before", "#Nodes after", "Changed"], rows)


def lowerings(manifest: Manifest) -> Table | None:
    """Each fused node, the implementation chosen for it, why, and what tuning measured, if any."""
    tuned = any_tuned(manifest)
    rows = []
    for node in manifest.lowerings:
        name = Cell(node.node, node.op, tone="code")
        rows.append([name, Cell(node.lowering, tone="code"), Cell(node.reason)])
        if tuned:
            rows[-1].append(_tuned(node))
    labels = ["Node", "Lowering", "Why", *["Tuning"] * tuned]
    return make_table("Lowering of each fused node", labels, rows)


def any_tuned(manifest: Manifest) -> bool:
    """Return whether the lowerings of some node were timed against each other."""
    return any(node.tuned for node in manifest.lowerings)


def _tuned(node: LoweringRecord) -> Cell:
    timings = [f"{t.lowering} {amount(t.median_ms)}\u00a0ms" for t in node.tuned or ()]
    if timings:
        return Cell(", ".join(timings))
    return Cell("not measured: the choice follows a rule", tone="open")


def engines(manifest: Manifest) -> Table | None:
    """Each engine file: what it is for, what is in it, and whether it was run."""
    rows = []
    for engine in manifest.engines:
        profiles = ", ".join(profile.name for profile in engine.profiles)
        outcome = Cell("not checked", engine.reason or NO_REASON, tone="open")
        if engine.checked is not None:
            good = engine.checked
            outcome = Cell("passed" if good else "failed", tone="good" if good else "bad")
        rows.append(
            [
                Cell(engine.file, f"{engine.runtime} {engine.version}", tone="code"),
                Cell(f"{engine.sm / 10:.1f}"),
                Cell(profiles, engine.precision),
                Cell(count(len(engine.plugins))),
                Cell(count(len(engine.layers))),
                Cell(amount(engine.scratch_bytes / 1e6)),
                outcome,
            ]
        )
    labels = ["File", "#Compute capability", "Profiles", "#Plugins", "#Layers", "#Scratch, MB"]
    return make_table("Engines", [*labels, "Compared with the original"], rows)


def prepared(manifest: Manifest) -> Table | None:
    """Each GPU that an engine can be built for elsewhere, the driver it needs, and the command."""
    rows = []
    for gpu in manifest.prepared.gpus if manifest.prepared else ():
        driver = "TensorRT's" if gpu.driver is None else f"{gpu.driver} (CUDA {gpu.cuda})"
        command = shlex.join(["trtexec", *gpu.trtexec]) if gpu.trtexec else "linexport build"
        rows.append([Cell(f"{gpu.sm / 10:.1f}"), Cell(driver), Cell(command, tone="code")])
    labels = ["#Compute capability", "Linux driver from", "Built by"]
    return make_table("Prepared", labels, rows)


def rejected(manifest: Manifest) -> Table | None:
    """Table of candidates that looked like linear attention and were left as they were."""
    rows = [
        [Cell(one.where, tone="code"), Cell(one.reason), Cell(one.line or "", tone="code")]
        for one in manifest.refused
    ]
    return make_table("Refused rewrites", ["Where", "Reason", "Line"], rows)


def kept(manifest: Manifest) -> Table | None:
    """Table of the softmax attention that has its keys and values as states."""
    rows = [
        [Cell(one.where, tone="code"), Cell(one.line or "", tone="code")]
        for one in manifest.kept_attention
    ]
    return make_table(f"Kept: {KEPT}", ["Where", "Line"], rows)


def kernels(manifest: Manifest) -> Table | None:
    """Table of the GPU libraries' kernels that were stood in for while the original ran."""
    return make_table(
        "Kernels of GPU libraries, computed in PyTorch where the original ran",
        ("Kernel", "Computed as", "Difference from the library's own reference"),
        [
            [
                Cell(one.name, note=one.package, tone="code"),
                Cell(one.formula, note=one.stand_in),
                Cell(ABSENT) if one.error is None else Cell(error(one.error), note=one.reference),
            ]
            for one in manifest.kernels
        ],
    )


def interface(manifest: Manifest) -> Table | None:
    """Inputs, outputs and pairs of states of the graph."""
    graph = manifest.packed or manifest
    rows = [
        [Cell(kind), Cell(one.name, tone="code"), *_tensor(one)]
        for kind, tensors in (("input", graph.inputs), ("output", graph.outputs))
        for one in tensors
    ]
    for state in manifest.states:
        names = Cell(f"{state.past} → {state.present}", tone="code")
        of = f"{state.op}, {state.rows}" if state.op == BUFFER else state.op
        rows.append([Cell("state", of), names, *_tensor(state)])
    return make_table("Inputs, outputs and states", ["Role", "Name", "Type", "Shape"], rows)


def _tensor(one: TensorRecord | StateRecord) -> list[Cell]:
    return [Cell(one.dtype, tone="code"), Cell(shape(one.shape), tone="code")]


def dims(manifest: Manifest) -> Table | None:
    """The dimensions that may vary, and how far."""
    rows = []
    for name, limits in manifest.dims.items():
        top = "no limit" if limits.max is None else count(limits.max)
        opt = ABSENT if limits.opt is None else count(limits.opt)
        rows.append([Cell(name, tone="code"), Cell(count(limits.min)), Cell(opt), Cell(top)])
    return make_table("Dimensions that vary", ["Name", "#Smallest", "#Tuned for", "#Largest"], rows)


def environment(found: Mapping[str, object]) -> Table | None:
    """Versions and machine, as recorded."""
    rows = [
        [Cell(name.replace("_", " ")), Cell(ABSENT if value is None else str(value))]
        for name, value in found.items()
    ]
    return make_table("Environment", ["What", "Value"], rows)
