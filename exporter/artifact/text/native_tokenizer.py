"""A tokenizer, and how to generate, as one file that a program in C++ reads.

    "LXT1", then in this order, integers as u32 and texts with their length in front, little-endian:
    bytes of each token; tokens that are not shown; added tokens, with their ids; the token of each
    byte; whether texts are composed (NFC), and whether a part that is a token is not merged;
    patterns that cut a text; merges as (left, right, made) in their order; tokens before a text,
    behind it, and that end it; the parts of a chat template; settings of generation

Byte-level BPE alone, as GPT-2, Llama 3, Qwen, Granite and most others have it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from linexport.artifact.text.generation_config import generation_defaults
from linexport.artifact.text.template import chat_prompt, find_template
from linexport.artifact.text.tokenizer import BYTES, TOKENIZER, Files, end_tokens, read_json
from linexport.errors import LinexportError
from linexport.system.json_object import JsonObject

MAGIC = b"LXT1"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of ``ByteLevel`` with ``use_regex``, of the tokenizers package."""

DIGITS = {True: r"\p{N}", False: r"\p{N}+"}
"""Patterns of ``Digits``, by ``individual_digits``."""

SAID = ("linexport-first", "linexport-answer", "linexport-next")
"""Messages by which the parts of a chat template are found."""


class NotNativeError(Exception):
    """A tokenizer that the program does not have; the text says what it is found to be."""


def described(folder: Path, vocabulary: int, files: Files = MappingProxyType({})) -> bytes:
    """Return the file.

    Args:
        folder: of the model's tokenizer.json and generation_config.json.
        vocabulary: the number of tokens.
        files: as they were verified; empty to take files as they are.

    Raises:
        NotNativeError: the tokenizer is of another kind.
        UsageError: a file is damaged.
    """
    content = read_json(folder / TOKENIZER, files)
    found = _File()
    if content:
        _add_bpe(found, content, vocabulary)
    elif vocabulary == BYTES:
        _add_bytes(found)
    else:
        raise NotNativeError(f"the model has no {TOKENIZER}")
    found.numbers(sorted(end_tokens(folder, files)))
    _add_chat(found, _chat(folder, files))
    _add_settings(found, folder, files)
    return bytes(found.content)


class _File:
    """Writes numbers and texts."""

    def __init__(self) -> None:
        self.content = bytearray(MAGIC)

    def number(self, value: int) -> None:
        self.content += struct.pack("<I", value)

    def text(self, value: str | bytes) -> None:
        whole = value if isinstance(value, bytes) else value.encode()
        self.number(len(whole))
        self.content += whole

    def real(self, value: float) -> None:
        self.text(repr(float(value)))

    def numbers(self, values: Sequence[int]) -> None:
        self.content += struct.pack(f"<I{len(values)}I", len(values), *values)

    def texts(self, values: Sequence[str | bytes]) -> None:
        self.number(len(values))
        for value in values:
            self.text(value)


def _add_bytes(found: _File) -> None:
    found.texts([bytes([n]) for n in range(BYTES)])
    found.numbers([])
    found.number(0)
    found.numbers(range(BYTES))
    for _ in range(4):  # neither composed, nor taken whole; no patterns, no merges
        found.number(0)
    found.numbers([])
    found.numbers([])


def _add_bpe(found: _File, content: JsonObject, vocabulary: int) -> None:
    model = _checked_model(content)
    ids = {word: n for word, n in _part(model, "vocab").items() if isinstance(n, int)}
    added = [t for t in _list(content, "added_tokens") if isinstance(t, dict)]
    if any(t.get(name) for t in added for name in ("lstrip", "rstrip", "single_word")):
        raise NotNativeError("an added token takes the spaces around it")
    texts = _texts(ids, added, vocabulary)
    compose, patterns = _composes(content.get("normalizer")), _patterns(content)
    of_bytes = [ids.get(character) for character in _characters()]
    merges = [_merge(one, ids) for one in _list(model, "merges")]
    if None in of_bytes or None in merges:
        raise NotNativeError("bytes or merges are not in its vocabulary")
    before, behind = _around(content)
    found.texts(texts)
    found.numbers([t["id"] for t in added if t.get("special")])
    found.number(len(added))
    for token in added:
        found.number(token["id"])
        found.text(token["content"])
    found.numbers([n for n in of_bytes if n is not None])
    found.number(compose)
    found.number(bool(model.get("ignore_merges")))
    found.texts(patterns)
    found.number(len(merges))
    flat = [n for merge in merges if merge is not None for n in merge]
    found.content += struct.pack(f"<{len(flat)}I", *flat)
    found.numbers(before)
    found.numbers(behind)


def _checked_model(content: JsonObject) -> JsonObject:
    """Return the model of a tokenizer.

    Raises:
        NotNativeError: it is not byte-level BPE.
    """
    model = _part(content, "model")
    if model.get("type") != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        raise NotNativeError(f"its model is {model.get('type')}, or not of whole bytes")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise NotNativeError("its tokens have prefixes or suffixes")
    if _part(content, "decoder").get("type") != "ByteLevel":
        raise NotNativeError("its decoder is not ByteLevel")
    return model


