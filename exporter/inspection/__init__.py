"""Inspection of a model or an artifact: matched attention, unmatched candidates, and ops."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from linexport import manifest as manifests
from linexport.artifact import opening, signature
from linexport.artifact.folder_files import FolderFiles
from linexport.artifact.signature import Trust
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.inspection.ops import linexport_ops
from linexport.manifest.inspected import ArtifactInspection, SourceInspection


def inspect(
    path: str | Path,
    *,
    drawings: bool = False,
    trust: Trust | None = None,
    state_dict: str | Path | None = None,
    inputs: Iterable[str] = (),
) -> SourceInspection | ArtifactInspection:
    """Describe an artifact folder, or a source as it would be converted.

    Args:
        path: the folder or source.
        drawings: with the graph around each match before and after, and around each unmatched
            candidate.
        trust: whose artifacts are described; None for anybody's. Sources are not signed.
        state_dict: file of weights for a class or function of the user's.
        inputs: example inputs of it; see ``load_model``.

    Returns:
        A record; its ``to_json`` is what ``inspect --json`` prints.

    Raises:
        LinexportError: neither can be read; see ``load_model``, ``trace`` and ``checked_graph``.
        SignatureError: the artifact is not as one who is trusted signed it.
    """
    folder = Path(path)
    if manifests.has_manifest(folder):  # a damaged one is an error that says how
        return _artifact(folder, trust)
    from linexport.inspection.source import inspect_source  # PyTorch, which artifacts do without

    return inspect_source(path, drawings, state_dict=state_dict, inputs=inputs)


def _artifact(folder: Path, trust: Trust | None) -> ArtifactInspection:
    files = FolderFiles(folder)
    if trust is not None:
        signature.check(files, trust)
    manifest = opening.read_manifest(files)
    try:
        model = opening.read_graph(files, manifests.MODEL)
    except EnvironmentProblemError as error:
        raise UsageError(f"{folder} cannot be read. {error}") from None
    return ArtifactInspection(manifest, linexport_ops(model))
