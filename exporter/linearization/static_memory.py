"""Sites whose keys and values never change: pseudo-keys in place of all of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from linexport.errors import UsageError
from linexport.linearization.find_softmax import Site
from linexport.linearization.forms import MemoryAttention
from linexport.linearization.samples import SiteSamples
from linexport.models.static_memory import PseudoMemory, StaticMemory, fit_pseudo_keys

SHARE = 16
"""Keys that one pseudo-key stands for, by default: 4,096 rows become 256."""


@dataclass(frozen=True)
class MemoryErrors:
    """Pseudo-keys of a memory, and its errors; see ``AttentionRow``."""

    pseudo_keys: int
    held_out_error: float
    mean_of_values_error: float


def fit_memory(
    site: Site, samples: SiteSamples, count: int | None, seed: int
) -> tuple[MemoryAttention, MemoryErrors]:
    """The fitted form and its errors: on held-out queries, and of answering the mean of V.

    Errors are root mean squares over the heads.

    Raises:
        UsageError: it does not beat the mean of V on queries that it was not fitted to, or the fit
            is not possible; see ``fit_pseudo_keys``.
    """
    count = count or max(1, site.keys // SHARE)
    keys, values = samples.memory
    group = site.heads // site.kv_heads
    # Queries are times scale sqrt(d) already; a memory's scale is that of raw queries.
    queries = samples.queries / (site.scale * site.head_dim**0.5)
    heads = [
        fit_pseudo_keys(
            queries[head],
            keys[head // group],
            values[head // group],
            count,
            scale=site.scale,
            seed=seed,
        )
        for head in range(site.heads)
    ]
    errors = MemoryErrors(count, _rms(heads, "held_out_error"), _rms(heads, "baseline_error"))
    if errors.held_out_error >= errors.mean_of_values_error:
        raise UsageError(
            f"{count} pseudo-keys for {site.keys} keys have an error of "
            f"{errors.held_out_error:.3f} on held-out queries, and answering the mean of the "
            f"values every time has {errors.mean_of_values_error:.3f}: they are of no use. Ask "
            "for more pseudo-keys, or give more varied calibration data."
        )
    return MemoryAttention(StaticMemory(heads)), errors


def _rms(heads: list[PseudoMemory], name: str) -> float:
    return float(np.sqrt(np.mean([getattr(head.fit, name) ** 2 for head in heads])))
