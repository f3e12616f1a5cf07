"""The text side of a language model: files of the artifact beside the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from linexport.artifact.language_interface import language_interface
from linexport.artifact.tokenizer import Tokenizer, context, end_tokens, find_tokenizer
from linexport.errors import UsageError
from linexport.manifest import Manifest
from linexport.manifest.records import FileRecord
from linexport.serving.template import ChatTemplate, find_template, special_tokens


class Source(Protocol):
    """An artifact's folder, opened to run or not.

    Attributes:
        path: the folder.
        manifest: of it.
        verified: files whose digests held, by name.
    """

    @property
    def path(self) -> Path: ...

    @property
    def manifest(self) -> Manifest: ...

    @property
    def verified(self) -> Mapping[str, FileRecord]: ...


@dataclass(frozen=True)
class Language:
    """Parts of an artifact that texts are made with.

    Attributes:
        tokenizer: of its folder, or bytes.
        template: of conversations; None where the folder has none.
        context: tokens that prompt and text may have together.
        ends: tokens that end a text.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    context: int | None
    ends: frozenset[int]

    @classmethod
    def read(cls, source: Source) -> Language:
        """Return that of an artifact.

        Raises:
            LinexportError: it has no texts; says why.
        """
        folder, manifest, files = source.path, source.manifest, source.verified
        model = language_interface(manifest)
        if not manifest.states:
            raise UsageError(f"{folder} does not stream: {manifest.why_stateless}")
        tokenizer = find_tokenizer(folder, model.vocabulary, files)
        found = find_template(folder, files)
        template = None if found is None else ChatTemplate(found, special_tokens(folder, files))
        return cls(tokenizer, template, context(folder, files), end_tokens(folder, files))