def _texts(
    ids: Mapping[str, int], added: Iterable[JsonObject], vocabulary: int
) -> list[str | bytes]:
    """Return the bytes of each token; none of ids that are not used."""
    of_character = {character: n for n, character in enumerate(_characters())}
    texts: list[str | bytes] = [b""] * vocabulary
    for word, n in ids.items():
        if not 0 <= n < vocabulary:
            raise NotNativeError(f"its token {n} is beyond the {vocabulary} of the model")
        if all(character in of_character for character in word):
            texts[n] = bytes(of_character[character] for character in word)
    for token in added:
        place, text = token.get("id"), token.get("content")
        if not isinstance(place, int) or not isinstance(text, str) or not text:
            raise NotNativeError("an added token has no id, or no text")
        if 0 <= place < vocabulary:
            texts[place] = text
    return texts


def _characters() -> list[str]:
    """Return the character that stands for each byte (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(BYTES, 2 * BYTES))
    return [chr(n if n in shown else next(others)) for n in range(BYTES)]


def _merge(merge: object, ids: Mapping[str, int]) -> tuple[int, int, int] | None:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(parts, list) or len(parts) != 2 or not all(p in ids for p in parts):
        return None
    left, right = parts
    made = ids.get(left + right)
    return None if made is None else (ids[left], ids[right], made)


def _composes(normalizer: object) -> bool:
    """Return whether texts are composed.

    Raises:
        NotNativeError: they are changed in another way.
    """
    if normalizer is None:
        return False
    kind = normalizer.get("type") if isinstance(normalizer, dict) else normalizer
    if isinstance(normalizer, dict) and kind == "Sequence":
        steps = [_composes(one) for one in _list(normalizer, "normalizers")]
        return True in steps
    if kind != "NFC":
        raise NotNativeError(f"its normalizer is {kind}")
    return True


def _patterns(content: JsonObject) -> list[str]:
    """Return the patterns that cut a text, one after another."""
    first = _part(content, "pre_tokenizer")
    steps = _list(first, "pretokenizers") if first.get("type") == "Sequence" else [first]
    found, whole = list[str](), False
    for step in steps:
        kind = step.get("type") if isinstance(step, dict) else step
        if not isinstance(step, dict) or whole:
            raise NotNativeError(f"its pre-tokenizer has {kind}")
        if kind == "ByteLevel" and not step.get("add_prefix_space"):
            found += [GPT2] if step.get("use_regex", True) else []
            whole = True
        elif kind == "Digits":
            found.append(DIGITS[bool(step.get("individual_digits"))])
        elif kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            found.append(_pattern(step.get("pattern")))
        else:
            raise NotNativeError(f"its pre-tokenizer has {json.dumps(step)[:80]}")
    if not whole:
        raise NotNativeError("its pre-tokenizer does not end with ByteLevel")
    return found


def _pattern(pattern: object) -> str:
    kinds = pattern if isinstance(pattern, dict) else {}
    if isinstance(kinds.get("Regex"), str):
        return str(kinds["Regex"])
    # Between \Q and \E nothing has a meaning but \E itself.
    text = str(kinds.get("String", ""))
    if not text or r"\E" in text:
        raise NotNativeError(f"its pre-tokenizer has the pattern {json.dumps(pattern)[:80]}")
    return rf"\Q{text}\E"


def _around(content: JsonObject) -> tuple[list[int], list[int]]:
    """Return the tokens that are put before a text, and behind it."""
    step = content.get("post_processor")
    steps = _list(step, "processors") if isinstance(step, dict) and "processors" in step else [step]
    around: tuple[list[int], list[int]] = ([], [])
    for one in steps:
        kind = one.get("type") if isinstance(one, dict) else None
        if one is None or kind == "ByteLevel":
            continue
        if not isinstance(one, dict) or kind != "TemplateProcessing":
            raise NotNativeError(f"its post-processor is {kind}")
        special, seen = _part(one, "special_tokens"), False
        for piece in _list(one, "single"):
            parts = piece if isinstance(piece, dict) else {}
            if "Sequence" in parts:
                seen = True
                continue
            name = _part(parts, "SpecialToken").get("id")
            ids = _part(special, str(name)).get("ids")
            if not isinstance(ids, list):
                raise NotNativeError("its post-processor names a token that it does not list")
            around[seen].extend(ids)
    return around


def _chat(folder: Path, files: Files) -> tuple[str, str, str] | None:
    """Return what a chat template has before a message, behind it, and between answer and next."""
    if find_template(folder, files) is None:
        return None
    first, answer, then = SAID
    said = [{"role": "user", "content": first}]
    more = [{"role": "assistant", "content": answer}, {"role": "user", "content": then}]
    try:
        one = chat_prompt(folder, files, said)
        both = chat_prompt(folder, files, [*said, *more])
    except LinexportError:
        return None
    if one.count(first) != 1 or both.count(answer) != 1 or both.count(then) != 1:
        return None
    before, behind = one.split(first)
    between, end = both.split(answer)[1].split(then)
    return None if end != behind else (before, behind, between)


def _add_chat(found: _File, parts: tuple[str, str, str] | None) -> None:
    found.number(parts is not None)
    for part in parts or ("", "", ""):
        found.text(part)


def _add_settings(found: _File, folder: Path, files: Files) -> None:
    defaults = generation_defaults(folder, files)
    sampling = defaults.sampling
    for value in (sampling.temperature, sampling.top_p, sampling.min_p):
        found.real(value)
    found.real(sampling.repetition_penalty)
    found.number(sampling.top_k)
    found.texts(defaults.stops)


def _part(of: Mapping[str, object], name: str) -> JsonObject:
    found = of.get(name)
    return found if isinstance(found, dict) else {}


def _list(of: Mapping[str, object], name: str) -> list[object]:
    found = of.get(name)
    return found if isinstance(found, list) else []
