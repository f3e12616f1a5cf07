"""The artifact folder: written atomically, opened for running and streaming."""

from linexport.artifact.runtime import Artifact, Stream, load

__all__ = ["Artifact", "Stream", "load"]
