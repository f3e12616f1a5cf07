"""The artifact folder: written atomically, opened for running and streaming."""

from linexport.artifact.runtime import Artifact, load
from linexport.artifact.speculation import NGramDraft
from linexport.artifact.state import StreamState
from linexport.artifact.stream import Stream

__all__ = ["Artifact", "NGramDraft", "Stream", "StreamState", "load"]
