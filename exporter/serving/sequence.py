"""A piece of a sequence that its client feeds itself: inputs in, outputs of all its tokens out."""

from __future__ import annotations

from typing import Any

import numpy as np

from linexport.artifact import Artifact, StreamState
from linexport.graph.states import rows_dim
from linexport.serving.channel import Channel
from linexport.serving.engine import StoppedError
from linexport.serving.session import Session
from linexport.serving.task import Feeds

Outputs = dict[str, np.ndarray]


class SequenceStep:
    """One piece; a task of the engine.

    Args:
        model: that computes it.
        feeds: inputs, of one row.
        channel: where the outputs go.
        resumes: name of the sequence that it goes on with; None begins one.
        holds: name under which the sequence is kept; None ends it.
    """

    def __init__(
        self,
        model: Artifact,
        feeds: Feeds,
        channel: Channel[Any],
        *,
        resumes: str | None,
        holds: str | None,
    ) -> None:
        self.cancelled = False
        self.resumes, self.holds = resumes, holds
        self._model, self._feeds, self._channel = model, feeds, channel
        self._pieces: list[Feeds] = []
        self.logits_to_keep = 0

    def state(self) -> StreamState | None:
        return None

    def begin(self) -> Feeds:
        return self._feeds

    def receive(self, outputs: Feeds, session: Session) -> None:
        """Keep the outputs of a call; the last one makes them whole."""
        self._pieces.append(outputs)
        if not session.queued:
            self._channel.put(self.answer(session))

    def fail(self, error: Exception) -> None:
        self._channel.fail(error)

    def park(self, session: Session | None) -> None:
        self._channel.fail(StoppedError("The server is shutting down."))

    def answer(self, session: Session) -> Any:
        """Return what the client gets of the whole piece."""
        return self.joined()

    def joined(self) -> Outputs:
        """Join what several calls computed along the tokens; of other outputs take the last."""
        sequence = token_dim(self._model)
        found = {}
        for output in self._model.manifest.outputs:
            if output.name in self._pieces[0]:
                parts = [piece[output.name] for piece in self._pieces]
                by_token = len(parts) > 1 and sequence in output.shape
                found[output.name] = (
                    np.concatenate(parts, output.shape.index(sequence)) if by_token else parts[-1]
                )
        return found


def token_dim(model: Artifact) -> str | None:
    """Return the name of the dimension along which a model that streams takes tokens."""
    held = {s.past for s in model.manifest.states}
    batch = rows_dim(model.states.values(), model.manifest.dims)
    sizes = (d for i in model.manifest.inputs if i.name not in held for d in i.shape)
    return next((d for d in sizes if isinstance(d, str) and d != batch), None)
