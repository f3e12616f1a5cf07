"""The tokenizer of a GGUF file, as the ``tokenizer.json`` that it was made of.

    tokenizer.ggml.model    "gpt2": byte pairs with ``tokens``, ``merges`` and ``token_type``
    tokenizer.ggml.pre      how a text is cut into words before

Other models of tokenizers and other cuts are not read: a wrong cut gives other tokens, and no
error. Source: ``llama-vocab.cpp`` of llama.cpp, with the normalisation of published tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from linexport.sources.gguf.file import GgufFile
from linexport.system.json_object import JsonObject

MODEL = "gpt2"
CONTROL, DEFINED, UNUSED = 3, 4, 5
"""Types of tokens: of no text, added by the user, and fillers that no text gives."""

_CONTRACTED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+{_END}"
)
_QWEN2 = rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+{_END}"
_QWEN35 = (
    rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+{_END}"
)


@dataclass(frozen=True)
class Cut:
    """How a text is cut into words.

    Attributes:
        pattern: of a word.
        composed: characters are composed (NFC) first.
        whole: a word that is a token is not merged from its bytes.
        begins: a text begins with the token of the beginning, unless the file says otherwise.
    """

    pattern: str
    composed: bool = False
    whole: bool = False
    begins: bool = False


CUTS: Mapping[str, Cut] = {
    **dict.fromkeys(("gpt-2", "olmo"), Cut(_GPT2)),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2"),
        Cut(_LLAMA3, whole=True, begins=True),
    ),
    "dbrx": Cut(_LLAMA3),
    "qwen2": Cut(_QWEN2, composed=True),
    "qwen35": Cut(_QWEN35, composed=True),
}
"""Cuts by the names that files have for them."""


def tokenizer_files(file: GgufFile) -> dict[str, str]:
    """Return texts of the files of a tokenizer by their names; none where it is not read."""
    cut = CUTS.get(str(file.of_tokenizer("pre")))
    tokens, kinds = file.of_tokenizer("tokens"), file.of_tokenizer("token_type")
    merges = file.of_tokenizer("merges")
    if file.of_tokenizer("model") != MODEL or cut is None or not _fit(file, tokens, kinds, merges):
        return {}
    added = [
        {
            "id": place,
            "content": token,
            "special": kind == CONTROL,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for place, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, DEFINED)
    ]
    vocabulary = {
        token: place
        for place, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind != UNUSED
    }
    split = {"type": "Split", "pattern": {"Regex": cut.pattern}, "behavior": "Isolated"}
    octets = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    octets |= {"use_regex": False}
    whole = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if cut.composed else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{**split, "invert": False}, octets],
        },
        "post_processor": _ends(file, cut, tokens),
        "decoder": octets,
        "model": {
            "type": "BPE",
            "ignore_merges": cut.whole,
            "vocab": vocabulary,
            "merges": [merge.split(" ") for merge in merges],
        },
    }
    texts = {"tokenizer.json": whole, "tokenizer_config.json": _settings(file, tokens)}
    return {name: json.dumps(text, ensure_ascii=False) for name, text in texts.items()}


def _fit(file: GgufFile, tokens: object, kinds: object, merges: object) -> bool:
    """Return whether there are texts, types and merges for all tokens of the model."""
    if not all(isinstance(x, list) for x in (tokens, kinds, merges)):
        return False
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    assert isinstance(merges, list)
    texts = all(isinstance(token, str) for token in tokens)
    if not texts or not len(tokens) == len(kinds) <= file.vocabulary:
        return False
    known = {token for token, kind in zip(tokens, kinds, strict=True) if kind != UNUSED}
    pairs = (m.split(" ") if isinstance(m, str) else [] for m in merges)
    return all(len(p) == 2 and {*p, "".join(p)} <= known for p in pairs)


def _ends(file: GgufFile, cut: Cut, tokens: list[str]) -> JsonObject | None:
    """Return what puts tokens of the beginning and the end around a text."""
    first, last = file.token("bos"), file.token("eos")
    begins, ends = file.of_tokenizer("add_bos_token"), file.of_tokenizer("add_eos_token")
    around = [
        first if (cut.begins if begins is None else begins) else None,
        last if ends else None,
    ]
    if all(place is None or place >= len(tokens) for place in around):
        return None
    text: list[JsonObject] = [{"Sequence": {"id": "A", "type_id": 0}}]
    named = {}
    for at, place in zip((0, 2), around, strict=True):
        if place is not None and place < len(tokens):
            word = tokens[place]
            text.insert(at, {"SpecialToken": {"id": word, "type_id": 0}})
            named[word] = {"id": word, "ids": [place], "tokens": [word]}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": text,
        "pair": [*text, second],
        "special_tokens": named,
    }


def _settings(file: GgufFile, tokens: list[str]) -> JsonObject:
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    found = {f"{ours}_token": file.token(theirs) for ours, theirs in roles.items()}
    settings: JsonObject = {
        name: tokens[place]
        for name, place in found.items()
        if place is not None and place < len(tokens)
    }
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    template = file.of_tokenizer("chat_template", "tokenizer")
    return settings | ({"chat_template": template} if isinstance(template, str) else {})
