"""What is called streaming streams: random graphs along the tokens, measured in pieces."""

from __future__ import annotations

import pytest

from linexport.token_flow import classify
from tests.support.token_graphs import draw, streams


def outcomes(seeds: range) -> dict[tuple[bool, bool], list[int]]:
    """Seeds by whether a graph streams, and whether no node of it is said to mix tokens."""
    found: dict[tuple[bool, bool], list[int]] = {}
    for seed in seeds:
        drawn = draw(seed)
        try:
            measured = streams(drawn)
        except Exception:  # a graph that cannot be run at all
            continue
        clean = not classify(drawn.model, drawn.states, None, drawn.unit).mixing
        found.setdefault((measured, clean), []).append(seed)
    return found


def check(seeds: range) -> None:
    found = outcomes(seeds)
    assert found.get((False, True), []) == []  # said to stream, and does not
    both = {key: len(own) for key, own in found.items()}
    assert both[True, True] > 0.3 * len(seeds) and both[False, False] > 0.2 * len(seeds)
    assert len(found.get((True, False), [])) <= 0.05 * len(seeds)


def test_no_graph_is_said_to_stream_that_does_not() -> None:
    check(range(60))


@pytest.mark.slow
def test_no_graph_of_many_is_said_to_stream_that_does_not() -> None:
    check(range(1000, 3000))
