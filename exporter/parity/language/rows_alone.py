"""The rows of a padded prompt, each run alone: what an artifact gives for them in a batch.

    [x x x x x]      run(x x x x x)
    [. . x x x]  ->  run(x x x)
    [. . . . x]      run(x)

The original is not run on the batch, as a library's own padded rows may differ: transformers zeroes
padding before a projection whose bias then enters a convolution, or ignores the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from linexport.parity.language.prompts import Prompt
from linexport.parity.reference.module import Reference
from linexport.system import memory

__all__ = ["as_batch", "as_rows", "choices_by_row", "run_alone", "run_batch"]


def run_batch(reference: Reference, prompt: Prompt) -> np.ndarray:
    """Return the original's outputs for a prompt as it is, with its padding."""
    given = torch.from_numpy(prompt.tokens), torch.from_numpy(prompt.mask)
    [outputs] = reference((given, {}))
    return outputs


def run_alone(run: Callable[[Prompt], np.ndarray], prompt: Prompt) -> np.ndarray:
    """Return outputs (tokens, width) of a prompt's rows, without padding; large ones are mapped.

    Args:
        run: gives outputs (B, T, width) of a prompt without padding, or (B, width) of sequences.
        prompt: what is run.
    """
    parts = []
    for row in prompt.rows():
        outputs = run(row)
        outputs = outputs.reshape(-1, outputs.shape[-1])
        if not memory.is_memory_mapped(outputs.ctypes.data):
            [outputs] = memory.memory_mapped([outputs])
        parts.append(outputs)
        memory.trim_memory()
    return parts[0] if len(parts) == 1 else _joined(parts)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate along the first axis; a large result is memory-mapped."""
    shape, dtype = (sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype
    size = int(np.prod(shape)) * dtype.itemsize
    if size < memory.MIN_MMAP_BYTES:
        return np.concatenate(parts)
    [block] = memory.blocks([size])
    return np.concatenate(parts, out=block.view(dtype).reshape(shape))


def as_rows(values: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    """Return values (B, T, ...) row by row without padding, (1, n, ...) each.

    Without padding they are returned as they are, as rows are run together then.
    """
    if mask.all():
        return [values]
    return [row[real][None] for row, real in zip(values, mask.astype(bool), strict=True)]


def as_batch(rows: Sequence[np.ndarray], mask: np.ndarray) -> np.ndarray:
    """Return outputs of rows run alone, (1, n, ...) each, as those of a batch (B, T, ...).

    Padding has outputs of its row's first or last token: numbers that must not matter. Outputs of
    whole sequences, (1, width) each, become (B, width).
    """
    if mask.all():
        return rows[0]
    if rows[0].ndim == mask.ndim:
        return np.concatenate(rows)
    places = [np.cumsum(row).clip(1) - 1 for row in mask]
    return np.stack([row[0][place] for row, place in zip(rows, places, strict=True)])


def choices_by_row(choices: Sequence[np.ndarray], prompt: Prompt) -> list[np.ndarray]:
    """Return choices of an artifact in the order in which rows that are run alone make them.

    Args:
        choices: of all rows together, (B, T, ..., k) or (B * T, k); others are left out.
        prompt: what they were made for.
    """
    if prompt.mask.all():
        return list(choices)
    batch, length = prompt.mask.shape
    whole = [c for c in choices if c.size and c.size % (batch * length * c.shape[-1]) == 0]
    by_token = [c.reshape(batch, length, -1, c.shape[-1]) for c in whole]
    kept = prompt.mask.astype(bool)
    return [np.ascontiguousarray(c[row][kept[row]]) for row in range(batch) for c in by_token]
