"""``hub``: the artifact with a model card, as huggingface_hub's ``upload_folder`` takes it.

    artifact -> its files as they are, and README.md: YAML for the hub, the proof, how to run it

The folder is an artifact: what is downloaded from the hub opens by ``linexport.load``. A signature
is not copied: it covers all files of a folder, so the new one is signed again.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from linexport.errors import UsageError
from linexport.manifest import MANIFEST, REPORT, Manifest
from linexport.package.destination import Destination, Packaged, Packaging
from linexport.report.verdict import checks, verdict
from linexport.sources.hugging_face.hub import HUB_NAME
from linexport.system.escape import markdown, python_string, yaml_string

CARD = "README.md"
TAGS = ("linexport", "onnx", "linear-attention")
OPTIONS = {
    "license": "of the model, as the hub names it, such as apache-2.0; that of the original",
    "base-model": "org/model that it was converted from; known where the source was such a name",
    "pipeline-tag": "task, as the hub names it; text-generation for a language model",
}
_WORD = re.compile(r"[a-z0-9][a-z0-9.+-]*")


def _write(job: Packaging) -> Packaged:
    card = _card(job)
    for name in (*job.manifest.files, MANIFEST, REPORT):
        if (job.source / name).is_file():
            (job.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(job.source / name, job.folder / name)
    (job.folder / CARD).write_text(card, encoding="utf-8")
    upload = f"hf upload ORG/{job.name} FOLDER"
    return Packaged(notes=(f"Read {CARD}, then upload the folder: {upload}",))


def _card(job: Packaging) -> str:
    return "\n".join((*_front_matter(job), "", *_text(job))) + "\n"


def _front_matter(job: Packaging) -> Iterator[str]:
    """Yield the lines that the hub reads."""
    yield "---"
    yield "library_name: linexport"
    for key, value in _metadata(job).items():
        yield f"{key}: {yaml_string(value)}"
    yield "tags:"
    yield from (f"- {tag}" for tag in TAGS)
    yield "---"


def _metadata(job: Packaging) -> dict[str, str]:
    """Return what is known of the model, or said by options.

    Raises:
        UsageError: an option is not a name as the hub has them.
    """
    found = {}
    base = job.options.get("base-model") or _named(job.manifest)
    if base is not None:
        if not HUB_NAME.fullmatch(base) or "@" in base:
            raise UsageError(f"base-model={base}: expected the name of a model, org/model.")
        found["base_model"] = base
    task = "text-generation" if _writes_text(job.manifest) else None
    given = {"license": None, "pipeline-tag": task, **job.options}
    for option in ("license", "pipeline-tag"):
        value = given[option]
        if value is not None:
            if not _WORD.fullmatch(value):
                raise UsageError(f"{option}={value}: expected a word such as the hub has.")
            found[option.replace("-", "_")] = value
    return found


def _named(manifest: Manifest) -> str | None:
    """Return the name on the hub of the original; None where it was no such model."""
    match = HUB_NAME.fullmatch(manifest.source.location)
    return match["name"] if match and manifest.source.kind == "hugging_face" else None


def _writes_text(manifest: Manifest) -> bool:
    return manifest.head is None and "tokenizer.json" in manifest.files


def _text(job: Packaging) -> Iterator[str]:
    manifest = job.manifest
    yield f"# {markdown(job.name)}"
    yield ""
    yield f"{markdown(verdict(manifest).sentence)}"
    yield ""
    yield (
        f"Converted by linexport {markdown(manifest.linexport)} for target "
        f"{markdown(manifest.target)} from {markdown(_original(manifest))}."
    )
    yield ""
    yield from _table("what was compared", "outcome", _outcomes(manifest))
    yield "Where it was compared, and by which versions:"
    yield ""
    yield from _table("", "", _environment(manifest))
    for warning in manifest.warnings:
        yield f"- {markdown(warning)}"
    yield ""
    yield f"`{REPORT}` has every case; `{MANIFEST}` is the same for programs."
    yield ""
    yield "## Run it"
    yield ""
    yield "```python"
    yield "import linexport"
    yield "from huggingface_hub import snapshot_download"
    yield ""
    yield f"model = linexport.load(snapshot_download({python_string(f'ORG/{job.name}')}))"
    yield "```"
    yield ""
    yield "`model.onnx` also runs in plain ONNX Runtime."


def _original(manifest: Manifest) -> str:
    """Return what the original is, without the folders of the machine it was on."""
    source = manifest.source
    named = HUB_NAME.fullmatch(source.location) or source.kind in ("factory", "object")
    place = source.location if named else Path(source.location).name
    digest = f", SHA-256 {source.sha256}" if source.sha256 else ""
    return f"{place} ({source.description}{digest})"


def _outcomes(manifest: Manifest) -> Mapping[str, str]:
    return {check.name: f"{check.word}: {check.detail}" for check in checks(manifest)}


def _environment(manifest: Manifest) -> Mapping[str, str]:
    return {name: str(value) for name, value in manifest.environment.items() if value}


def _table(first: str, second: str, rows: Mapping[str, str]) -> Iterator[str]:
    yield f"| {first} | {second} |"
    yield "| --- | --- |"
    yield from (f"| {markdown(name)} | {markdown(text)} |" for name, text in rows.items())
    yield ""


DESTINATION = Destination(
    "hub",
    "The artifact with a model card and its proof, for upload to the Hugging Face hub.",
    _write,
    OPTIONS,
    by_linexport=True,
)
