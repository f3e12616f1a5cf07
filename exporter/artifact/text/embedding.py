"""Texts to vectors by an embedding model: prompts, tokens, batches by length.

    texts -> prompt + text -> tokens, cut to the longest -> rows of one length and a mask -> vectors

Rows of a batch have about the same length; what is padding changes nothing, as the mask says so.
Settings are read as data from the files that sentence-transformers writes beside a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linexport.artifact.text import late_interaction
from linexport.artifact.text.late_interaction import DOCUMENT, Row, Side
from linexport.artifact.text.tokenizer import (
    TOKENIZER_CONFIG,
    Files,
    Tokenizer,
    context,
    find_tokenizer,
    model_config,
    read_json,
)
from linexport.errors import UsageError
from linexport.manifest import Manifest
from linexport.manifest.records import POOLING_MASK, TensorRecord

SETTINGS, LENGTHS = "config_sentence_transformers.json", "sentence_bert_config.json"

ROWS = 32
"""Texts of a batch."""

Vectors = np.ndarray | list[np.ndarray]
"""(N, size) of texts; for late interaction an array (tokens, size) of each text."""


@dataclass(frozen=True)
class EmbeddingSettings:
    """Settings of an embedding model, from its files.

    Attributes:
        prompts: texts to put in front, by name.
        default: name of the prompt that is put in front where none is named; None for no prompt.
        longest: tokens of a text, with those that the tokenizer adds; None without a limit.
        lower: texts are made lower case first.
    """

    prompts: Mapping[str, str]
    default: str | None
    longest: int | None
    lower: bool

    def with_prompt(self, text: str, prompt: str | None) -> str:
        """Return a text behind a prompt.

        Args:
            text: to embed.
            prompt: its name; None for the default one, "" for none.

        Raises:
            UsageError: there is no such prompt.
        """
        name = self.default if prompt is None else prompt
        if name and name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise UsageError(f"Found prompt {name!r}; this model has {known}.")
        whole = (self.prompts[name] if name else "") + text
        return whole.lower() if self.lower else whole


def settings_of(folder: Path, files: Files) -> EmbeddingSettings:
    """Read the settings of an artifact.

    Raises:
        UsageError: a file is damaged.
    """
    own, lengths = read_json(folder / SETTINGS, files), read_json(folder / LENGTHS, files)
    prompts, default = own.get("prompts") or {}, own.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(x, str) for x in prompts.values()):
        raise UsageError(f"{folder / SETTINGS} has prompts that are not texts. Convert again.")
    longest = lengths.get("max_seq_length")
    limits = [n for n in (longest, context(folder, files)) if isinstance(n, int) and n > 0]
    return EmbeddingSettings(
        prompts,
        default if isinstance(default, str) else None,
        min(limits, default=None),
        bool(lengths.get("do_lower_case", False)),
    )


class TextVectors:
    """Texts to inputs of an embedding model, and its outputs to vectors.

    Attributes:
        settings: of the model.
        by_token: each token has a vector, for late interaction.
        size: numbers of a vector.

    Args:
        manifest: of the artifact.
        folder: its files.
        files: digests of these, by name.

    Raises:
        UsageError: the model does not give a vector for each text or token, it has no tokenizer,
            or a file is damaged.
    """

    def __init__(self, manifest: Manifest, folder: Path, files: Files) -> None:
        self._tokens, self._mask, output = _interface(manifest)
        self._leaves_out_prompt = POOLING_MASK in {i.name for i in manifest.inputs}
        self._output, self.size = output.name, _width(output)
        self.by_token = len(output.shape) == 3
        self.settings = settings_of(folder, files)
        vocabulary = model_config(folder, files).get("vocab_size")
        known = vocabulary if isinstance(vocabulary, int) else 0
        self._tokenizer: Tokenizer = find_tokenizer(folder, known, files)
        self._sides = late_interaction.sides(
            read_json(folder / SETTINGS, files) if self.by_token else {},
            read_json(folder / TOKENIZER_CONFIG, files),
            self._tokenizer,
            self.settings.longest,
            str(folder / SETTINGS),
        )

    def tokens(self, text: str, prompt: str | None = None, most: int | None = None) -> Row:
        """Return the tokens of a text behind its prompt, cut to the longest.

        Args:
            text: to embed.
            prompt: its name; None for the default one, "" for none. A model of PyLate has "query"
                and "document", with None and "" for a document.
            most: tokens that are returned; None for any number.

        Raises:
            TooManyTokensError: there are more, once cut.
            UsageError: there is no such prompt, the text is not valid UTF-8, it has no tokens, or
                queries of the model are not computed.
        """
        side = self._side(prompt)
        whole = self.settings.with_prompt(text, prompt if side is None else None)
        cut = self.settings.longest if side is None else side.cut
        ids = self._tokenizer.encode(whole, cut=cut, most=most)
        if not ids:
            raise UsageError("A text has no tokens; expected at least one.")
        if side is not None:
            return side.row(ids)
        return Row(ids, prompt=self._prompt_tokens(prompt, len(ids)))

    def _prompt_tokens(self, prompt: str | None, count: int) -> int:
        """Return how many of the first tokens of a text are not pooled: those of its prompt.

        They are counted as sentence-transformers does: of the prompt alone, less a special token
        at its end.

        Raises:
            UsageError: the text has no others.
        """
        before = self.settings.with_prompt("", prompt)
        if not self._leaves_out_prompt or not before:
            return 0
        ids = self._tokenizer.encode(before, cut=self.settings.longest)
        length = len(ids) - (ids[-1] in self._tokenizer.special.values() if ids else 0)
        if length >= count:
            raise UsageError(
                f"The prompt of a text has {length} tokens, of {count} that the text has with it: "
                "none is left to pool. Choose a shorter prompt."
            )
        return length

    def _side(self, prompt: str | None) -> Side | None:
        """Return how a text behind a prompt becomes tokens of a model of PyLate."""
        if not self._sides:
            return None
        name = prompt or DOCUMENT
        if name not in self._sides:
            known = ", ".join(self._sides)
            raise UsageError(f"Found prompt {name!r}; this model has {known}.")
        return self._sides[name]

    def check_size(self, size: int | None) -> None:
        """Check how many numbers of a vector are kept.

        Raises:
            UsageError: vectors have fewer.
        """
        if size is not None and not 1 <= size <= self.size:
            raise UsageError(f"Found size {size}; vectors of this model have {self.size} numbers.")

    def feeds(self, rows: Sequence[Row]) -> dict[str, np.ndarray]:
        """Return the inputs of a batch of texts that are tokens."""
        shape = len(rows), max(map(len, rows))
        ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = row, 1
        found = {self._tokens: ids} | ({self._mask: mask} if self._mask else {})
        if self._leaves_out_prompt:
            lengths = np.array([[row.prompt] for row in rows])
            found[POOLING_MASK] = (np.arange(shape[1]) >= lengths).astype(np.int64)
        return found

    def of_outputs(
        self, rows: Sequence[Row], outputs: Mapping[str, np.ndarray], size: int | None
    ) -> list[np.ndarray]:
        """Return the vectors of a batch, each (size,), or (tokens, size)."""
        values = outputs[self._output][..., :size]
        return [v[row.shown] if self.by_token else v for row, v in zip(rows, values, strict=True)]


class EmbeddedTexts:
    """Texts on their way to vectors, in batches that a model runs one after another.

        for batch in texts.batches:
            texts.take(batch, run(texts.feeds(batch)))
        texts.vectors()

    Attributes:
        rows: token ids of each text.
        batches: places of the texts that are computed together.
        found: vectors of the texts that were taken, each (size,), or (tokens, size).

    Args:
        vectors: of the model.
        rows: as above.
        size: numbers of a vector that are kept, of the first ones; None for all.

    Raises:
        UsageError: a size that vectors do not have.
    """

    def __init__(self, vectors: TextVectors, rows: Sequence[Row], size: int | None = None) -> None:
        vectors.check_size(size)
        self._vectors, self._size, self.rows = vectors, size, rows
        self.batches = list(batches([len(row) for row in rows]))
        self.found: list[np.ndarray] = [np.empty(0)] * len(rows)

    def feeds(self, batch: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the inputs of a batch."""
        return self._vectors.feeds([self.rows[i] for i in batch])

    def take(self, batch: Sequence[int], outputs: Mapping[str, np.ndarray]) -> None:
        """Take the vectors of a batch from the outputs of the model."""
        made = self._vectors.of_outputs([self.rows[i] for i in batch], outputs, self._size)
        for place, vector in zip(batch, made, strict=True):
            self.found[place] = vector

    def vectors(self) -> Vectors:
        """Return all vectors, as ``Artifact.embed`` does."""
        if self._vectors.by_token:
            return self.found
        size = self._size or self._vectors.size
        return np.stack(self.found) if self.found else np.empty((0, size), np.float32)


def batches(lengths: Sequence[int], rows: int = ROWS) -> Iterator[list[int]]:
    """Yield the places of texts that are computed together, the longest first.

    Rows are padded to the longest of their batch: a batch ends where a text is shorter than half
    of that, so that less than half of what is computed is padding.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batch: list[int] = []
    for place in order:
        if batch and (len(batch) == rows or 2 * lengths[place] <= lengths[batch[0]]):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _interface(manifest: Manifest) -> tuple[str, str | None, TensorRecord]:
    """Return the names of the tokens and of the mask, and the vectors."""
    if manifest.head not in ("pooled", "hidden_states"):
        kind = f"its output is of the kind {manifest.head}" if manifest.head else "it takes no text"
        raise UsageError(
            f"{manifest.artifact} is not an embedding model: {kind}. Convert a folder of "
            "sentence-transformers, or a base model with --pooling."
        )
    tokens = next(i for i in manifest.inputs if i.dtype == "int64" and i.default is None)
    masks = [i.name for i in manifest.inputs if i.default == 1 and i.shape == tokens.shape]
    return tokens.name, masks[0] if masks else None, manifest.outputs[0]


def _width(output: TensorRecord) -> int:
    width = output.shape[-1]
    assert isinstance(width, int), output
    return width
