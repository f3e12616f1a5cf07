"""Compare a package in its own runtime, by greedy texts of a batch, with the artifact's texts.

    prompts of several lengths -> package, its runtime -> texts of the batch
    each prompt                -> artifact            -> its text

A destination whose runtime may be installed writes the first by a module of this folder.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from linexport.artifact.runtime import load
from linexport.artifact.text.language_interface import LanguageInterface, language_interface
from linexport.artifact.text.tokenizer import context, end_tokens, model_config
from linexport.errors import UsageError
from linexport.package.destination import BatchPrompts, Destination, Packaging

__all__ = ["Proof", "prove"]

PROMPT_LENGTHS, EVEN = (17, 5, 33, 1), (17, 17, 17)
"""Lengths of the prompts; where padding would be read as tokens, they have one."""

TOKENS = 24
"""Tokens of each text."""

QUANTISED = 0.02
"""Share of the largest logit by which two programs differ that round activations of quantised
weights differently."""


@dataclass(frozen=True)
class Proof:
    """Outcome of a package in its own runtime.

    Attributes:
        runtime: name and version.
        lengths: of the prompts.
        tokens: of each text, at the most.
        different: prompts whose text in the batch is another one than alone: the place of the
            prompt, and of the first other token.
    """

    runtime: str
    lengths: tuple[int, ...]
    tokens: int
    different: tuple[tuple[int, int], ...]

    @property
    def passed(self) -> bool:
        """Every prompt has the text that it has alone."""
        return not self.different

    def __str__(self) -> str:
        what = f"{len(self.lengths)} prompts of {', '.join(map(str, self.lengths))} tokens"
        if self.passed:
            return f"{self.runtime} writes for {what} in a batch what the artifact writes for each"
        place, token = self.different[0]
        return (
            f"{self.runtime} writes for {len(self.different)} of {what} in a batch another text "
            f"than the artifact for the prompt alone; that of {self.lengths[place]} tokens differs "
            f"from its token {token} on"
        )


def prove(job: Packaging, destination: Destination, even: bool, seed: int = 0) -> Proof:
    """Run a package that was written in its own runtime.

    Args:
        job: what was packaged, with the names that it has there.
        destination: of it.
        even: prompts of a batch need one length.
        seed: of the prompts.

    Raises:
        UsageError: not a language model that streams, or nothing runs such packages here.
        EnvironmentProblemError: the runtime is not installed, or does not start.
    """
    if destination.write_texts is None:
        raise UsageError(
            f"--prove runs no packages for {destination.name}. linexport validate compares the "
            "artifact with its original."
        )
    language = language_interface(job.manifest)
    if not job.manifest.states:
        raise UsageError(f"{job.source} does not stream: {job.manifest.why_stateless}")
    ends = end_tokens(job.source, job.manifest.files)
    even = even or (language.mask is None and not destination.by_prompt)
    prompts = _drawn(job, language, ends, EVEN if even else PROMPT_LENGTHS, seed)
    texts = destination.write_texts(job, prompts)
    artifact = load(job.source, threads=1, allow_failed=True)
    found = [
        _first_difference(artifact, prompt, text, prompts)
        for prompt, text in zip(prompts.rows, texts.rows, strict=True)
    ]
    different = tuple((row, token) for row, token in enumerate(found) if token is not None)
    return Proof(texts.runtime, tuple(map(len, prompts.rows)), prompts.tokens, different)


def _drawn(
    job: Packaging,
    language: LanguageInterface,
    ends: Collection[int],
    lengths: tuple[int, ...],
    seed: int,
) -> BatchPrompts:
    """Draw prompts without tokens that are taken for padding or for the end of a text."""
    padding = model_config(job.source, job.manifest.files).get("pad_token_id") or 0
    usual = np.setdiff1d(np.arange(language.vocabulary), [*ends, padding])
    most = context(job.source, job.manifest.files) or max(lengths) + TOKENS
    tokens = min(TOKENS, max(1, most // 2))
    choose = np.random.default_rng(seed)
    drawn = (choose.choice(usual, min(length, max(1, most - tokens))) for length in lengths)
    return BatchPrompts(
        tuple(row.astype(np.int64) for row in drawn), tokens, frozenset(ends), padding
    )


def _first_difference(
    artifact: Any, prompt: np.ndarray, text: list[int], prompts: BatchPrompts
) -> int | None:
    """Return the place of the first token that the artifact would not have written; None without.

    A token whose logit is the largest within rounding may be written in its place.
    """
    name, stream = language_interface(artifact.manifest).logits, artifact.stream()
    parity = artifact.manifest.parity
    share = parity.tolerance.relative if parity else 0.0
    share = QUANTISED if artifact.manifest.quantisation else share
    fed = prompt
    for place in range(prompts.tokens):
        logits = stream.step(fed[None])[name][0, -1]
        best = int(logits.argmax())
        if place == len(text):
            return None if best in prompts.ends else place
        if logits[best] - logits[text[place]] > 2 * share * np.abs(logits).max():
            return place
        if text[place] in prompts.ends:
            return None
        fed = np.array([text[place]])
    return None
