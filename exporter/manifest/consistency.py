"""Statements of a manifest that contradict each other, which no schema can say."""

from __future__ import annotations

import re
from collections.abc import Iterator

from linexport.manifest.file_names import MANIFEST, MODEL, REPORT
from linexport.manifest.records import FileRecord, Manifest, SourceRecord, StateRecord

SHA256 = re.compile(r"[0-9a-f]{64}")
STATE = re.compile(r"past_(\w+)", re.ASCII)
"""Names that linexport gives to states; the output's begins with ``present_``."""
FACTORY = re.compile(r"(.+\.py|[\w.]+):[\w.]+(\(.*\))?", re.DOTALL)
"""``package.module:callable`` or ``file.py:Class(argument=1)``."""
CLASS = re.compile(r"[\w.<>]+")


def contradictions(manifest: Manifest) -> Iterator[str]:
    """JSON paths with what is wrong there."""
    yield from _source(manifest.source)
    yield from _dims(manifest)
    yield from _files(manifest)
    inputs = {i.name: i for i in manifest.inputs}
    outputs = {o.name: o for o in manifest.outputs}
    if len(inputs) < len(manifest.inputs) or len(outputs) < len(manifest.outputs):
        yield "$.inputs or $.outputs names a tensor twice"
    for place, state in enumerate(manifest.states):
        path = f"$.states[{place}]"
        past, present = inputs.get(state.past), outputs.get(state.present)
        name = STATE.fullmatch(state.past)
        if name is None or state.present != f"present_{name[1]}":
            yield f"{path} is {state.past!r} and {state.present!r}, not past_... and present_..."
        elif past is None or present is None:
            yield f"{path} names {state.past!r} and {state.present!r}, not an input and an output"
        elif (past.dtype, past.shape) != (state.dtype, state.shape):
            yield f"{path} is {state.dtype} {state.shape}; the input is {past.dtype} {past.shape}"
        elif present.dtype != state.dtype or len(present.shape) != len(state.shape):
            yield f"{path} and its output {state.present!r} differ in dtype or rank"
        else:
            yield from _growth(path, state, present.shape)
    pasts = [s.past for s in manifest.states]
    if len(set(pasts)) < len(pasts):
        yield "$.states names an input twice"
    if manifest.streaming is not None and manifest.streaming.passed and not pasts:
        yield "$.states is empty; $.streaming.passed says that the model streams"


def _source(source: SourceRecord) -> Iterator[str]:
    if source.kind == "factory":
        if not FACTORY.fullmatch(source.location) or source.sha256 is not None:
            yield f"$.source is a factory; {source.location!r} is not package.module:callable"
    elif source.kind == "object":
        if not CLASS.fullmatch(source.location) or source.sha256 is not None:
            yield f"$.source is an object; {source.location!r} is not the name of a class"
    elif source.sha256 is None or not SHA256.fullmatch(source.sha256):
        yield f"$.source.sha256 is {source.sha256!r}; expected 64 hexadecimal digits"

    digest = source.weights_sha256
    if digest is not None and not SHA256.fullmatch(digest):
        yield f"$.source.weights_sha256 is {digest!r}; expected 64 hexadecimal digits"


def _dims(manifest: Manifest) -> Iterator[str]:
    carried = {s.past for s in manifest.states}
    symbols = {d for i in manifest.inputs for d in i.shape if isinstance(d, str)}
    needed = {d for i in manifest.inputs if i.name not in carried for d in i.shape}
    for name, limits in manifest.dims.items():
        sizes = [n for n in (limits.min, limits.opt, limits.max) if n is not None]
        if limits.min < 0 or sizes != sorted(sizes) or limits.traced < 0:
            yield f"$.dims.{name} has sizes that are not in order"
        if name not in symbols:
            yield f"$.dims.{name} is in the shape of no input"
    for name in sorted({d for d in needed if isinstance(d, str)} - set(manifest.dims)):
        yield f"$.dims has no {name!r}, which is in the shape of an input"


def _files(manifest: Manifest) -> Iterator[str]:
    for name, file in manifest.files.items():
        plain = name == name.strip() and not set(name) & set("/\\\0") and name not in (".", "..")
        if not name or not plain or name in (MANIFEST, REPORT):
            yield f"$.files names {name!r}, which is not a file of the artifact"
        if file.bytes < 0 or not (file.sha256 is None or SHA256.fullmatch(file.sha256)):
            yield f"$.files[{name!r}] is not a size and a SHA-256"
    model = manifest.files.get(MODEL, FileRecord(-1, None))
    if model.sha256 != manifest.model_sha256 or not SHA256.fullmatch(manifest.model_sha256):
        yield f"$.model_sha256 is not that of $.files[{MODEL!r}]"
    if manifest.vision is not None and manifest.vision.file not in manifest.files:
        yield "$.vision.file is not one of $.files"
    yield from _predictor(manifest)
    prepared = manifest.prepared
    if prepared is not None:
        named = (prepared.plugin_source, prepared.script, *prepared.loaders)
        for name in (name for name in named if name is not None and name not in manifest.files):
            yield f"$.prepared names {name!r}, which is not one of $.files"
    for place, engine in enumerate(manifest.engines):
        known = manifest.files.get(engine.file)
        if known is None or known.sha256 not in (None, engine.sha256):
            yield f"$.engines[{place}] is not one of $.files"


def _predictor(manifest: Manifest) -> Iterator[str]:
    head = manifest.mtp
    if head is None:
        return
    if head.file not in manifest.files:
        yield "$.mtp.file is not one of $.files"
    if head.hidden not in {o.name for o in manifest.outputs}:
        yield f"$.mtp.hidden is {head.hidden!r}, not an output"
    missing = {"logits", head.hidden} - {o.name for o in head.outputs}
    if missing:
        yield f"$.mtp.outputs has no {min(missing)!r}"


def _growth(path: str, state: StateRecord, present: tuple[int | str | None, ...]) -> Iterator[str]:
    """Shapes of past and present differ in the growing axis alone."""
    grown = [i for i, (a, b) in enumerate(zip(state.shape, present, strict=True)) if a != b]
    if grown != ([] if state.grows is None else [state.grows]):
        yield f"{path}.grows is {state.grows}; the shapes of input and output differ in {grown}"
