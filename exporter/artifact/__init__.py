"""The artifact folder: written atomically, opened for running and streaming."""

from linexport.artifact.runtime import Artifact, load
from linexport.artifact.state import StreamState
from linexport.artifact.stream import Stream
from linexport.artifact.text.speculation import NGramDraft

__all__ = ["Artifact", "NGramDraft", "Stream", "StreamState", "load"]
