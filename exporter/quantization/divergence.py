"""Divergence of a language model's next-token distributions from those of another.

    KL(p || q) = sum_v p_v (log p_v - log q_v)     at each position, in nats, in float64

with p of the float32 model and q of the quantised one. Positions are grouped, since the errors of
a recurrence can compound along the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from linexport.manifest.quantisation import PositionDivergence, TokenDivergenceRecord

QUANTILES = (0.5, 0.99, 0.999)
RANGES = ((0, 64), (64, 512), (512, 4096))
"""Positions that are reported together."""

AT_ONCE = 2**18
"""Logits compared at once: in float64 they are in memory several times over."""

Values = NDArray[np.float64]


def log_softmax(logits: NDArray) -> Values:
    """Logarithms of probabilities over the last axis, float64."""
    exact = logits.astype(np.float64)
    exact -= exact.max(-1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(-1, keepdims=True))


@dataclass(frozen=True)
class ComparedLogits:
    """Logits of some positions of a window.

    Attributes:
        positions: (t,), rising.
        reference, other: (t, V).
    """

    positions: NDArray[np.int64]
    reference: NDArray
    other: NDArray


def compare(
    windows: Iterable[tuple[NDArray, Iterable[ComparedLogits]]],
) -> TokenDivergenceRecord:
    """Compare windows of text.

    Args:
        windows: for each, its tokens (T,), and logits of positions that follow one another.

    Raises:
        ValueError: no windows are given.
    """
    columns: tuple[list[Values], ...] = ([], [], [], [])
    places: list[NDArray[np.int64]] = []
    for tokens, pieces in windows:
        parts, positions = [], []
        for piece in pieces:
            for at in _blocks(*piece.reference.shape):
                own = piece.positions[at]
                following = tokens[own[own + 1 < len(tokens)] + 1]
                parts.append(_position_values(following, piece.reference[at], piece.other[at]))
                positions.append(own)
        found = [np.concatenate(own) for own in zip(*parts, strict=True)]
        for column, values in zip(columns, found, strict=True):
            column.append(values)
        places.append(np.concatenate(positions))
    divergences, tops, likelihoods, gains = columns
    if not divergences:
        raise ValueError("expected at least one window of text")
    joined = np.concatenate(divergences)
    reference_loss = float(np.concatenate(likelihoods).mean())
    gain = float(np.concatenate(gains).mean())
    median, p99, p999 = (float(x) for x in np.quantile(joined, QUANTILES))
    spread = _standard_error([float(g.mean()) for g in gains])
    return TokenDivergenceRecord(
        len(joined),
        len(divergences),
        float(joined.mean()),
        _standard_error([float(d.mean()) for d in divergences]),
        median,
        p99,
        p999,
        float(joined.max()),
        float(np.concatenate(tops).mean()),
        float(np.exp(reference_loss + gain)),
        float(np.exp(reference_loss)),
        float(np.exp(gain)),
        None if spread is None else float(np.exp(gain)) * spread,
        tuple(_by_position(places, divergences)),
    )


def _blocks(positions: int, vocabulary: int) -> Iterable[slice]:
    """Return the places of positions that are compared at once."""
    size = max(1, AT_ONCE // vocabulary)
    starts = range(0, positions, size)
    return (slice(start, min(start + size, positions)) for start in starts)


def _position_values(
    next_tokens: NDArray, reference: NDArray, other: NDArray
) -> tuple[Values, ...]:
    """Return divergence and equal top tokens (t,); loss and its gain (t or t - 1,).

    The last position of a window has no next token.
    """
    p, q = log_softmax(reference), log_softmax(other)
    divergence = np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0)
    place = (np.arange(len(next_tokens)), next_tokens)
    return divergence, p.argmax(-1) == q.argmax(-1), -p[place], p[place] - q[place]


def _by_position(
    places: Sequence[NDArray[np.int64]], divergences: Sequence[Values]
) -> Iterable[PositionDivergence]:
    for first, last in RANGES:
        both = zip(places, divergences, strict=True)
        inside = [d[(first <= at) & (at < last)] for at, d in both]
        inside = [d for d in inside if len(d)]
        if inside:
            means = [float(d.mean()) for d in inside]
            mean = float(np.concatenate(inside).mean())
            yield PositionDivergence(first, last, mean, _standard_error(means))


def _standard_error(means: Sequence[float]) -> float | None:
    """Standard error of the mean of independent values; None for a single one."""
    if len(means) < 2:
        return None
    return float(np.std(means, ddof=1) / np.sqrt(len(means)))
