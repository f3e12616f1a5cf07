"""Compare the hidden states that a language model gives with those that its head is given.

    logits = W h        W: the original's

The logits are compared with the original's elsewhere. If the product of W and h gives them, h is
the original's h, as far as W distinguishes hidden states. The original is not run again: a router's
choice at a near tie would be another one, see ``near_ties``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from linexport.parity.check import ModelUnderTest
from linexport.parity.compare import Comparison, compare_arrays
from linexport.parity.language.prompts import LEFT, NONE, draw_prompt

CASES = ((1, (1,)), (1, (131,)), (3, (37, 1, 1, 64, 1)))
"""Rows, and lengths of the pieces that a sequence is fed in."""


def check_hidden(tested: ModelUnderTest, hidden: str, seed: int = 0) -> Comparison:
    """Return the largest difference of logits from the product.

    Args:
        tested: a language model.
        hidden: name of its output.
        seed: of the tokens.
    """
    language, session = tested.loaded.language, tested.open()
    original: Any = tested.loaded.module
    assert language is not None
    found = []
    for number, (rows, pieces) in enumerate(CASES):
        padding = NONE if rows == 1 else LEFT
        prompt = draw_prompt(language.vocabulary, rows, sum(pieces), padding, seed + number)
        state, start = tested.initial_state(rows), 0
        for size in pieces:
            fed = tested.complete(prompt.part(start, start + size))
            outputs = session.run({**fed, **state})
            state = {s.past: outputs[s.present] for s in tested.states}
            start += size
            with torch.no_grad():
                given = torch.from_numpy(np.asarray(outputs[hidden]))
                product = original.of_hidden_states(given).numpy()
            logits = np.asarray(outputs[tested.output_names[0]])
            found.append(compare_arrays(product, logits, tested.tolerance))
    return max(found, key=lambda one: (not one.passed, one.max_relative_error))
