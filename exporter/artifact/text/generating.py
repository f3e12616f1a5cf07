"""Generation options: those of the caller, else those in the artifact's files.

    argument     else generation_config.json     else argmax, without end

Asking for ``top_k``, ``top_p`` or ``min_p`` alone asks for samples: the temperature is then 1.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from linexport.artifact.text import tokenizer
from linexport.artifact.text.continuation import Generation
from linexport.artifact.text.generation_config import generation_defaults
from linexport.artifact.text.stops import stop_rules
from linexport.artifact.text.tokenizer import Files
from linexport.errors import UsageError
from linexport.system.json_object import JsonObject


@dataclass(frozen=True)
class GenerationRequest:
    """Settings of ``Artifact.generate``; None where the artifact's files decide."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int = 0
    stop: Collection[int] | None = None
    stop_strings: Collection[str] | None = None

    def generation(self, folder: Path, vocabulary: int, files: Files) -> Generation:
        """Return how texts are written.

        Args:
            folder: of the artifact.
            vocabulary: of the model.
            files: of the artifact, as they were verified.

        Raises:
            UsageError: a file is damaged, a value has no meaning, or stop strings are given and the
                artifact has no tokenizer.
        """
        own = generation_defaults(folder, files)
        given: JsonObject = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
        }
        filters = any(given[name] is not None for name in ("top_k", "top_p", "min_p"))
        if filters and self.temperature is None and own.sampling.temperature == 0:
            given["temperature"] = 1.0
        requested = {name: value for name, value in given.items() if value is not None}
        stops = tuple(own.stops if self.stop_strings is None else self.stop_strings)
        if isinstance(self.stop_strings, str) or not all(stops):
            raise UsageError(
                f"stop_strings is {self.stop_strings!r}; expected a list of texts, none of them "
                "empty."
            )
        ends = frozenset(self.stop or ())
        if self.stop is None:
            ends = tokenizer.end_tokens(folder, files)
        own_ends = ends
        found = tokenizer.find_tokenizer(folder, vocabulary, files) if stops else None
        if found is not None:
            ends, stops = stop_rules(found.special, ends, stops)
        return Generation(
            replace(own.sampling, seed=self.seed, **requested),
            ends,
            stops,
            None if found is None else found.decoder,
            own.max_tokens if self.max_tokens is None else self.max_tokens,
            own.max_length if self.max_tokens is None and own.max_tokens is None else None,
            tokenizer.context(folder, files),
            own.restrictions,
            own_ends,
        )
