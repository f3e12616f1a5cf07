"""The manifest that ``convert`` returns: of an artifact that is there, and can be opened."""

from __future__ import annotations

from typing import Any

from linexport.artifact import Artifact, load
from linexport.manifest import Manifest


class OpenableManifest(Manifest):
    """The manifest of an artifact that was just written; equal to the one that is read from it."""

    @classmethod
    def of(cls, manifest: Manifest) -> OpenableManifest:
        """Return a manifest as that of an artifact that is there."""
        return cls(**vars(manifest))

    def load(self, **options: Any) -> Artifact:
        """Open the artifact; options and errors are those of ``linexport.load``."""
        return load(self.artifact, **options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and vars(self) == vars(other)

    __hash__ = Manifest.__hash__
