"""artifact, destination -> a folder in its place, whole or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from linexport import manifest as manifests
from linexport.artifact import write
from linexport.artifact.checked import checked_artifact
from linexport.artifact.signature import Trust
from linexport.errors import ParityError, UsageError
from linexport.package import proving
from linexport.package.destination import Destination, Packaged, Packaging
from linexport.package.standalone import rename_records

RECORD = "linexport-package.json"
"""Says of a folder that it was packaged, from what, and whether that failed a check."""


def package(
    artifact: str | Path,
    destination: Destination,
    output: str | Path,
    *,
    name: str | None = None,
    options: Mapping[str, str] | None = None,
    overwrite: bool = False,
    allow_failed: bool = False,
    prove: bool = False,
    trust: Trust | None = None,
) -> Packaged:
    """Write an artifact as the folder that another system takes.

    Args:
        artifact: the folder.
        destination: see ``linexport.package.find_destination``.
        output: a new folder, or one that was packaged before.
        name: what the model is called there; None for the name of the artifact's folder.
        options: of the destination.
        overwrite: replace what was packaged before.
        allow_failed: package an artifact that failed a check, and mark it.
        prove: run the package in its own runtime, see ``linexport.package.proving``.
        trust: whose artifacts are packaged; None for anybody's.

    Raises:
        UsageError: no such artifact or option, a name that cannot be, an output with other things
            in it, or a model that the destination cannot hold, or cannot prove.
        ParityError: the artifact failed a check, or the package does not write its texts.
        SignatureError: it is not as one who is trusted signed it.
        EnvironmentProblemError: the runtime to prove it in is not installed.
    """
    source, place, given = Path(artifact), Path(output), dict(options or {})
    checked = checked_artifact(source, trust)
    manifest = checked.manifest
    if manifest.status != "ok" and not allow_failed:
        raise ParityError(
            f"{source} {manifest.failure}; see {source / manifests.REPORT}. Pass "
            "--allow-failed to package it all the same, marked as failed."
        )
    if manifest.vision is not None and not destination.by_linexport:
        raise UsageError(
            f"{source} has a vision tower; {destination.name} takes text alone. Convert the model "
            "again with --no-vision."
        )
    if manifest.mtp is not None and not destination.by_linexport:
        raise UsageError(
            f"{source} has a head for multi-token prediction, which {destination.name} does not "
            "run. Convert the model again with --no-mtp."
        )
    if manifest.packed is not None and not destination.by_linexport:
        raise UsageError(
            f"{source} takes packed batches, and {destination.name} gives rows. Convert the model "
            f"again, without --packed-batches and for a target that {destination.name} takes."
        )
    unknown = sorted(given.keys() - destination.options.keys())
    if unknown:
        known = ", ".join(destination.options) or "none"
        raise UsageError(f"{destination.name} has no option {unknown[0]!r}; it has: {known}.")
    called = source.absolute().name if name is None else name
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", called):
        raise UsageError(f"{called!r} is not a name of letters, digits, _, . and -. Pass --name.")
    _check_place(place, overwrite, source)
    with write.staged(place) as folder:
        job = Packaging(source, manifest, folder, called, given)
        packaged = destination.write(job)
        if prove:
            packaged = _proven(job, destination, packaged, allow_failed)
        record = {
            "destination": destination.name,
            "model_sha256": manifest.model_sha256,
            "status": manifest.status,
            "renamed": dict(packaged.renamed),
            "notes": list(packaged.notes),
            "proof": packaged.proof,
        }
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        checked.check_unchanged()
        write.publish(folder, place)
    return packaged


def _proven(
    job: Packaging, destination: Destination, packaged: Packaged, allow_failed: bool
) -> Packaged:
    """Return what was packaged, with its proof.

    Raises:
        ParityError: the package writes other texts than the artifact.
    """
    named = replace(job, manifest=rename_records(job.manifest, packaged.renamed))
    proof = proving.prove(named, destination, packaged.even)
    if not proof.passed and not allow_failed:
        raise ParityError(f"{proof}. Nothing was packaged.")
    return replace(packaged, proof=f"{proof}.")


def _check_place(place: Path, overwrite: bool, source: Path) -> None:
    if not (place / RECORD).is_file():
        if manifests.is_artifact(place):
            raise UsageError(f"{place} is an artifact; expected a new or empty folder.")
        write.check_output(place, overwrite=False)
    elif not overwrite:
        raise UsageError(
            f"{place} was packaged before. Pass --overwrite to replace it once the new folder is "
            "complete, or choose another one."
        )
    write.check_apart(place, source)
