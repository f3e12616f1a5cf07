"""Parts that the loops over chunks of ``linear`` and ``parts`` have in common.

Both are given a ``TokenSegment`` and a ``Spec``, named tuples of values and of constants.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from linexport.plugins.kernels.sources.feature_functions import HeadFeatures
from linexport.plugins.kernels.sources.tiles import load_keep, store_rows


class Spec(NamedTuple):
    """Constants of a node and a tile.

    Attributes:
        GROUP: query heads that share a state.
        OUT: heads of the output.
        QUERIES, KEYS, VALUES, OUTPUTS: elements of a token.
        PAIRS: the map multiplies components: scores are ``kappa``, features are float32.
    """

    HEADS: int
    QUERY_HEADS: int
    GROUP: int
    OUT: int
    WIDTH: int
    D_K: int
    D_V: int
    QUERIES: int
    KEYS: int
    VALUES: int
    OUTPUTS: int
    DECAYS: int
    NORMALIZE: bool
    SCALE: float
    EPS: float
    PRECISION: str
    PAIRS: bool
    phi: HeadFeatures
    BLOCK_K: int
    BLOCK_V: int
    CHUNK: int


class TokenSegment(NamedTuple):
    """Pointers to the first token or chunk of a segment, None where absent, and its extent.

    Attributes:
        h: head of the state.
        columns_k: of all of d_k.
        columns_v: of the block.
        chunks: of the whole sequence.
        rows: of a chunk.
        tokens: of the segment; its last chunk may be shorter than CHUNK.
    """

    query: Any
    key: Any
    value: Any
    decay: Any
    key_mask: Any
    parameter: Any
    channel_scores: Any
    query_from_start: Any
    key_from_start: Any
    key_to_end: Any
    chunk_decays: Any
    inverses: Any
    output: Any
    h: Any
    columns_k: Any
    columns_v: Any
    chunks: Any
    rows: Any
    tokens: Any


@triton.jit
def tokens_of(segment, start):
    """Where the chunk at ``start`` begins, which of its rows are tokens, and which not padded."""
    offset = tl.cast(start, tl.int64)
    live = start + segment.rows < segment.tokens
    keep = load_keep(segment.key_mask + offset if segment.key_mask is not None else None, live)
    return offset, live, keep


@triton.jit
def queries_of(segment, offset, g, spec):
    """Pointer to the queries of head ``g`` of those that share the state."""
    head = (segment.h * spec.GROUP + g) * spec.QUERY_HEADS // spec.OUT
    return segment.query + offset * spec.QUERIES + head * spec.WIDTH


@triton.jit
def store_output(segment, offset, g, o, live, spec):
    """Write the output of head ``g`` of those that share the state."""
    place = segment.output + offset * spec.OUTPUTS + (segment.h * spec.GROUP + g) * spec.D_V
    store_rows(place, o, live, segment.columns_v, spec.OUTPUTS, spec.D_V)
