"""Queries and documents of late interaction, as PyLate makes tokens of them.

    query      <s> [Q] q_1 ... q_n </s> [MASK] ... [MASK]     cut, and filled to ``query_length``
    document   <s> [D] d_1 ... d_n </s>                       cut to ``document_length``

Each token of a query has a vector, those that fill it up too. Of a document, those of listed words,
such as punctuation, have none. Tokens that fill a query up and that others do not look at are
padding to an artifact, of which it has no vectors: such queries are refused. Source: PyLate 1.6.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from linexport.artifact.text.tokenizer import Tokenizer
from linexport.errors import UsageError
from linexport.system.json_object import JsonObject

QUERY, DOCUMENT = "query", "document"
LENGTHS = {QUERY: 32, DOCUMENT: 180}
"""Tokens of either where a model does not say."""

MOST = 1 << 20


class Row(list[int]):
    """Tokens of one text.

    Attributes:
        shown: places of the tokens that have a vector, for late interaction.
        prompt: number of tokens at the beginning that are not pooled.

    Args:
        ids: the tokens.
        left_out: tokens without a vector.
        prompt: as above.
    """

    def __init__(
        self, ids: Iterable[int], left_out: frozenset[int] = frozenset(), prompt: int = 0
    ) -> None:
        super().__init__(ids)
        self.prompt = prompt
        self.shown = [place for place, token in enumerate(self) if token not in left_out]


@dataclass(frozen=True)
class Side:
    """How queries, or documents, become tokens.

    Attributes:
        prefix: a token behind the first one; None for none.
        longest: tokens of a text.
        filler: token that fills a text up to the longest; None where nothing does.
        attends: tokens may look at those that fill up.
        left_out: tokens without a vector.
    """

    prefix: int | None
    longest: int
    filler: int | None = None
    attends: bool = False
    left_out: frozenset[int] = frozenset()

    @property
    def cut(self) -> int:
        """Tokens of a text without the prefix."""
        return self.longest - (self.prefix is not None)

    def row(self, ids: list[int]) -> Row:
        """Return the tokens of a text, of which there are no more than ``cut``.

        Raises:
            UsageError: tokens that others do not look at would fill it up.
        """
        whole = ids if self.prefix is None else [*ids[:1], self.prefix, *ids[1:]]
        if self.filler is None:
            return Row(whole, self.left_out)
        if not self.attends:
            raise UsageError(
                "Queries of this model are filled up with tokens that others do not look at "
                "(do_query_expansion without attend_to_expansion_tokens), of which an artifact has "
                "no vectors. Set do_query_expansion to false in config_sentence_transformers.json "
                "of the model for vectors of a query's own tokens, and convert it again."
            )
        return Row([*whole, *[self.filler] * (self.longest - len(whole))])


def sides(
    settings: JsonObject, words: JsonObject, tokenizer: Tokenizer, longest: int | None, path: str
) -> Mapping[str, Side]:
    """Return how queries and documents become tokens; none where the settings are not PyLate's.

    Args:
        settings: of ``config_sentence_transformers.json``.
        words: of ``tokenizer_config.json``.
        tokenizer: of the model.
        longest: tokens that the model takes; None without a limit.
        path: of the settings, for errors.

    Raises:
        UsageError: settings of another type, or a prefix that is not a token.
    """
    if not {"query_prefix", "document_prefix"} & settings.keys():
        return {}

    def side(name: str) -> Side:
        text = settings.get(f"{name}_prefix")
        text = f"[{name[0].upper()}] " if text is None else text
        length = settings.get(f"{name}_length")
        length = LENGTHS[name] if length is None else length
        prefix = tokenizer.token_id(text) if isinstance(text, str) and text else None
        if not isinstance(text, str) or (text and prefix is None):
            raise UsageError(f"{path} has {name}_prefix {text!r}, which is not a token.")
        if type(length) is not int or not 4 <= length <= MOST:
            raise UsageError(f"{path} has {name}_length {length!r}; expected 4 tokens or more.")
        return Side(prefix, min(length, longest or length))

    query, document = side(QUERY), side(DOCUMENT)
    if settings.get("do_query_expansion") is not False:
        attends = settings.get("attend_to_expansion_tokens") is True
        query = Side(query.prefix, query.longest, _filler(words, tokenizer, path), attends)
    listed = settings.get("skiplist_words")
    listed = list(string.punctuation) if listed is None else listed
    if not isinstance(listed, list) or not all(isinstance(word, str) for word in listed):
        raise UsageError(f"{path} has skiplist_words that are not a list of words.")
    unknown = _named(words, "unk_token", tokenizer)
    found = [tokenizer.token_id(word) for word in listed]
    known = (unknown if token is None else token for token in found)
    left_out = frozenset(token for token in known if token is not None)
    return {
        QUERY: query,
        DOCUMENT: Side(document.prefix, document.longest, left_out=left_out),
    }


def _filler(words: JsonObject, tokenizer: Tokenizer, path: str) -> int:
    names = ("mask_token", "eos_token", "pad_token")
    found = (_named(words, name, tokenizer) for name in names)
    filler = next((token for token in found if token is not None), None)
    if filler is None:
        raise UsageError(f"{path} fills queries up, and the tokenizer has none of {names}.")
    return filler


def _named(words: JsonObject, name: str, tokenizer: Tokenizer) -> int | None:
    """Return the token that a tokenizer's configuration names for a purpose."""
    word = words.get(name)
    word = word.get("content") if isinstance(word, dict) else word
    return tokenizer.token_id(word) if isinstance(word, str) else None
