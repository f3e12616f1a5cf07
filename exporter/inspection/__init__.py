"""Inspection of a model or an artifact: matched attention, unmatched candidates, and ops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from linexport import manifest as manifests
from linexport.artifact import opening, signature
from linexport.artifact.folder_files import FolderFiles
from linexport.artifact.signature import Trust
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.inspection.ops import linexport_ops
from linexport.manifest.inspected import ArtifactInspection, SourceInspection


def inspect(
    source: object,
    args: tuple[object, ...] | None = None,
    kwargs: Mapping[str, object] | None = None,
    *,
    dynamic_shapes: object = None,
    drawings: bool = False,
    trust: Trust | None = None,
    state_dict: str | Path | None = None,
    inputs: Iterable[str] = (),
    stand_ins: bool = False,
) -> SourceInspection | ArtifactInspection:
    """Describe an artifact folder, or a source as it would be converted.

    Args:
        source: the folder of an artifact, or whatever ``convert`` takes.
        args: positional example inputs, where the source is a module.
        kwargs: those by name.
        dynamic_shapes: of the examples, in torch.export's notation; None for batch and length.
        drawings: with the graph around each match before and after, and around each unmatched
            candidate.
        trust: whose artifacts are described; None for anybody's. Sources are not signed.
        state_dict: file of weights for a class or function of the user's.
        inputs: example inputs of it; see ``load_model``.
        stand_ins: make packages of GPU libraries that its code imports and that are not installed.

    Returns:
        A record; its ``to_json`` is what ``inspect --json`` prints.

    Raises:
        UsageError: the source is something else.
        LinexportError: neither can be read; see ``load_model``, ``trace`` and ``checked_graph``.
        SignatureError: the artifact is not as one who is trusted signed it.
    """
    # A damaged manifest is an error that says how.
    if isinstance(source, str | Path) and manifests.has_manifest(Path(source)):
        return _artifact(Path(source), trust)
    # PyTorch, which artifacts do without.
    from linexport.inspection.source import inspect_source
    from linexport.sources.objects import with_examples

    given = with_examples(source, args, kwargs, dynamic_shapes)
    return inspect_source(
        given, drawings, state_dict=state_dict, inputs=inputs, stand_ins=stand_ins
    )


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
