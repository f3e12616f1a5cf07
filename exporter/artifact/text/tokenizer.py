"""Text to tokens and back: by the tokenizer copied into an artifact, or bytes as tokens.

Functions take the files of the manifest of an artifact that was opened: what is read long after is
compared with the digest that was verified then.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from linexport.artifact.text.decoder import check_decoder
from linexport.artifact.text.encoder import Encoder, TooManyTokensError
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.manifest.records import FileRecord
from linexport.system.install import pip_install_here
from linexport.system.json_object import JsonObject

Files = Mapping[str, FileRecord]
"""Sizes and digests by name, as in ``Manifest.files``; empty to take files as they are."""

TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG, MODEL_CONFIG = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "config.json",
)
"""Files of a Hugging Face model folder, under the same names in the artifact."""

BYTES = 256

LONGROPE = "longrope"
"""Kind of rotary embeddings whose frequencies change at a number of tokens below the longest."""

UNFINISHED, LONGEST = "\N{REPLACEMENT CHARACTER}", 4
"""The text of bytes that are not a whole character, and the most bytes of one in UTF-8."""


class Decoder(Protocol):
    """Tokens to text, one after another."""

    def __call__(self, token: int) -> str:
        """Return the text that a further token completes, which may be none yet."""
        ...

    def end(self) -> str:
        """Return the text of bytes that still lack others."""
        ...


class Tokenizer(Protocol):
    """Both directions between text and tokens.

    Attributes:
        special: tokens that have no text of their own, such as the end of a text, by their name.
    """

    special: Mapping[str, int]

    def encode(
        self,
        text: str,
        *,
        special: bool = True,
        most: int | None = None,
        cut: int | None = None,
    ) -> list[int]:
        """Return the tokens of a prompt.

        Args:
            text: of any length.
            special: begin and end it as the tokenizer says, with a token of the beginning say.
            most: tokens that are returned; None for any number.
            cut: tokens that are kept of a longer text, those of its beginning and end among them.

        Raises:
            TooManyTokensError: there are more, once cut.
        """
        ...

    def decoder(self, *, exact: bool = False) -> Decoder:
        """Return a decoder of one text.

        Args:
            exact: bytes that are no characters are surrogates, as in names of files, so that
                nothing of a text of bytes is lost; otherwise U+FFFD.
        """
        ...

    def gap(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the space that a text has after others, and that decoding it alone leaves out."""
        ...

    def token_text(self, token: int) -> str:
        """Return the text of one token alone; bytes that are not a character are U+FFFD."""
        ...

    def token_id(self, word: str) -> int | None:
        """Return the token whose name is a word; None where none is."""
        ...


def find_tokenizer(folder: Path, vocabulary: int, files: Files = MappingProxyType({})) -> Tokenizer:
    """Return the tokenizer of an artifact: its tokenizer.json, or bytes for a vocabulary of 256.

    Raises:
        UsageError: there is neither, or the file is damaged or not the one that was verified.
        EnvironmentProblemError: the library that reads it is not installed.
    """
    if (folder / TOKENIZER).is_file():
        return _HuggingFace(folder / TOKENIZER, read_file(folder / TOKENIZER, files))
    if vocabulary == BYTES:
        return _Bytes()
    raise UsageError(
        f"{folder} has no {TOKENIZER}, and with a vocabulary of {vocabulary} its tokens are not "
        "bytes. Give token ids to linexport.load(...).generate, or convert a model folder that "
        f"holds a {TOKENIZER}."
    )


def end_tokens(folder: Path, files: Files = MappingProxyType({})) -> frozenset[int]:
    """Return tokens that end a text, as the copied files name them; none without files.

    Raises:
        UsageError: a file is damaged.
    """
    named = read_json(folder / GENERATION_CONFIG, files).get("eos_token_id")
    if named is None:
        named = model_config(folder, files).get("eos_token_id")
    if named is None and (folder / TOKENIZER).is_file():
        word = read_json(folder / TOKENIZER_CONFIG, files).get("eos_token")
        word = word.get("content") if isinstance(word, dict) else word
        added = read_json(folder / TOKENIZER, files).get("added_tokens") or []
        tokens = [t for t in added if isinstance(t, dict)] if isinstance(added, list) else []
        named = [t.get("id") for t in tokens if word is not None and t.get("content") == word]
    ids = named if isinstance(named, list) else [named]
    return frozenset(i for i in ids if isinstance(i, int))


def model_config(folder: Path, files: Files = MappingProxyType({})) -> JsonObject:
    """Return the configuration of the language model; empty where there is none.

    Raises:
        UsageError: the file is damaged.
    """
    config = read_json(folder / MODEL_CONFIG, files)
    inner = config.get("text_config")
    return {**config, **(inner if isinstance(inner, dict) else {})}


def context(folder: Path, files: Files = MappingProxyType({})) -> int | None:
    """Return how many tokens the model was made for, prompt included; None if unstated.

    With rotary embeddings of ``longrope``, those for which its frequencies are the same.

    Raises:
        UsageError: the configuration is damaged.
    """
    config = model_config(folder, files)
    stated = [config.get("max_position_embeddings"), *_same_frequencies(config)]
    return min((n for n in stated if isinstance(n, int) and n > 0), default=None)


