"""Defaults of generation that a model folder states in its ``generation_config.json``.

    do_sample false, or absent    argmax
    do_sample true                temperature, top_k (50 where it is absent), top_p, min_p

and tokens that may not come, see ``restrictions``,
as in transformers. A setting that would change the text and that nothing here does is named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from linexport.artifact.text.restrictions import Restrictions
from linexport.artifact.text.sampling import Sampling
from linexport.artifact.text.tokenizer import GENERATION_CONFIG, Files, read_json
from linexport.errors import UsageError

TOP_K = 50
"""Default of transformers for a model that samples."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "num_beams": (1,),
        "num_beam_groups": (1,),
        "num_return_sequences": (1,),
        "penalty_alpha": (0,),
        "dola_layers": (),
        "typical_p": (1,),
        "top_h": (),
        "epsilon_cutoff": (0,),
        "eta_cutoff": (0,),
        "encoder_repetition_penalty": (1,),
        "encoder_no_repeat_ngram_size": (0,),
        "bad_words_ids": ([],),
        "force_words_ids": ([],),
        "constraints": ([],),
        "sequence_bias": ([], {}),
        "forced_bos_token_id": (),
        "forced_eos_token_id": (),
        "exponential_decay_length_penalty": (),
        "max_time": (),
        "token_healing": (False,),
        "guidance_scale": (1,),
        "watermarking_config": (),
    }
)
"""Settings that are not implemented, with their neutral values; null is neutral too."""


@dataclass(frozen=True)
class GenerationDefaults:
    """How a model's author has it generate.

    Attributes:
        sampling: how tokens are chosen.
        max_tokens: of a text; None if unstated.
        max_length: tokens of prompt and text together; None if unstated.
        stops: strings that end a text.
        ignored: settings that are not implemented, as "name: value".
        restrictions: tokens that may not come.
    """

    sampling: Sampling
    max_tokens: int | None = None
    max_length: int | None = None
    stops: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    restrictions: Restrictions = field(default_factory=Restrictions)

    @property
    def warning(self) -> str | None:
        """A sentence about settings that are not implemented; None where there are none."""
        if not self.ignored:
            return None
        return (
            f"{GENERATION_CONFIG} of this model asks for {', '.join(self.ignored)}, which is not "
            "implemented here: texts are written without."
        )


def generation_defaults(folder: Path, files: Files = MappingProxyType({})) -> GenerationDefaults:
    """Return what the file of an artifact states; the argmax without end where there is none.

    Args:
        folder: of the artifact.
        files: of the artifact, as they were verified; empty to take files as they are.

    Raises:
        UsageError: the file is damaged, or has a value without meaning.
    """
    content, path = read_json(folder / GENERATION_CONFIG, files), folder / GENERATION_CONFIG
    sampled = _value(path, content, "do_sample", bool, False)
    try:
        restrictions = Restrictions(
            _tokens(path, content, "suppress_tokens"),
            _tokens(path, content, "begin_suppress_tokens"),
            _value(path, content, "min_new_tokens", int, None),
            _value(path, content, "min_length", int, 0),
            _value(path, content, "no_repeat_ngram_size", int, 0),
        )
        sampling = Sampling(
            temperature=_value(path, content, "temperature", float, 1.0) if sampled else 0.0,
            top_k=_value(path, content, "top_k", int, TOP_K) if sampled else 0,
            top_p=_value(path, content, "top_p", float, 1.0) if sampled else 1.0,
            min_p=_value(path, content, "min_p", float, 0.0) if sampled else 0.0,
            repetition_penalty=_value(path, content, "repetition_penalty", float, 1.0),
        )
    except UsageError as error:
        raise _wrong(path, str(error).removesuffix(".")) from None
    stops = content.get("stop_strings") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise _wrong(path, f"stop_strings is {json.dumps(stops)[:80]}; expected a list of texts")
    return GenerationDefaults(
        sampling,
        _value(path, content, "max_new_tokens", int, None),
        _value(path, content, "max_length", int, None),
        tuple(stops),
        tuple(
            f"{name}: {json.dumps(content[name])[:40]}"
            for name, neutral in NEUTRAL.items()
            if content.get(name) is not None and content[name] not in neutral
        ),
        restrictions,
    )


def _value(
    path: Path, content: Mapping[str, object], name: str, kind: type, default: object
) -> Any:
    """Return a value of one type, or the default for null."""
    found = content.get(name)
    if found is None:
        return default
    if kind is float and type(found) is int:
        return float(found)
    if type(found) is not kind:  # True is not a number
        word = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise _wrong(path, f"{name} is {json.dumps(found)[:80]}; expected {word}")
    return found


def _tokens(path: Path, content: Mapping[str, object], name: str) -> tuple[int, ...]:
    found = content.get(name) or []
    if not isinstance(found, list) or not all(type(token) is int for token in found):
        raise _wrong(path, f"{name} is {json.dumps(found)[:80]}; expected a list of token ids")
    return tuple(found)


def _wrong(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{path}: {what}. Correct it in the folder of the model, and convert that again."
    )
