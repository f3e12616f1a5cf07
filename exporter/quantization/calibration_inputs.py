"""Inputs that a model is calibrated with and compared on: text, or numbers that are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linexport.artifact.runtime import Artifact
from linexport.artifact.temporary import Arrays
from linexport.artifact.text.language_interface import LanguageInterface, language_interface
from linexport.artifact.text.tokenizer import MODEL_CONFIG, model_config
from linexport.errors import UnsupportedModelError, UsageError
from linexport.manifest.quantisation import TextRecord
from linexport.quantization.token_windows import LENGTH, TextWindows, text_windows

DRAWN = 16
"""Inputs drawn for models that read numbers; half of them are compared on."""


@dataclass(frozen=True)
class CalibrationInputs:
    """Inputs to calibrate with and to compare on.

    Attributes:
        language: names tokens and logits; None for other models.
        windows: text, for language models.
        calibration, compared: inputs of the graph for each run; none to compare where there are
            windows.
        description: where they come from, in words.
        text: the user's text, None for other inputs.
    """

    language: LanguageInterface | None
    windows: TextWindows | None
    calibration: tuple[Arrays, ...]
    compared: tuple[Arrays, ...]
    description: str
    text: TextRecord | None = None


def inputs_of(artifact: Artifact, data: Path | None, seed: int) -> CalibrationInputs:
    """Read text for a model that reads tokens, or draw inputs for another.

    Args:
        artifact: names inputs; its folder may have a tokenizer.
        data: text; None for Python's own source.
        seed: of drawn inputs.

    Raises:
        UsageError: data that cannot be read, or that is not text for this model.
        UnsupportedModelError: the model reads integers and is not known to read text.
    """
    language = _language(artifact)
    if language is None and artifact.manifest.head is None:
        if data is not None:
            raise UsageError("--data is text; this artifact is of no model that reads text.")
        drawn = _drawn(artifact, seed)
        half = len(drawn) // 2
        return CalibrationInputs(None, None, drawn[:half], drawn[half:], "standard normal inputs")
    vocabulary = _vocabulary(artifact) if language is None else language.vocabulary
    longest = None if language is None else _longest(artifact, language)
    windows = text_windows(artifact.path, artifact.verified, vocabulary, data, seed, longest)
    calibration = tuple(artifact.feeds(ids[None]) for ids in windows.calibration)
    if language is None:
        compared = tuple(artifact.feeds(ids[None]) for ids in windows.compared)
        return CalibrationInputs(
            None, None, calibration, compared, windows.description, windows.text
        )
    return CalibrationInputs(language, windows, calibration, (), windows.description, windows.text)


def _language(artifact: Artifact) -> LanguageInterface | None:
    try:
        return language_interface(artifact.manifest)
    except UsageError:
        return None


def _longest(artifact: Artifact, language: LanguageInterface) -> int | None:
    """Return the tokens that a call takes at most; None: any number."""
    shape = next(i.shape for i in artifact.manifest.inputs if i.name == language.tokens)
    sequence = artifact.manifest.dims.get(str(shape[1]))
    return None if sequence is None else sequence.max


def _vocabulary(artifact: Artifact) -> int:
    """Return the number of token ids of a model that has another head than a language model's."""
    found = model_config(artifact.path, artifact.verified).get("vocab_size")
    if not isinstance(found, int) or found < 1:
        raise UsageError(
            f"{artifact.path / MODEL_CONFIG} has the vocab_size {found!r}; expected the number of "
            "token ids, which the model is calibrated on. Convert the model folder again."
        )
    return found


def _drawn(artifact: Artifact, seed: int) -> tuple[Arrays, ...]:
    """Draw inputs of models that read numbers rather than tokens."""
    random = np.random.default_rng(seed)
    manifest = artifact.manifest
    pasts = {s.past for s in manifest.states}
    given = [i for i in manifest.inputs if i.name not in pasts and i.default is None]
    kinds = {i.dtype for i in given} - {"float32", "float16"}
    if kinds:
        raise UnsupportedModelError(
            f"{artifact.path} reads inputs of type {', '.join(sorted(kinds))} and is not of a "
            "Hugging Face folder: there is nothing to calibrate it on."
        )
    sizes = {n: (2 if d.batch else min(d.max or LENGTH, LENGTH)) for n, d in manifest.dims.items()}
    return tuple(
        artifact.feeds(
            {
                i.name: random.standard_normal(
                    [d if isinstance(d, int) else sizes.get(str(d), 1) for d in i.shape]
                ).astype(i.dtype)
                for i in given
            }
        )
        for _ in range(DRAWN)
    )
