"""Language models among artifacts: token ids in, logits of each next token out.

tokens (batch, length) int64 [, attention_mask (batch, length)] -> logits (batch, length, V)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from linexport.errors import UsageError
from linexport.manifest import Manifest

Prompt = Sequence[int] | np.ndarray | bytes
"""Token ids; of bytes, their values."""


@dataclass(frozen=True)
class LanguageInterface:
    """Names of the inputs and the output, states excluded.

    Attributes:
        tokens: the input of token ids.
        logits: the output.
        vocabulary: width of the logits.
        mask: the input that says which tokens are no padding; None where there is none.
    """

    tokens: str
    logits: str
    vocabulary: int
    mask: str | None = None

    def checked(self, prompt: Prompt) -> np.ndarray:
        """Return a prompt as (T,) int64.

        Raises:
            UsageError: it is empty, no sequence of integers, or outside the vocabulary.
        """
        try:
            ids = np.asarray(list(prompt) if isinstance(prompt, bytes) else prompt)
        except ValueError:  # rows of several lengths
            raise UsageError(
                "The prompt is several rows; expected one row of token ids. Several prompts are "
                "for generate_batch."
            ) from None
        if ids.size == 0:
            raise UsageError("The prompt has no tokens; expected at least one.")
        if ids.ndim != 1:
            raise UsageError(f"The prompt has shape {ids.shape}; expected one row of token ids.")
        if ids.dtype.kind not in "iu":
            raise UsageError(f"The prompt has dtype {ids.dtype}; expected integer token ids.")
        if ids.min() < 0 or ids.max() >= self.vocabulary:
            raise UsageError(
                f"The prompt has token ids from {ids.min()} to {ids.max()}; the model's vocabulary "
                f"is 0 to {self.vocabulary - 1}."
            )
        return ids.astype(np.int64)


def language_interface(manifest: Manifest) -> LanguageInterface:
    """Return the language model that a manifest describes.

    Raises:
        UsageError: it describes something else.
    """
    if manifest.head not in (None, "causal_lm"):
        raise UsageError(
            f"{manifest.artifact} is not a language model: its output is of the kind "
            f"{manifest.head}. Expected one that was converted with its language model's head."
        )
    states = {name for s in manifest.states for name in (s.past, s.present)} | {manifest.hidden}
    given = [i for i in manifest.inputs if i.default is None]
    tokens = [i for i in given if i.name not in states]
    outputs = [o for o in manifest.outputs if o.name not in states]
    vocabulary = outputs[0].shape[-1] if outputs and outputs[0].shape else None
    fits = (
        len(tokens) == len(outputs) == 1
        and tokens[0].dtype == "int64"
        and len(tokens[0].shape) == 2
        and len(outputs[0].shape) == 3
    )
    if not fits or not isinstance(vocabulary, int):
        found = [f"{x.name} {x.dtype} {list(x.shape)}" for x in (*tokens, *outputs)]
        raise UsageError(
            f"{manifest.artifact} is not a language model: it has {', '.join(found)}. Expected "
            "token ids (batch, length) in int64 and logits (batch, length, vocabulary)."
        )
    masks = [i.name for i in manifest.inputs if i.default == 1 and i.shape == tokens[0].shape]
    return LanguageInterface(
        tokens[0].name, outputs[0].name, vocabulary, masks[0] if masks else None
    )


def logits_of(manifest: Manifest) -> str | None:
    """Return the name of the logits of each token; None of what is not a language model."""
    try:
        return language_interface(manifest).logits
    except UsageError:
        return None