def _same_frequencies(config: Mapping[str, object]) -> Iterator[object]:
    """Yield the tokens before the frequencies of rotary embeddings change, if they do."""
    for name in ("rope_parameters", "rope_scaling"):
        settings = config.get(name)
        inner = [settings, *settings.values()] if isinstance(settings, dict) else []
        for one in inner:
            if isinstance(one, dict) and LONGROPE in (one.get("rope_type"), one.get("type")):
                same = "original_max_position_embeddings"
                yield one.get(same, config.get(same))


def read_file(path: Path, files: Files = MappingProxyType({})) -> bytes:
    """Read a file once, and compare what was read with its digest.

    Raises:
        UsageError: it cannot be read, is not the one that was verified, or was not verified while
            others were.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}. Convert the model again.") from None
    if files and path.name not in files:
        raise UsageError(
            f"{path} is not among the files of the artifact: expected one of "
            f"{', '.join(sorted(files))}. Remove it, or convert the model with it in its folder."
        )
    known = files[path.name].sha256 if files else None
    found = hashlib.sha256(content).hexdigest()
    if known not in (None, found):
        raise UsageError(
            f"{path} is not the file that was there when the artifact was opened: its SHA-256 is "
            f"{found}, expected {known}. Open the artifact again."
        )
    return content


def read_json(path: Path, files: Files = MappingProxyType({})) -> JsonObject:
    """Return the JSON object of a file; empty where there is none.

    Raises:
        UsageError: the file is damaged.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_file(path, files).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}. Convert the model again.") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a JSON object. Convert the model again.")
    return content


class _Bytes:
    """UTF-8: a character of several bytes is shown when its last one has come."""

    special: Mapping[str, int] = MappingProxyType({})

    def encode(
        self,
        text: str,
        *,
        special: bool = True,
        most: int | None = None,
        cut: int | None = None,
    ) -> list[int]:
        # Bytes of the command line that were not UTF-8 come as surrogates, and go as they came.
        content = text.encode("utf-8", "surrogateescape")
        content = content[:cut]
        if most is not None and len(content) > most:
            raise TooManyTokensError(len(content))
        return list(content)

    def decoder(self, *, exact: bool = False) -> Decoder:
        return _ByteDecoder("surrogateescape" if exact else "replace")

    def gap(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        return ""

    def token_text(self, token: int) -> str:
        return bytes([token]).decode("utf-8", "replace")

    def token_id(self, word: str) -> int | None:
        content = word.encode()
        return content[0] if len(content) == 1 else None


class _ByteDecoder:
    def __init__(self, errors: str) -> None:
        self._inner = codecs.getincrementaldecoder("utf-8")(errors)

    def __call__(self, token: int) -> str:
        return self._inner.decode(bytes([token]))

    def end(self) -> str:
        return self._inner.decode(b"", final=True)


class _HuggingFace:
    """A ``tokenizer.json``, read by the tokenizers package: data, no code of the model's.

    Prompts are encoded in a process of their own. Tokens are decoded here, one after another, once
    that process has read the file within its limits.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        try:
            from tokenizers import Tokenizer as Inner
        except ImportError:
            raise EnvironmentProblemError(
                f"Reading {path} needs the tokenizers package: {pip_install_here('hf')}."
            ) from None
        self._encoder = Encoder(path, content)
        check_decoder(path, content)
        self._inner = Inner.from_buffer(content)
        added = self._inner.get_added_tokens_decoder()
        self.special: Mapping[str, int] = {t.content: i for i, t in added.items() if t.special}
        self._silent = frozenset(self.special.values())

    def encode(
        self,
        text: str,
        *,
        special: bool = True,
        most: int | None = None,
        cut: int | None = None,
    ) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError("The prompt is not valid UTF-8.") from None
        return self._encoder.encode(text, special=special, most=most, cut=cut)

    def decoder(self, *, exact: bool = False) -> Decoder:
        return _HuggingFaceDecoder(self._inner.decode, self._has_text)

    def gap(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        known, alone = self._inner.decode([*before]), self._inner.decode([*tokens])
        both = self._inner.decode([*before, *tokens])
        space = both.removeprefix(known).removesuffix(alone)
        return space if space.isspace() and both == known + space + alone else ""

    def _has_text(self, token: int) -> bool:
        return token not in self._silent and self._inner.id_to_token(token) is not None

    def token_text(self, token: int) -> str:
        text: str = self._inner.decode([token], skip_special_tokens=False)
        return text

    def token_id(self, word: str) -> int | None:
        found: int | None = self._inner.token_to_id(word)
        return found


class _HuggingFaceDecoder:
    """Decodes each token with the one before it, on which it depends; the rest is new.

    Args:
        decode: tokens to text.
        has_text: whether a token is one of these; others come between them as if they did not.
    """

    def __init__(self, decode: Callable[[list[int]], str], has_text: Callable[[int], bool]) -> None:
        self._decode, self._has_text = decode, has_text
        self._ids: list[int] = []
        self._before = self._shown = 0

    def __call__(self, token: int) -> str:
        if not self._has_text(token):
            return ""
        self._ids.append(token)
        # A character may still lack bytes, but never waits for more tokens than it has bytes.
        text = self._rest()
        if text.endswith(UNFINISHED) and len(self._ids) - self._shown < LONGEST:
            return ""
        self._before, self._shown = self._shown, len(self._ids)
        return text

    def end(self) -> str:
        return self._rest()

    def _rest(self) -> str:
        known = self._decode(self._ids[self._before : self._shown])
        return self._decode(self._ids[self._before :])[len(known) :]
