"""Which dimension is the batch, by the states and the fused ops that a model was found to have.

    x (T, B, C)    called (batch, seq, C) by its place    states (seq, ...)  ->  (seq, batch, C)

Tracing takes the first axis for the batch. A state has a row for each sequence, so its first axis
is the batch wherever the inputs have it. Of a model without states, such as a bidirectional one,
what the fused ops take for tokens is not the batch: the other dimension is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx

from linexport.conversion.context import TracedOriginal
from linexport.graph.dims import DimRange, merge
from linexport.manifest.records import StateRecord
from linexport.trace import Traced
from linexport.trace.dim_names import own_dims

BATCH, SEQUENCE = "batch", "seq"
"""Names that tracing gives the first two axes where the user gives none."""


def corrected(
    original: TracedOriginal,
    states: Sequence[StateRecord],
    lengths: frozenset[str],
    ranges: Mapping[str, DimRange],
) -> TracedOriginal | None:
    """Return the original with its dimensions as states and ops have them; None if they are right.

    Args:
        original: as it was traced.
        states: that were found in it.
        lengths: dynamic sizes of what its ops take for tokens.
        ranges: the user's, by name.
    """
    known = original.traced.dims
    batch = next((d for s in states for d in s.shape[:1] if isinstance(d, str)), "")
    batch = batch or _other(known, lengths)
    if batch not in known or known[batch].batch:
        return None
    dims = {n: replace(limits, batch=n == batch) for n, limits in known.items()}
    traced = replace(original.traced, dims=dims)
    if batch == SEQUENCE and BATCH in dims and not _named(original):
        traced = _swapped(traced)
    return replace(original, traced=traced, dims=merge(traced.dims, ranges))


def _other(known: Mapping[str, DimRange], lengths: frozenset[str]) -> str:
    """Return the one dimension other than that of all tokens; "" where there is not one of each."""
    others = known.keys() - lengths
    return others.pop() if len(others) == len(lengths) == 1 and lengths <= known.keys() else ""


def _named(original: TracedOriginal) -> bool:
    """Return whether a user or a file has named dimensions."""
    loaded = original.loaded
    return loaded.graph is not None or bool(own_dims(loaded.dynamic_shapes))


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
