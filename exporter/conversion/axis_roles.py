"""Which dimension is the batch, by the states that a model was found to have.

    x (T, B, C)    called (batch, seq, C) by its place    states (seq, ...)  ->  (seq, batch, C)

Tracing takes the first axis for the batch. A state has a row for each sequence, so its first axis
is the batch wherever the inputs have it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx

from linexport.conversion.stages import TracedOriginal
from linexport.graph.dims import DimRange, merge
from linexport.manifest.records import StateRecord
from linexport.trace import Traced
from linexport.trace.dim_names import own_names

BATCH, SEQUENCE = "batch", "seq"
"""Names that tracing gives the first two axes where the user gives none."""


def corrected(
    original: TracedOriginal, states: Sequence[StateRecord], ranges: Mapping[str, DimRange]
) -> TracedOriginal | None:
    """Return the original with its dimensions as the states have them; None if they are right.

    Args:
        original: as it was traced.
        states: that were found in it.
        ranges: the user's, by name.
    """
    batch = next((d for s in states for d in s.shape[:1] if isinstance(d, str)), "")
    known = original.traced.dims
    if batch not in known or known[batch].batch:
        return None
    dims = {n: replace(limits, batch=n == batch) for n, limits in known.items()}
    traced = replace(original.traced, dims=dims)
    if batch == SEQUENCE and BATCH in dims and not _named(original):
        traced = _swapped(traced)
    return replace(original, traced=traced, dims=merge(traced.dims, ranges))


def _named(original: TracedOriginal) -> bool:
    """Return whether a user or a file has named dimensions."""
    loaded = original.loaded
    return loaded.graph is not None or bool(own_names(loaded.dynamic_shapes))


def _swapped(traced: Traced) -> Traced:
    names = {BATCH: SEQUENCE, SEQUENCE: BATCH}
    words = re.compile(rf"\b({BATCH}|{SEQUENCE})\b")
    graph = onnx.ModelProto()
    graph.CopyFrom(traced.graph)
    inner = graph.graph
    for value in [*inner.input, *inner.output, *inner.value_info]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = words.sub(lambda found: names[found[0]], dim.dim_param)
    return replace(
        traced,
        graph=graph,
        dims={names.get(n, n): limits for n, limits in traced.dims.items()},
        example_sizes={names.get(n, n): size for n, size in traced.example_sizes.items()},
    )
