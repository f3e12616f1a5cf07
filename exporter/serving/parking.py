"""Sequences kept in a folder: the state of the model in one file, what belongs to it in another.

    <id>.npz     StreamState; none where nothing was computed yet
    <id>.json    ParkedText: tokens, settings, digests of the model and of the state

The JSON is written last and in one step: where it exists, the state is complete.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from linexport.artifact import StreamState
from linexport.artifact.text.sampling import Sampling
from linexport.errors import UsageError
from linexport.serving.limits import LONGEST_STOP, MOST_LOGPROBS, STOPS
from linexport.serving.text import Beginning, TextSettings

log = logging.getLogger(__name__)

ID = re.compile(r"[a-z]{1,12}-[0-9a-f]{32}(-[0-9]{1,3})?")
"""Ids cannot be guessed: who knows one may go on with its sequence."""

Count = Annotated[int, Field(ge=0, lt=2**53)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


def new_id(kind: str) -> str:
    """Return an id, such as ``cmpl-...``."""
    return f"{kind}-{secrets.token_hex(16)}"


class ParkedText(BaseModel):
    """A text and how it goes on.

    Attributes:
        model_sha256: digest of the model.
        state_sha256: ``StreamState.digest`` of the state's file; None without a state.
        finished: whether the text had ended: what follows is a new one.
        chat: whether it answers a conversation.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: Literal[1] = 1
    model_sha256: str
    state_sha256: str | None
    finished: bool
    chat: bool
    unfed: tuple[int, ...]
    prompt_tokens: Count
    written: tuple[int, ...]
    seen: tuple[int, ...] = ()
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float = 1.0
    seed: int
    max_tokens: Count
    stops: Annotated[tuple[Stop, ...], Field(max_length=STOPS)]
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None

    @classmethod
    def of(
        cls, model: str, beginning: Beginning, settings: TextSettings, *, finished: bool, chat: bool
    ) -> ParkedText:
        """Return the record of a text that goes on from ``beginning``."""
        return cls(
            model_sha256=model,
            state_sha256=beginning.state.digest if beginning.state else None,
            finished=finished,
            chat=chat,
            unfed=beginning.unfed,
            prompt_tokens=beginning.prompt_tokens,
            written=beginning.written,
            seen=beginning.seen,
            max_tokens=settings.max_tokens,
            stops=settings.stops,
            logprobs=settings.logprobs,
            **asdict(settings.sampling),
        )

    def beginning(self, state: StreamState | None) -> Beginning:
        """Return where it goes on; a finished text is the prompt of the next."""
        if self.finished:
            seen = tuple(sorted({*self.seen, *self.written}))
            count = self.prompt_tokens + len(self.written)
            return Beginning(self.unfed, count, state, seen=seen)
        return Beginning(self.unfed, self.prompt_tokens, state, self.written, self.seen)

    def settings(self) -> TextSettings:
        """Return how it was written."""
        sampling = Sampling(
            *(self.temperature, self.top_k, self.seed),
            *(self.top_p, self.min_p, self.repetition_penalty),
        )
        return TextSettings(sampling, self.max_tokens, self.stops, self.logprobs)


class Parking:
    """A folder of parked sequences, the oldest of which make room for others.

    Args:
        folder: made if there is none.
        budget: bytes of all files.

    Raises:
        UsageError: nothing can be written there.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self._folder, self._budget = folder, budget
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise UsageError(f"Cannot park in {folder}: {error.strerror}.") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"Cannot park in {folder}: it is not writable.")

    def save(self, name: str, text: ParkedText, state: StreamState | None) -> None:
        """Write a sequence.

        Raises:
            OSError: it cannot be written; nothing of it is left.
        """
        try:
            if state is not None:
                self._write(f"{name}.npz", state.to_bytes())
            self._write(f"{name}.json", text.model_dump_json().encode())
        except OSError:
            (self._folder / f"{name}.npz").unlink(missing_ok=True)
            raise
        self._make_room()

    def load(self, name: str, model_sha256: str) -> tuple[ParkedText, StreamState | None]:
        """Read a sequence, without removing it.

        Raises:
            UsageError: there is none of this id, it is damaged, or of another model.
        """
        path = self._folder / f"{name}.json"
        if not ID.fullmatch(name) or not path.is_file():
            raise UsageError(f"No sequence {name!r} is parked here.")
        try:
            text = ParkedText.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            raise UsageError(f"The parked sequence {name} is damaged.") from None
        if text.model_sha256 != model_sha256:
            raise UsageError(f"The parked sequence {name} is of another model.")
        if text.state_sha256 is None:
            return text, None
        try:
            state = StreamState.load(self._folder / f"{name}.npz")
        except UsageError as error:
            log.warning("%s", error)
            raise UsageError(f"The parked sequence {name} is damaged.") from None
        if state.digest != text.state_sha256:
            raise UsageError(f"The parked sequence {name} is damaged: its state is another one.")
        return text, state

    def _write(self, name: str, content: bytes) -> None:
        partial = self._folder / f".{name}.partial"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._folder / name)
        finally:
            partial.unlink(missing_ok=True)

    def _make_room(self) -> None:
        """Remove whole sequences, the oldest first, until the rest is within the budget."""
        found: dict[str, list[tuple[int, int, Path]]] = {}
        for path in self._folder.iterdir():
            if ID.fullmatch(path.stem):
                known = path.stat()
                found.setdefault(path.stem, []).append((known.st_mtime_ns, known.st_size, path))
        held = sum(size for files in found.values() for _, size, _ in files)
        for name in sorted(found, key=lambda n: max(found[n])):
            if held <= self._budget:
                return
            log.info("the parked sequence %s made room for others", name)
            for _, size, path in found[name]:
                path.unlink(missing_ok=True)
                held -= size
