"""An artifact's folder whose signature, files and graph were checked, for commands to use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx

from linexport import manifest as manifests
from linexport.artifact import opening, signature
from linexport.artifact.folder_files import FolderFiles
from linexport.artifact.signature import Trust
from linexport.graph.interface import check_interface
from linexport.manifest import Manifest


@dataclass(frozen=True)
class CheckedArtifact:
    """A folder that holds an artifact, as it was when it was checked.

    Attributes:
        folder: of it.
        manifest: of it; its status is not looked at.
        graph: of its model, without weights.
        files: those that were hashed.
    """

    folder: Path
    manifest: Manifest
    graph: onnx.ModelProto
    files: FolderFiles

    def check_unchanged(self) -> None:
        """Check that the files are those that were hashed, before anything is made of them.

        Raises:
            UsageError: one was changed since.
        """
        self.files.check_unchanged(linked=True)  # checks link weights into folders of their own


def checked_artifact(folder: Path, trust: Trust | None = None) -> CheckedArtifact:
    """Check an artifact's folder: its signature if one is needed, then files, graph and interface.

    Args:
        folder: of the artifact.
        trust: whose artifacts are used; None for anybody's.

    Raises:
        UsageError: not an artifact, or one that is damaged or not described by its manifest.
        SignatureError: it is not as one who is trusted signed it.
        EnvironmentProblemError: its model is not an ONNX file.
    """
    files = FolderFiles(folder)
    if trust is not None:
        signature.check(files, trust)
    manifest = opening.read_manifest(files)
    graph = opening.check_files(files, manifest)[manifests.MODEL]
    check_interface(manifest, graph, str(folder / manifests.MANIFEST))
    for name in manifest.files:
        files.release(name)
    return CheckedArtifact(folder, manifest, graph, files)
