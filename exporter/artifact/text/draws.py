"""One token of a large vocabulary, in a few passes of float32 over its logits.

    w_i = exp((x_i - max x) / temperature)        of logits x, (vocabulary,)
    P(i) = w_i / sum_j w_j                        over the tokens that are kept

A threshold is guessed from every 64th logit and then proven: what is above it is counted or summed
exactly, and only the few tokens near it are sorted. Weights are float32, which moves a probability
by 1e-6 of itself at most; their sums are float64, of blocks first. A draw is therefore that of
float64 unless its uniform number is that close to a boundary.
"""

from __future__ import annotations

import numpy as np

BLOCK = 512
"""Tokens whose weights are summed in float32 before float64 takes over."""

CACHED = 32 * BLOCK
"""Tokens that are worked on at a time, so that they are still in the cache for the next step."""

STRIDE = 64
"""Distance between the tokens that are looked at to guess a threshold."""

HEAD = 1024
"""Tokens among which the nucleus of a trained model usually ends."""


def largest(logits: np.ndarray, count: int) -> np.ndarray:
    """Return the tokens of the ``count`` largest logits, of equals the first, in ascending order.

    Args:
        logits: (vocabulary,).
        count: from 1 to the vocabulary.
    """
    near = _superset(logits, count)
    values = logits[near]
    smallest = np.partition(values, -count)[-count]
    kept = values > smallest
    equal = np.flatnonzero(values == smallest)
    kept[equal[: count - np.count_nonzero(kept)]] = True
    return near[kept]


def weights(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Return exp((x - max x) / temperature), (vocabulary,) float32."""
    found = np.empty(len(logits), np.float32)
    top = np.float32(logits.max())
    # Below the least normal number the argmax has all the weight anyway.
    scale = np.float32(1 / max(temperature, float(np.finfo(np.float32).tiny)))
    with np.errstate(over="ignore"):  # a difference beyond float32 has weight 0
        for start in range(0, len(logits), CACHED):
            part = found[start : start + CACHED]
            np.subtract(logits[start : start + CACHED], top, out=part, casting="same_kind")
            part *= scale
            np.exp(part, out=part)
    return found


def nucleus(w: np.ndarray, logits: np.ndarray, share: float) -> np.ndarray:
    """Return whether each token is in the nucleus, (vocabulary,) bool.

    The nucleus is the fewest tokens of the largest logits whose weights are ``share`` of all; of
    equal logits it has the first tokens.

    Args:
        w: weights of all tokens, (vocabulary,) float32.
        logits: of the same tokens.
        share: of the sum of all weights, above 0 and below 1.
    """
    total = float(_sums(w).sum())
    needed = share * total
    before, near = 0, _superset(logits, min(HEAD, len(logits)))
    already = 0.0
    if _sum(w[near]) < needed:
        before, already, near = _around_the_end(w, logits, near, total, needed)
    # A weight grows with its logit, so that those of the largest logits are the largest weights.
    reached = already + np.cumsum(np.sort(w[near])[::-1], dtype=np.float64)
    count = min(1 + int(np.searchsorted(reached, needed)), len(near))
    # The token that ends the nucleus is among those near its end, which alone are partitioned.
    last = np.partition(logits[near], -count)[-count]
    kept = logits > last
    missing = before + count - int(np.count_nonzero(kept))
    kept[np.flatnonzero(logits == last)[:missing]] = True
    return kept


def draw(w: np.ndarray, uniform: float) -> int:
    """Return the token at a share of the sum of all weights.

    Args:
        w: weights of all tokens, (vocabulary,) float32 or float64, at least one above 0.
        uniform: from 0 to below 1.
    """
    sums = np.cumsum(_sums(w))
    target = uniform * sums[-1]
    block = int(np.searchsorted(sums, target, side="right"))
    start = BLOCK * block
    inside = np.cumsum(w[start : start + BLOCK], dtype=np.float64)
    # The sum of a block may have been rounded to above that of its tokens in turn: the last of
    # these that has a weight is then the one.
    target = min(target - (sums[block - 1] if block else 0.0), np.nextafter(inside[-1], 0))
    return start + int(np.searchsorted(inside, target, side="right"))


def _superset(logits: np.ndarray, count: int) -> np.ndarray:
    """Return some tokens that hold the ``count`` of the largest logits, ascending.

    They are all whose logits reach the one that is expected to have enough above it, by four
    standard deviations of its rank among those looked at; the whole vocabulary where they do not.
    """
    seen = np.sort(logits[::STRIDE])
    rank = count // STRIDE
    rank += 8 + 4 * int(rank**0.5)
    if rank < len(seen):
        found = np.flatnonzero(logits >= seen[-rank])
        if len(found) >= count:
            return found
    return np.arange(len(logits))


def _around_the_end(
    w: np.ndarray, logits: np.ndarray, head: np.ndarray, total: float, needed: float
) -> tuple[int, float, np.ndarray]:
    """Return how many tokens are surely in the nucleus, their sum, and those among which it ends.

    Args:
        w: weights of all tokens.
        logits: of all tokens.
        head: the tokens of the largest logits, whose weights are less than needed together.
        total: the sum of all weights.
        needed: the sum of the nucleus.
    """
    # What the head lacks is a known part of what all others have. None of these is large, so those
    # looked at tell how many of them make up that part.
    seen = w[::STRIDE]
    seen = np.sort(seen[logits[::STRIDE] < logits[head].min()])[::-1]
    reached, of_head = np.cumsum(seen, dtype=np.float64), _sum(w[head])
    lacking = (needed - of_head) / (total - of_head)
    rank = int(np.searchsorted(reached, lacking * reached[-1])) if len(seen) else 0
    margin = 8 + 3 * int(rank**0.5)
    surely = w >= (seen[rank - margin] if rank >= margin else w[head].min())
    possible = w >= (seen[rank + margin] if rank + margin < len(seen) else 0)
    already = _sum_within(w, surely)
    near = np.flatnonzero(possible ^ surely)
    if already < needed <= already + _sum(w[near]):
        return int(np.count_nonzero(surely)), already, near
    return 0, 0.0, np.arange(len(w))


def _sums(w: np.ndarray) -> np.ndarray:
    """Return the sum of each block, float64."""
    whole = len(w) // BLOCK * BLOCK
    sums = w[:whole].reshape(-1, BLOCK) @ np.ones(BLOCK, w.dtype)
    return np.append(sums, w[whole:].sum()).astype(np.float64)


def _sum_within(w: np.ndarray, mask: np.ndarray) -> float:
    """Return the sum of the weights that a mask (vocabulary,) has, in a buffer of the cache."""
    found, buffer = 0.0, np.empty(CACHED, w.dtype)
    for start in range(0, len(w), CACHED):
        part = w[start : start + CACHED]
        within = np.multiply(part, mask[start : start + CACHED], out=buffer[: len(part)])
        found += float(_sums(within).sum())
    return found


def _sum(w: np.ndarray) -> float:
    return float(w.sum(dtype=np.float64))
