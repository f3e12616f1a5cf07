"""The text side of a language model: prompts and conversations to tokens that continue them."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from linexport.artifact.call_inputs import Arrays
from linexport.artifact.model import Model
from linexport.artifact.stream import Stream
from linexport.artifact.text.batch import Batch
from linexport.artifact.text.continuation import END, Generation, TextRow, continuations
from linexport.artifact.text.embedding import EmbeddedTexts, TextVectors, Vectors
from linexport.artifact.text.generating import GenerationRequest
from linexport.artifact.text.generation_config import generation_defaults
from linexport.artifact.text.language_interface import Prompt, language_interface
from linexport.artifact.text.prompt_pieces import WHOLE, PromptPieces
from linexport.artifact.text.speculation import Draft, PredictorDraft, StreamDraft, speculative
from linexport.artifact.text.template import chat_prompt
from linexport.artifact.text.tokenizer import find_tokenizer
from linexport.errors import UsageError
from linexport.manifest import MODEL
from linexport.manifest.records import FileRecord
from linexport.sources.onnx_file.skeleton import skeleton

log = logging.getLogger(__name__)


class TextModel(Model):
    """A model with the files of its folder.

    Attributes:
        path: its folder.
        verified: files whose digests held when it was opened, by name.
    """

    @property
    @abstractmethod
    def path(self) -> Path: ...

    @property
    @abstractmethod
    def verified(self) -> Mapping[str, FileRecord]: ...

    @abstractmethod
    def run(self, *args: Any, **inputs: Any) -> Arrays: ...

    @abstractmethod
    def image_inputs(self, ids: np.ndarray, images: Mapping[str, object]) -> Arrays: ...

    @abstractmethod
    def stream(self, *, finite: bool = True, history: int = 0) -> Stream: ...

    @cached_property
    def _pieces(self) -> PromptPieces:
        """The lengths of pieces of prompts."""
        logits = language_interface(self.manifest).logits
        keeps = getattr(self._session, "keeps_logits", False)
        return PromptPieces(
            self.manifest,
            [*self.states.values()],
            self.token_axis.dim,
            skeleton(self.path / MODEL),
            logits if keeps else None,
        )

    def longest_piece(self, tokens: int, rows: int = 1, held: int = 0) -> int:
        """See ``Model``; values inside a call take ``prompt_pieces.LARGEST`` bytes at most."""
        most = super().longest_piece(tokens, rows, held)
        return most if most <= WHOLE else min(most, self._pieces.longest(tokens, rows, held))

    def draft(self, tokens: int = 4) -> StreamDraft:
        """Return this model as the draft of a larger one with the same tokens, for ``generate``.

        Args:
            tokens: proposed at a time.

        Raises:
            UsageError: not a language model, or it does not stream.
        """
        language_interface(self.manifest)
        return StreamDraft(self.stream(history=tokens), tokens)

    def mtp_draft(self, tokens: int = 2) -> PredictorDraft:
        """Return the head for multi-token prediction as a draft of this model, for ``generate``.

        Args:
            tokens: proposed at a time.

        Raises:
            UsageError: the artifact has none.
        """
        if self.predictor is None or self.manifest.hidden is None:
            raise UsageError(
                f"{self.path} has no head for multi-token prediction. Convert a checkpoint that "
                "has its weights (mtp.*) and whose family docs/generate.md names, or take "
                "another draft."
            )
        return PredictorDraft(self.predictor, self.manifest.hidden, tokens)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int = 0,
        stop: Collection[int] | None = None,
        stop_strings: Collection[str] | None = None,
        draft: Draft | None = None,
        images: Mapping[str, object] | None = None,
    ) -> Iterator[int]:
        """Return token ids that continue a prompt of token ids, one at a time, from the state.

        What is None is as the model's ``generation_config.json`` says, as in transformers; where
        that says nothing, the argmax is taken and the text has no bound. Settings of that file
        that are not implemented are logged as a warning. The text ends where the model's context
        is full, if its configuration names one.

        Args:
            prompt: at least one token id; of bytes, their values.
            max_tokens: of the text.
            temperature: 0 takes the argmax; more samples from softmax(logits / temperature).
            top_k: sample from that many tokens of the largest logits; 0 from all.
            top_p: sample from the fewest likeliest tokens that have this probability together.
            min_p: sample from tokens that have this share of the largest probability, or more.
            repetition_penalty: logits of tokens in prompt and text are divided by it, and
                multiplied where they are negative; 1 leaves them.
            seed: of the samples.
            stop: tokens that end the text, and are not returned; None for the model's own.
            stop_strings: texts that end it; the token that completes one is the last.
            draft: proposes tokens, which are checked several in a call. The text is the same, up to
                ties within the rounding of float32.
            images: in the prompt, as the model's image processor gives them, see ``image_inputs``.

        Raises:
            UsageError: not a language model, no states to continue from, a prompt longer than the
                model's context, stop strings without a tokenizer, or a bad argument.
        """
        request = GenerationRequest(
            *(max_tokens, temperature, top_k, top_p, min_p, repetition_penalty),
            *(seed, stop, stop_strings),
        )
        how, [ids] = self._generation(request, [prompt])
        text = TextRow(how, ids)
        given = {} if images is None else self.image_inputs(ids, images)
        if draft is not None and given:
            raise UsageError("A draft proposes tokens of texts alone. Leave out draft or images.")
        if isinstance(draft, PredictorDraft) and draft.model_sha256 != self.model_sha256:
            raise UsageError(
                f"The draft is the head of another model; expected that of {self.path}: its "
                "mtp_draft()."
            )
        if draft is not None:
            return speculative(self.stream(), ids, text, draft)
        batch = Batch(self, self.stream, [ids], given)
        return (tokens[0] for tokens in continuations(batch.begin, batch.step, [text]))

    def generate_batch(
        self, prompts: Sequence[Prompt], **settings: Any
    ) -> Iterator[tuple[int | None, ...]]:
        """Return the next token ids of several prompts, one of each at a time.

        A text that has ended has None from then on. Each is what ``generate`` writes by itself
        from its prompt, text i with the seed plus i. Prompts may have different lengths: shorter
        ones are padded on the left where the model has a mask for that, and else computed by
        themselves first.

        Args:
            prompts: at least one, each as in ``generate``.
            settings: as in ``generate``, except ``draft``.

        Raises:
            UsageError: see ``generate``; or the prompts have different lengths and the model has
                neither a mask nor a state of its own for each row.
        """
        how, rows = self._generation(GenerationRequest(**settings), prompts)
        texts = [TextRow(how, ids, index) for index, ids in enumerate(rows)]
        batch = Batch(self, self.stream, rows)
        return (
            tuple(None if token == END else token for token in tokens)
            for tokens in continuations(batch.begin, batch.step, texts)
        )

    def _generation(
        self, request: GenerationRequest, prompts: Sequence[Prompt]
    ) -> tuple[Generation, list[np.ndarray]]:
        model = language_interface(self.manifest)
        if not len(prompts):
            raise UsageError("Found no prompts; expected at least one.")
        rows = [model.checked(prompt) for prompt in prompts]
        warning = generation_defaults(self.path, self.verified).warning
        if warning:
            log.warning("%s", warning)
        return request.generation(self.path, model.vocabulary, self.verified), rows

    @cached_property
    def vectors(self) -> TextVectors:
        """Texts to vectors of this model.

        Raises:
            UsageError: not an embedding model, or no tokenizer.
        """
        return TextVectors(self.manifest, self.path, self.verified)

    def embed(
        self, texts: str | Sequence[str], *, prompt: str | None = None, size: int | None = None
    ) -> Vectors:
        """Return vectors of texts, of an artifact of an embedding model.

        Texts are tokenized as sentence-transformers does, cut to the model's longest, and computed
        in batches of about one length; the vector of a text does not depend on the others.

        Args:
            texts: one, or several.
            prompt: name of a prompt of the model to put in front, such as "query"; None for its
                default one, "" for none.
            size: numbers of a vector that are kept, of the first ones, as models that are trained
                for several sizes allow (matryoshka); None for all. They are not normalised again.

        Returns:
            float32 (N, size) for several texts, (size,) for one. Of a model for late interaction an
            array (tokens, size) of each text.

        Raises:
            UsageError: not an embedding model, no tokenizer, no such prompt or size, or a text
                without tokens.
        """
        several = [texts] if isinstance(texts, str) else texts
        rows = [self.vectors.tokens(text, prompt) for text in several]
        work = EmbeddedTexts(self.vectors, rows, size)
        for batch in work.batches:
            work.take(batch, self.run(work.feeds(batch)))
        found = work.vectors()
        return found[0] if isinstance(texts, str) else found

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Return the prompt of a conversation as token ids, by the chat template of the model.

        Args:
            messages: each with ``role`` and ``content``, as templates take them.

        Raises:
            UsageError: the model has no chat template, or no tokenizer.
            TemplateError: the template refuses the messages, or does not end.
        """
        vocabulary = language_interface(self.manifest).vocabulary
        tokenizer = find_tokenizer(self.path, vocabulary, self.verified)
        return tokenizer.encode(chat_prompt(self.path, self.verified, messages), special=False)
