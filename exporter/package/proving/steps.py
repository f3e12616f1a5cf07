"""Greedy texts of a model that is called with its states: prompts padded on the left."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from linexport.artifact.text.language_interface import language_interface
from linexport.graph.states import State
from linexport.manifest import Manifest
from linexport.package.destination import BatchPrompts

Call = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
"""Runs the model: outputs by name for inputs by name, states among both."""


def write_by_steps(call: Call, manifest: Manifest, prompts: BatchPrompts) -> list[list[int]]:
    """Return the text of each prompt of a batch.

    Args:
        call: runs the model.
        manifest: of it, with the names that it has there.
        prompts: of one length where the model has no mask.
    """
    names, batch = language_interface(manifest), len(prompts.rows)
    longest = max(map(len, prompts.rows))
    ids = np.full((batch, longest), prompts.padding, np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts.rows):
        ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
    states = [State.from_record(s) for s in manifest.states]
    held = {s.past: s.start(batch) for s in states}
    texts: list[list[int]] = [[] for _ in prompts.rows]
    for _ in range(prompts.tokens):
        fed = {names.tokens: ids, **({names.mask: mask} if names.mask else {})}
        outputs = call({**fed, **held})
        held = {s.past: outputs[s.present] for s in states}
        ids = outputs[names.logits][:, -1:].argmax(-1)
        mask = np.ones_like(ids)
        for text, token in zip(texts, ids[:, 0], strict=True):
            text.append(int(token))
    return texts
