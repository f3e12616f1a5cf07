"""The text side of a language model: the artifact's files other than the model."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from linexport.artifact.opened_folder import OpenedFolder
from linexport.artifact.text.generation_config import GenerationDefaults, generation_defaults
from linexport.artifact.text.language_interface import language_interface
from linexport.artifact.text.template import ChatTemplate, find_template, special_tokens
from linexport.artifact.text.tokenizer import (
    GENERATION_CONFIG,
    Tokenizer,
    context,
    end_tokens,
    find_tokenizer,
)
from linexport.errors import UsageError
from linexport.serving.limits import LONGEST_STOP, STOPS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Language:
    """Parts of an artifact that texts are made with.

    Attributes:
        tokenizer: of its folder, or bytes.
        template: of conversations; None where the folder has none.
        context: tokens that prompt and text may have together.
        ends: tokens that end a text.
        defaults: how its author has it generate.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    context: int | None
    ends: frozenset[int]
    defaults: GenerationDefaults

    @classmethod
    def read(cls, source: OpenedFolder) -> Language:
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
        defaults = generation_defaults(folder, files)
        if len(defaults.stops) > STOPS or max(map(len, defaults.stops), default=0) > LONGEST_STOP:
            raise UsageError(
                f"{folder / GENERATION_CONFIG} has {len(defaults.stops)} stop_strings; a server "
                f"takes at most {STOPS}, each of at most {LONGEST_STOP} characters."
            )
        if defaults.warning:
            log.warning("%s", defaults.warning)
        if defaults.restrictions.ngram:
            log.warning(
                "%s of this model asks for no_repeat_ngram_size, which a server does not have: its "
                "texts are written without.",
                GENERATION_CONFIG,
            )
        return cls(tokenizer, template, context(folder, files), end_tokens(folder, files), defaults)
