"""The inside of a server: the texts of an artifact and the limits; no protocol, no model."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from linexport.artifact.opened_folder import OpenedFolder
from linexport.artifact.text.embedding import TextVectors
from linexport.artifact.text.encoder import TooManyTokensError
from linexport.artifact.text.language_interface import language_interface
from linexport.artifact.text.picture_reader import Admit
from linexport.errors import LinexportError, UsageError
from linexport.manifest import MODEL
from linexport.serving.call_memory import CallMemory
from linexport.serving.computing import Computing, TextEvents
from linexport.serving.images import PromptImages
from linexport.serving.language import Language
from linexport.serving.limits import Limits
from linexport.serving.metrics import Metrics
from linexport.serving.parking import ParkedText, Parking
from linexport.serving.prompt_length import ContextLengthError, too_long
from linexport.serving.text import Beginning, Order, TextSettings
from linexport.sources.onnx_file.skeleton import skeleton


class Service:
    """One artifact, served.

    Attributes:
        manifest: of the artifact.
        name: of the model, for clients.
        limits: of the server.
        computing: where the model runs.
        metrics: of the server.
        language: None where the artifact has no texts.
        why_no_text: the reason for that.
        vectors: None where the artifact gives no vectors of texts.
        why_no_vectors: the reason for that.
        images: None where prompts have no images.
        why_no_images: the reason for that.
        parking: None where nothing is parked.
        memory: of calls of the model.

    Args:
        source: the artifact.
        park: folder for parked sequences.
    """

    def __init__(
        self,
        source: OpenedFolder,
        computing: Computing,
        name: str,
        limits: Limits,
        park: Path | None = None,
    ) -> None:
        self.manifest, self.name, self.limits = source.manifest, name, limits
        self.computing = computing
        self.metrics = Metrics()
        self.memory = CallMemory.of_model(source.manifest, skeleton(source.path / MODEL))
        self.parking = None if park is None else Parking(park, limits.park_mib * 2**20)
        self.ready, self.why_no_text = False, ""
        self.language: Language | None = None
        try:
            self.language = Language.read(source)
        except LinexportError as error:
            self.why_no_text = str(error)
        self.vectors: TextVectors | None = None
        self.why_no_vectors = ""
        try:
            self.vectors = TextVectors(source.manifest, source.path, source.verified)
        except LinexportError as error:
            self.why_no_vectors = str(error)
        self.images: PromptImages | None = None
        self.why_no_images = ""
        try:
            self.images = PromptImages(source, computing, limits.max_pixels)
        except LinexportError as error:
            self.why_no_images = str(error)

    def start(self) -> None:
        """Begin to take requests, in the event loop."""
        self.computing.start(self.metrics, self.language)
        self.ready = True

    async def stop(self) -> None:
        """End what is left: park it where there is a folder for that."""
        self.ready = False
        await self.computing.stop(park=self.parking is not None)

    async def close(self) -> None:
        """Stop, and end what belongs to the service."""
        await self.stop()
        if self.language is not None and self.language.template is not None:
            await self.language.template.close()
        if self.images is not None:
            await self.images.close()

    def fitted(self, beginning: Beginning, requested: int | None, default: int) -> int:
        """Return how many tokens a text may have.

        Raises:
            ContextLengthError: the prompt is too long.
            UsageError: more tokens were requested than the server writes.
        """
        assert self.language is not None
        known = beginning.prompt_tokens + len(beginning.written)
        limit = self.language.context
        if len(beginning.unfed) > self.limits.max_prompt:
            raise ContextLengthError(too_long(len(beginning.unfed), self.limits.max_prompt))
        if limit is not None and known >= limit:
            raise ContextLengthError(
                f"The prompt has {known} tokens; the model was made for {limit}, text included. "
                "Leave out the beginning."
            )
        if requested is not None and requested > self.limits.max_tokens:
            raise UsageError(
                f"max_tokens is {requested}; this server writes at most {self.limits.max_tokens}."
            )
        most = min(default, self.limits.max_tokens) if requested is None else requested
        return most if limit is None else min(most, limit - known)

    def encode(
        self, prompt: str | Sequence[int], before: Beginning | None, special: bool
    ) -> Beginning:
        """Return where a text begins: at a prompt, after a sequence if one is given.

        Raises:
            ContextLengthError: it has more tokens than the server takes.
            UsageError: the prompt is empty, or has ids outside the vocabulary.
        """
        assert self.language is not None
        start, most = before or Beginning((), 0), self.limits.max_prompt
        if isinstance(prompt, str):
            own = special and before is None
            try:
                prompt = self.language.tokenizer.encode(prompt, special=own, most=most)
            except TooManyTokensError as error:
                raise ContextLengthError(too_long(error.count, most)) from None
        unfed = (*start.unfed, *prompt)
        language_interface(self.manifest).checked(unfed)
        return replace(start, unfed=unfed, prompt_tokens=start.prompt_tokens + len(prompt))

    async def with_images(
        self, beginning: Beginning, pictures: Sequence[bytes], admit: Admit
    ) -> Beginning:
        """Return where a text begins whose prompt has images.

        Args:
            beginning: at the prompt, with one image token for each picture.
            pictures: contents of files.
            admit: see ``PromptImages.inputs``, as for errors.
        """
        assert self.images is not None
        most = self.limits.max_prompt
        prompt, inputs = await self.images.inputs(beginning.unfed, pictures, most, admit)
        return replace(beginning, unfed=(*prompt,), prompt_tokens=len(prompt), images=inputs)

    def write(self, order: Order, overflow: Callable[[], None]) -> TextEvents:
        """Let texts of a prompt be written; see ``Computing.write``.

        Raises:
            UsageError: more texts than slots.
        """
        if len(order.texts) > self.limits.slots:
            raise UsageError(f"n is {len(order.texts)}; this server has {self.limits.slots} slots.")
        texts = self.computing.write(order, overflow)
        self.metrics.prompt_tokens.inc(next(iter(order.texts.values())).prompt_tokens)
        return texts

    async def park(
        self, name: str, beginning: Beginning, settings: TextSettings, *, finished: bool, chat: bool
    ) -> None:
        """Keep a sequence under a name.

        Raises:
            OSError: it cannot be written.
        """
        assert self.parking is not None
        text = ParkedText.of(
            self.manifest.model_sha256, beginning, settings, finished=finished, chat=chat
        )
        await asyncio.to_thread(self.parking.save, name, text, beginning.state)
        self.metrics.parked.inc()

    async def parked(self, name: str) -> tuple[ParkedText, Beginning]:
        """Return a parked sequence.

        Raises:
            UsageError: there is none of this name, it is damaged, or is beyond the limits.
        """
        if self.parking is None:
            raise UsageError("This server parks nothing; start it with --park DIR.")
        text, state = await asyncio.to_thread(self.parking.load, name, self.manifest.model_sha256)
        for ids in (text.unfed, text.written, text.seen):
            if ids:
                language_interface(self.manifest).checked(ids)
        count = max(text.max_tokens, len(text.written))
        if len(text.unfed) > self.limits.max_prompt or count > self.limits.max_tokens:
            raise UsageError(
                f"The parked sequence {name} has {len(text.unfed)} tokens of a prompt to be read "
                f"and a text of up to {count}; this server takes at most "
                f"{self.limits.max_prompt} and {self.limits.max_tokens}."
            )
        return text, text.beginning(state)


def new_seed() -> int:
    """Return a seed for texts that name none."""
    return secrets.randbits(32)
