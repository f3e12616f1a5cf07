"""Parity of an embedding model that leaves out the tokens of a prompt when it pools.

    ids, mask, pooling mask of several rows, padded   against the original on each row alone

The first tokens of each row are those of its prompt, of which the rows have different numbers, one
of them none.
"""

from __future__ import annotations

import numpy as np
import torch

from linexport.manifest.records import POOLING_MASK
from linexport.parity.cases import Case
from linexport.parity.check import ModelUnderTest, Parity
from linexport.parity.language.in_both import add_compared
from linexport.parity.language.prompts import (
    BATCH,
    LEFT,
    RIGHT,
    SEQUENCE,
    Prompt,
    draw_prompt,
)
from linexport.parity.reference.module import Reference

ROWS, LENGTH = 4, 90


def check_pooling(tested: ModelUnderTest, parity: Parity, seed: int) -> None:
    """Compare vectors of texts behind prompts; adds cases to ``parity``."""
    language, session = tested.loaded.language, tested.open()
    assert language is not None
    rows = tested.dims[BATCH].nearest(ROWS)
    length = tested.dims[SEQUENCE].nearest(min(LENGTH, language.context or LENGTH))
    references = [Reference(tested.loaded, dtype) for dtype in (torch.float32, torch.float64)]
    for number, padding in enumerate((LEFT, RIGHT)):
        prompt = draw_prompt(language.vocabulary, rows, length, padding, seed + number)
        pooled = pooling_mask(prompt)
        given = {"input_ids": prompt.tokens, "attention_mask": prompt.mask, POOLING_MASK: pooled}
        got = session.run(tested.complete(given))[tested.output_names[0]]
        expected = [_alone(reference, prompt, pooled) for reference in references]
        sizes = {BATCH: rows, SEQUENCE: length}
        case = Case(f"prompts that are not pooled, {padding}", sizes, seed + number)
        add_compared(tested, parity, case, expected, got, tested.output_names[0])


def pooling_mask(prompt: Prompt) -> np.ndarray:
    """Return a mask (B, T) that leaves out the first tokens of each row, a third of the first."""
    counts = prompt.mask.sum(1) // np.arange(3, 3 + len(prompt.mask))
    return (prompt.mask.cumsum(1) > counts[:, None]).astype(np.int64)


def _alone(reference: Reference, prompt: Prompt, pooled: np.ndarray) -> np.ndarray:
    """Return the vector of each row, (B, width), run without padding."""
    found = []
    for ids, kept, own in zip(prompt.tokens, prompt.mask.astype(bool), pooled, strict=True):
        row, mask = torch.from_numpy(ids[kept][None]), torch.from_numpy(own[kept][None])
        [vector] = reference(((row, torch.ones_like(row), mask), {}))
        found.append(vector[0])
    return np.stack(found)
