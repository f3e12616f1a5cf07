"""Parts of the manifest that describe -> tables of ready text; nothing here knows HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from linexport.report.text import (
    ABSENT,
    amount,
    count,
    items,
    mapping,
    moment,
    number,
    objects,
    plain,
    shape,
    target,
)

OPS = {
    "LinearAttention": "Attention as a running sum: the cost grows in step with the length.",
    "CausalConvWithState": "A short convolution over the preceding tokens.",
    "FeatureMap": "The function applied to queries and keys in place of softmax.",
}


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


def columns(*labels: str) -> tuple[Column, ...]:
    """Headings; one that begins with # is of numbers."""
    return tuple(Column(label.removeprefix("#"), label.startswith("#")) for label in labels)


def build(
    caption: str, labels: Sequence[str], rows: Sequence[Sequence[Cell]], even: bool = False
) -> Table | None:
    """A table, or None where it would have no rows."""
    if not rows:
        return None
    return Table(caption, columns(*labels), tuple(tuple(row) for row in rows), even=even)


def facts(manifest: Mapping[str, Any]) -> list[tuple[str, Cell]]:
    """Source, target, files, date, seed and duration, each with its name."""
    source = mapping(manifest.get("source"))
    kind, digest = plain(source.get("kind")), source.get("sha256")
    unhashed = "none: a factory is code, not a file" if kind == "factory" else ABSENT
    made = Cell(moment(manifest.get("created")), f"by linexport {plain(manifest.get('linexport'))}")
    return [
        ("Model", Cell(plain(source.get("description")))),
        ("Target", Cell(target(manifest))),
        ("Source", Cell(plain(source.get("location")), kind.replace("_", " "), tone="code")),
        ("SHA-256", Cell(digest, tone="code") if isinstance(digest, str) else Cell(unhashed)),
        ("Files", Cell("model.onnx, manifest.json, report.html", "this page is report.html")),
        ("Created", made),
        ("Seed", Cell(plain(manifest.get("seed")), "of every random input below")),
        ("Time taken", _duration(manifest)),
    ]


def _duration(manifest: Mapping[str, Any]) -> Cell:
    stages = objects(manifest.get("stages"))
    if not stages:
        return Cell(ABSENT)
    parts = [f"{plain(stage.get('name'))} {amount(stage.get('seconds'))} s" for stage in stages]
    total = sum(number(stage.get("seconds")) or 0.0 for stage in stages)
    return Cell(f"{amount(total)} s", ", ".join(parts))


def fused(manifest: Mapping[str, Any]) -> Table | None:
    """Each kind of fused op, how many, and what it is."""
    rows = [
        [Cell(plain(op), tone="code"), Cell(count(much)), Cell(OPS.get(str(op), ""))]
        for op, much in mapping(manifest.get("fused")).items()
    ]
    return build("Fused ops", ["Op", "#Count", "What it is"], rows)


def lowerings(manifest: Mapping[str, Any]) -> Table | None:
    """Each fused node, the implementation chosen for it, why, and what tuning measured, if any."""
    tuned = any_tuned(manifest)
    rows = []
    for node in objects(manifest.get("lowerings")):
        name = Cell(plain(node.get("node")), plain(node.get("op")), tone="code")
        chosen = Cell(plain(node.get("lowering")), tone="code")
        rows.append([name, chosen, Cell(plain(node.get("reason")))])
        if tuned:
            rows[-1].append(_tuned(node))
    labels = ["Node", "Lowering", "Why", *["Tuning"] * tuned]
    return build("Lowering of each fused node", labels, rows)


def any_tuned(manifest: Mapping[str, Any]) -> bool:
    """Whether the lowerings of some node were timed against each other."""
    return any(objects(node.get("tuned")) for node in objects(manifest.get("lowerings")))


def _tuned(node: Mapping[str, Any]) -> Cell:
    timings = [
        f"{plain(timing.get('lowering'))} {amount(timing.get('median_ms'))}\u00a0ms"
        for timing in objects(node.get("tuned"))
    ]
    if timings:
        return Cell(", ".join(timings))
    return Cell("not measured: the choice follows a rule", tone="open")


def engines(manifest: Mapping[str, Any]) -> Table | None:
    """Each engine file: what it is for, what is in it, and whether it was run."""
    rows = []
    for engine in objects(manifest.get("engines")):
        made = f"{plain(engine.get('runtime'))} {plain(engine.get('version'))}"
        profiles = [plain(profile.get("name")) for profile in objects(engine.get("profiles"))]
        outcome = Cell("not checked", plain(engine.get("reason")), tone="open")
        if engine.get("checked") is not None:
            good = bool(engine["checked"])
            outcome = Cell("passed" if good else "failed", tone="good" if good else "bad")
        rows.append(
            [
                Cell(plain(engine.get("file")), made, tone="code"),
                Cell(f"{(number(engine.get('sm')) or 0) / 10:.1f}"),
                Cell(", ".join(profiles), plain(engine.get("precision"))),
                Cell(count(len(items(engine.get("plugins"))))),
                Cell(count(len(items(engine.get("layers"))))),
                Cell(amount((number(engine.get("scratch_bytes")) or 0) / 1e6)),
                outcome,
            ]
        )
    labels = ["File", "#Compute capability", "Profiles", "#Plugins", "#Layers", "#Scratch, MB"]
    return build("Engines", [*labels, "Compared with the original"], rows)


def refused(manifest: Mapping[str, Any]) -> Table | None:
    """What looked like linear attention and was left as it was."""
    rows = [
        [Cell(plain(one.get("where")), tone="code"), Cell(plain(one.get("reason")))]
        for one in objects(manifest.get("refused"))
    ]
    return build("Refused rewrites", ["Where", "Reason"], rows)


def interface(manifest: Mapping[str, Any]) -> Table | None:
    """Inputs, outputs and pairs of states."""
    rows = [
        [Cell(kind), Cell(plain(one.get("name")), tone="code"), *_tensor(one)]
        for kind in ("input", "output")
        for one in objects(manifest.get(f"{kind}s"))
    ]
    for one in objects(manifest.get("states")):
        names = f"{plain(one.get('past'))} → {plain(one.get('present'))}"
        rows.append([Cell("state", plain(one.get("op"))), Cell(names, tone="code"), *_tensor(one)])
    return build("Inputs, outputs and states", ["Role", "Name", "Type", "Shape"], rows)


def _tensor(one: Mapping[str, Any]) -> list[Cell]:
    return [Cell(plain(one.get("dtype")), tone="code"), Cell(shape(one.get("shape")), tone="code")]


def dims(manifest: Mapping[str, Any]) -> Table | None:
    """The dimensions that may vary, and how far."""
    rows = []
    for name, limits in mapping(manifest.get("dims")).items():
        limit = mapping(limits)
        top = "no limit" if limit.get("max") is None else count(limit["max"])
        low, opt = count(limit.get("min")), count(limit.get("opt"))
        rows.append([Cell(str(name), tone="code"), Cell(low), Cell(opt), Cell(top)])
    return build("Dimensions that vary", ["Name", "#Smallest", "#Tuned for", "#Largest"], rows)


def environment(manifest: Mapping[str, Any]) -> Table | None:
    """Versions and machine, as recorded."""
    rows = [
        [Cell(str(name).replace("_", " ")), Cell(_joined(value))]
        for name, value in mapping(manifest.get("environment")).items()
    ]
    return build("Environment", ["What", "Value"], rows)


def _joined(value: Any) -> str:
    return ", ".join(map(str, value)) if items(value) else plain(value)
