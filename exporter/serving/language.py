"""The text side of a language model: files of the artifact beside the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from linexport.artifact.language_interface import language_interface
from linexport.artifact.tokenizer import Tokenizer, context, end_tokens, find_tokenizer
from linexport.errors import UsageError
from linexport.manifest import Manifest
from linexport.serving.template import ChatTemplate, find_template, special_tokens


@dataclass(frozen=True)
class Language:
    """What texts of a model are made with.

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
    def read(cls, folder: Path, manifest: Manifest) -> Language:
        """Return that of an artifact, from the files that its manifest lists.

        Raises:
            LinexportError: it has no texts; says why.
        """
        model, files = language_interface(manifest), manifest.files
        if not manifest.states:
            raise UsageError(f"{folder} does not stream: {manifest.why_stateless}")
        tokenizer = find_tokenizer(folder, model.vocabulary, files)
        found = find_template(folder, files)
        template = None if found is None else ChatTemplate(found, special_tokens(folder, files))
        return cls(tokenizer, template, context(folder, files), end_tokens(folder, files))
