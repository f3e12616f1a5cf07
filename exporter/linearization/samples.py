"""Queries and keys that sites see on the calibration data: what maps and memories are fitted to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from linexport.linearization.calibration import Rows
from linexport.linearization.find_softmax import Site, run
from linexport.models.softmax_calls import Attending, Call

MAX_ROWS = 4096
"""Rows of a head that are kept, drawn evenly."""

Array = NDArray[np.float64]


@dataclass
class SiteSamples:
    """Queries and keys of one site, sampled from calibration data.

    Attributes:
        queries: (H, n, d), times scale sqrt(d), as they reach a feature map.
        keys: (H_kv, n', d).
        memory: keys (H_kv, S, d) and values (H_kv, S, d_v) of the first row.
    """

    queries: Array
    keys: Array
    memory: tuple[Array, Array]


@dataclass
class _Seen:
    queries: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    memory: tuple[Tensor, Tensor] | None = None


def sample(
    module: nn.Module, batches: Iterable[Rows], sites: Iterable[Site], seed: int
) -> dict[int, SiteSamples]:
    """SiteSamples of every site, by its index."""
    by_index = {site.index: site for site in sites}
    seen: dict[int, _Seen] = {index: _Seen() for index in by_index}
    generator = torch.Generator().manual_seed(seed)

    def answer(index: int, call: Call) -> Tensor:
        if index in by_index:
            site, found = by_index[index], seen[index]
            factor = site.scale * site.head_dim**0.5
            found.queries.append(_some(call.query * factor, generator))
            if found.memory is None:
                found.memory = (call.key[0].double(), call.value[0].double())
            if not site.memory:
                found.keys.append(_some(call.key, generator))
        return call.softmax()

    with torch.no_grad():
        for batch in batches:
            with Attending(answer):
                run(module, batch)
    return {index: _samples(found, generator) for index, found in seen.items()}


def _samples(seen: _Seen, generator: torch.Generator) -> SiteSamples:
    assert seen.memory is not None
    keys = [*seen.keys] or [seen.memory[0]]
    return SiteSamples(
        _thinned(torch.cat(seen.queries, 1), generator).numpy(),
        _thinned(torch.cat(keys, 1), generator).numpy(),
        (seen.memory[0].numpy(), seen.memory[1].numpy()),
    )


def _some(x: Tensor, generator: torch.Generator) -> Tensor:
    """(B, H, T, d) as (H, n, d), n at most ``MAX_ROWS``."""
    return _thinned(x.detach().double().transpose(0, 1).flatten(1, 2), generator)


def _thinned(x: Tensor, generator: torch.Generator) -> Tensor:
    if x.shape[1] <= MAX_ROWS:
        return x
    return x[:, torch.randperm(x.shape[1], generator=generator)[:MAX_ROWS]]
