"""Divergence of a language model's next-token distributions from those of another.

    KL(p || q) = sum_v p_v (log p_v - log q_v)     at each position, in nats, in float64

with p of the float32 model and q of the quantised one. Positions are grouped, since the errors of
a recurrence can compound along the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from linexport.manifest.quantisation import PositionDivergence, TokenDivergenceRecord

QUANTILES = (0.5, 0.99, 0.999)
RANGES = ((0, 64), (64, 512), (512, 4096))
"""Positions that are reported together."""

Values = NDArray[np.float64]


def log_softmax(logits: NDArray) -> Values:
    """Logarithms of probabilities over the last axis, float64."""
    exact = logits.astype(np.float64)
    exact -= exact.max(-1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(-1, keepdims=True))


def compare(pairs: Iterable[tuple[NDArray, NDArray, NDArray]]) -> TokenDivergenceRecord:
    """Compare windows of text.

    Args:
        pairs: for each window, its tokens (T,), the reference's logits (T, V) and the other's.

    Raises:
        ValueError: there is no window.
    """
    divergences, tops, gains, likelihoods = [], [], [], []
    for tokens, reference, other in pairs:
        p, q = log_softmax(reference), log_softmax(other)
        divergences.append(np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0))
        tops.append(p.argmax(-1) == q.argmax(-1))
        place = (np.arange(len(tokens) - 1), tokens[1:])
        likelihoods.append(-p[:-1][place])
        gains.append(p[:-1][place] - q[:-1][place])
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
        tuple(_by_position(divergences)),
    )


def _by_position(divergences: Sequence[Values]) -> Iterable[PositionDivergence]:
    for first, last in RANGES:
        inside = [d[first:last] for d in divergences if len(d) > first]
        if inside:
            means = [float(d.mean()) for d in inside]
            mean = float(np.concatenate(inside).mean())
            yield PositionDivergence(first, last, mean, _standard_error(means))


def _standard_error(means: Sequence[float]) -> float | None:
    """Standard error of the mean of independent values; None for a single one."""
    if len(means) < 2:
        return None
    return float(np.std(means, ddof=1) / np.sqrt(len(means)))
