"""Real time of feed-forward layers in ONNX Runtime, before and after: multiply-adds do not say.

Both are exported alike and called in turns. A layer pays at a number of rows if it takes less time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from linexport import targets, trace
from linexport.graph.interface import input_records
from linexport.manifest.linearization_records import FeedForwardTimes
from linexport.models.feed_forward import ACTIVATIONS
from linexport.sources.loaded_model import LoadedModel, Source
from linexport.timing.export import TARGET, export
from linexport.timing.latency import Settings, interleaved

ROWS = (1, 64, 1024)
"""A decode step, a short text and a long one, or so many pixels or points."""

_EXAMPLE = 16


class Before(nn.Module):
    """A linear layer, its activation, and the linear layer after it where that is folded in."""

    def __init__(self, linear: nn.Linear, activation: str, following: nn.Linear | None) -> None:
        super().__init__()
        self.linear, self.following = linear, following
        self.function = ACTIVATIONS[activation].function

    def forward(self, x: Tensor) -> Tensor:
        """(rows, out) of (rows, d)."""
        y: Tensor = self.function(self.linear(x))
        return y if self.following is None else self.following(y)


def feed_forward_times(
    before: Before, layer: nn.Module, x: Tensor, threads: int
) -> tuple[FeedForwardTimes, ...]:
    """Median milliseconds of both at each number of ``ROWS``.

    Args:
        before: what is replaced.
        layer: what replaces it.
        x: rows of its input, (n, d).
        threads: of ONNX Runtime, 0 for its own choice.

    Raises:
        LinexportError: one of them does not export.
    """
    rows = x.detach().float().cpu()
    rows = rows.repeat(-(-max(ROWS) // len(rows)), 1)
    with tempfile.TemporaryDirectory() as folder:
        calls = {
            name: _opened(module, rows[:_EXAMPLE], Path(folder) / name, threads)
            for name, module in (("before_ms", before), ("after_ms", layer))
        }
        return tuple(_timed(calls, rows[:count], threads) for count in ROWS)


def _timed(
    calls: dict[str, Callable[[np.ndarray], object]], rows: Tensor, threads: int
) -> FeedForwardTimes:
    settings = Settings(warmup=2, repeats=9, seconds=0.3, threads=threads, lead_in=2)
    fed = {name: partial(call, rows.numpy()) for name, call in calls.items()}
    took = interleaved(fed, settings)
    medians = {name: round(float(np.median(found)), 5) for name, found in took.items()}
    return FeedForwardTimes(len(rows), **medians)


def _opened(
    module: nn.Module, example: Tensor, folder: Path, threads: int
) -> Callable[[np.ndarray], object]:
    loaded = LoadedModel(
        module=module.eval(),
        args=(example,),
        kwargs={},
        dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
        source=Source("module", type(module).__qualname__, None, type(module).__name__),
    )
    traced = trace.trace(loaded)
    (given,) = input_records(traced.graph.graph.input)
    path = export(traced, folder)
    session = targets.find_target(TARGET).open(path, threads=threads, taking_turns=True)
    return lambda rows: session.run({given.name: rows})
