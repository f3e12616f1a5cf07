"""Divergence of next-token distributions against its definition, and bits chosen by it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from linexport.quantization import divergence
from linexport.quantization.allocate import StorageOption, allocations
from linexport.quantization.divergence import ComparedLogits, compare


def by_definition(reference: np.ndarray, other: np.ndarray) -> list[float]:
    """KL(p || q) of each position, with Python's own numbers."""
    found = []
    for a, b in zip(reference.tolist(), other.tolist(), strict=True):
        p = [math.exp(x - max(a)) for x in a]
        q = [math.exp(x - max(b)) for x in b]
        p, q = [x / math.fsum(p) for x in p], [x / math.fsum(q) for x in q]
        found.append(math.fsum(x * math.log(x / y) for x, y in zip(p, q, strict=True)))
    return found


def windows(
    count: int, length: int, noise: float
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    found = []
    for _ in range(count):
        logits = random.standard_normal((length, 11)) * 3
        other = logits + noise * random.standard_normal(logits.shape)
        tokens = random.integers(11, size=length)
        found.append((tokens, logits.astype(np.float32), other.astype(np.float32)))
    return found


def pair(reference: np.ndarray, other: np.ndarray, at: slice = slice(None)) -> ComparedLogits:
    return ComparedLogits(np.arange(len(reference))[at], reference[at], other[at])


def test_every_number_is_that_of_its_definition() -> None:
    given = windows(3, 100, 0.3)
    found = compare((t, [pair(p, q)]) for t, p, q in given)
    exact = [by_definition(p, q) for _, p, q in given]
    joined = np.concatenate(exact)
    assert found.tokens == 300 and found.windows == 3
    assert found.mean == pytest.approx(joined.mean(), rel=1e-9)
    assert found.maximum == pytest.approx(joined.max(), rel=1e-9)
    assert found.median == pytest.approx(np.median(joined), rel=1e-9)
    assert found.p99 == pytest.approx(np.quantile(joined, 0.99), rel=1e-9)
    means = [float(np.mean(e)) for e in exact]
    assert found.standard_error == pytest.approx(np.std(means, ddof=1) / math.sqrt(3))
    same = np.concatenate([p.argmax(-1) == q.argmax(-1) for _, p, q in given])
    assert found.same_top == same.mean() < 1
    first, second = found.by_position
    assert (first.first, first.last, second.first) == (0, 64, 64)
    assert first.mean == pytest.approx(np.mean([e[:64] for e in exact]))
    assert second.mean == pytest.approx(np.mean([e[64:] for e in exact]))


def test_pieces_of_a_window_are_compared_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    given = windows(2, 100, 0.3)
    found = compare((t, [pair(p, q)]) for t, p, q in given)
    monkeypatch.setattr(divergence, "AT_ONCE", 13 * 11)
    cuts = (slice(0, 1), slice(1, 40), slice(40, 100))
    pieces = compare((t, [pair(p, q, at) for at in cuts]) for t, p, q in given)
    assert pieces.mean == pytest.approx(found.mean) and pieces.tokens == found.tokens
    assert pieces.same_top == found.same_top
    assert pieces.perplexity == pytest.approx(found.perplexity)
    assert pieces.perplexity_ratio_error == pytest.approx(found.perplexity_ratio_error)
    assert [p.mean for p in pieces.by_position] == pytest.approx(
        [p.mean for p in found.by_position]
    )


def test_some_positions_are_compared_as_themselves() -> None:
    given = windows(3, 100, 0.3)
    places = [np.array([5, 60, 61]), np.array([63, 64, 99]), np.array([70])]
    found = compare(
        (t, [ComparedLogits(at, p[at], q[at])]) for at, (t, p, q) in zip(places, given, strict=True)
    )
    exact = [by_definition(p[at], q[at]) for at, (_, p, q) in zip(places, given, strict=True)]
    assert found.tokens == 7 and found.windows == 3
    assert found.mean == pytest.approx(np.concatenate(exact).mean(), rel=1e-9)
    first, second = found.by_position
    assert first.mean == pytest.approx(np.mean([*exact[0], exact[1][0]]))
    assert second.mean == pytest.approx(np.mean([*exact[1][1:], *exact[2]]))
    logits = [
        p[at[at < 99]].astype(np.float64) for at, (_, p, _) in zip(places, given, strict=True)
    ]
    following = [t[at[at < 99] + 1] for at, (t, _, _) in zip(places, given, strict=True)]
    losses = [
        math.log(np.exp(row).sum()) - row[token]
        for rows, tokens in zip(logits, following, strict=True)
        for row, token in zip(rows, tokens, strict=True)
    ]
    assert len(losses) == 6
    assert found.reference_perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-9)


def test_perplexity_is_of_the_token_that_follows() -> None:
    [(tokens, p, q)] = windows(1, 50, 0.3)
    found = compare([(tokens, [pair(p, q)])])

    def perplexity(logits: np.ndarray) -> float:
        exact = logits.astype(np.float64)
        losses = [
            math.log(sum(math.exp(x) for x in row)) - row[token]
            for row, token in zip(exact[:-1].tolist(), tokens[1:].tolist(), strict=True)
        ]
        return math.exp(sum(losses) / len(losses))

    assert found.reference_perplexity == pytest.approx(perplexity(p), rel=1e-9)
    assert found.perplexity == pytest.approx(perplexity(q), rel=1e-9)
    assert found.perplexity_ratio == pytest.approx(perplexity(q) / perplexity(p), rel=1e-9)
    assert found.standard_error is None and found.perplexity_ratio_error is None


def test_a_model_does_not_diverge_from_itself() -> None:
    found = compare((t, [pair(p, p)]) for t, p, _ in windows(2, 20, 0.0))
    assert found.mean == found.maximum == 0.0 and found.same_top == 1.0


def test_bits_are_raised_where_a_byte_buys_most() -> None:
    options = [
        [StorageOption(4, 100, 1e-3), StorageOption(8, 200, 1e-5)],
        [StorageOption(4, 100, 4e-3), StorageOption(8, 200, 1e-5)],
        [StorageOption(4, 10, 1e-3), StorageOption(8, 20, 1e-5)],
    ]
    path = list(allocations(options))
    assert [a.choice for a in path] == [(0, 0, 0), (0, 0, 1), (0, 1, 1), (1, 1, 1)]
    assert [a.bytes for a in path] == [210, 220, 320, 420]
    assert [a.predicted for a in path] == pytest.approx([6e-3, 5.01e-3, 1.02e-3, 3e-5])
