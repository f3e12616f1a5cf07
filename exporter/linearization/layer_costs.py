"""Time and state of one attention call alone, in softmax or in a linear form, by length.

Each is exported as an artifact has it and run by ONNX Runtime with the CPU library, queries, keys
and values given. Bytes of states are those of the exported graph. A length at which a call would
take too long or too much memory is computed from shorter ones:

    softmax        a n + b n^2 through the two longest that were measured
    linear form    a n through the longest
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from linexport import passes, targets, trace
from linexport.graph.states import find_states
from linexport.linearization.find_softmax import Site
from linexport.linearization.forms import KernelAttention, pack
from linexport.manifest.linearization_records import AttentionCost, AttentionTime
from linexport.models.softmax_calls import Call
from linexport.sources.loaded_model import LoadedModel, Source
from linexport.system import room
from linexport.timing.export import TARGET, export
from linexport.timing.latency import Settings, interleaved

EXAMPLE = (2, 24)
"""Rows and tokens that a call is traced with."""

LONGEST = 3.0
"""Seconds of one call; longer ones are computed."""

HELD = 4
"""Matrices of scores that softmax attention has in memory at once."""

_SETTINGS = Settings(warmup=1, repeats=5, seconds=1.0, patience=2.0)


@dataclass(frozen=True)
class CallShape:
    """Sizes of a call that its cost depends on."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    causal: bool
    keys: int | None

    @staticmethod
    def of(site: Site) -> CallShape:
        """Return that of a site; ``keys`` where these are of another sequence."""
        sizes = (site.heads, site.kv_heads, site.head_dim, site.value_dim)
        return CallShape(*sizes, site.scale, site.causal, site.keys if site.cross else None)

    def __str__(self) -> str:
        kind = "causal" if self.causal else "bidirectional" if self.keys is None else "cross"
        return f"{self.heads}/{self.kv_heads} heads of {self.head_dim}/{self.value_dim}, {kind}"


class CallAlone(nn.Module):
    """One call of attention, of packed queries, keys and values (B, T, heads * width)."""

    def __init__(self, shape: CallShape, form: nn.Module | None) -> None:
        super().__init__()
        self.shape, self.form = shape, form

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(B, T, heads * value_dim)."""
        shape = self.shape
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        q, k, v = (
            x.unflatten(-1, (count, -1)).transpose(1, 2)
            for x, count in zip((query, key, value), heads, strict=True)
        )
        grouped = shape.heads != shape.kv_heads
        call = Call(q, k, v, None, 0.0, shape.causal, shape.scale, grouped)
        return pack(call.softmax() if self.form is None else self.form(call))


def measure(
    shape: CallShape, form: KernelAttention | None, lengths: Sequence[int], threads: int
) -> AttentionCost:
    """Measure one call at every length; None in place of a form is softmax attention.

    Raises:
        LinexportError: it does not export.
    """
    traced = trace.trace(_loaded(shape, form))
    sized = passes.rewrite(traced.graph, weights=traced.weights).model
    states = sum(s.start(1).nbytes for s in find_states(sized)) if shape.causal else 0
    growing = 0
    if form is None and shape.causal:
        growing = 4 * shape.kv_heads * (shape.head_dim + shape.value_dim)
    with tempfile.TemporaryDirectory() as place:
        path = export(traced, Path(place) / "call")
        session = targets.find_target(TARGET).open(path, threads=threads, native=True)
        found: list[AttentionTime] = []
        settings = replace(_SETTINGS, threads=threads)
        for length in sorted(lengths):
            expected = _computed(found, length, form is None)
            if expected is not None and (
                expected > 1e3 * LONGEST or not _fits(shape, form, length)
            ):
                found.append(AttentionTime(length, expected, computed=True))
                continue
            fed = _feeds(shape, length)
            times = interleaved({"call": partial(session.run, fed)}, settings)["call"]
            found.append(AttentionTime(length, round(float(np.median(times)), 4)))
    return AttentionCost(tuple(found), states, growing)


def _computed(found: Sequence[AttentionTime], length: int, softmax: bool) -> float | None:
    """Milliseconds at a longer length, from those measured; None where there are none."""
    measured = [row for row in found if not row.computed]
    if not measured:
        return None
    last = measured[-1]
    if not softmax:
        return last.milliseconds * length / last.length
    linear, square = 0.0, last.milliseconds / last.length**2
    if len(measured) > 1:
        a, b = measured[-2:]
        rates = (a.milliseconds / a.length, b.milliseconds / b.length)
        square = (rates[1] - rates[0]) / (b.length - a.length)
        square = min(max(square, 0.0), last.milliseconds / last.length**2)
        linear = rates[1] - square * b.length
    return round(linear * length + square * length**2, 4)


def _fits(shape: CallShape, form: nn.Module | None, length: int) -> bool:
    """There is memory for the scores of softmax attention."""
    free = room.available_memory()
    needed = 4 * HELD * shape.heads * length * (shape.keys or length)
    return form is not None or free is None or needed < free / 2


def _loaded(shape: CallShape, form: nn.Module | None) -> LoadedModel:
    rows, tokens = EXAMPLE
    args = tuple(torch.from_numpy(x) for x in _feeds(shape, tokens, rows).values())
    batch, length = Dim("batch"), Dim("seq")
    own = {0: batch, 1: length}
    of_keys = own if shape.keys is None else {0: batch}
    source = Source("object", "attention", None, f"attention, {shape}")
    module = CallAlone(shape, form).eval()
    return LoadedModel(module, args, {}, (own, of_keys, of_keys), source)


def _feeds(shape: CallShape, length: int, rows: int = 1) -> dict[str, np.ndarray]:
    widths: Mapping[str, tuple[int, int]] = {
        "query": (length, shape.heads * shape.head_dim),
        "key": (shape.keys or length, shape.kv_heads * shape.head_dim),
        "value": (shape.keys or length, shape.kv_heads * shape.value_dim),
    }
    generator = np.random.default_rng(0)
    return {
        name: generator.standard_normal((rows, *sizes), np.float32)
        for name, sizes in widths.items()
    }
