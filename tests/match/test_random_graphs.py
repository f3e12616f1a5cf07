"""What is found in random graphs, and that nothing else is.

The default run draws a few; ``-m slow`` five hundred, as ``tools/count_random_graphs.py`` does, and
480 streams.
"""

from __future__ import annotations

import pytest

from tests.support import random_graphs, random_streams

FEW, MANY = 25, 500
FEW_STREAMS, STREAMS = 24, 480
SHARE = 0.95
"""Share of the true ones that must be found."""


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_true_ones_are_found_and_no_rewrite_is_wrong(count: int) -> None:
    tally = random_graphs.tally(range(count))
    assert not tally.wrong, "rewritten, and no longer what it was"
    assert not tally.mistaken, "taken for linear attention"
    assert tally.true and tally.found >= SHARE * tally.true, tally.missed


def test_a_seed_draws_the_same_graph() -> None:
    first, second = (random_graphs.Generator(7).draw() for _ in range(2))
    assert first.model.SerializeToString() == second.model.SerializeToString()
    assert first != random_graphs.Generator(8).draw()


def test_every_way_to_spoil_a_graph_is_drawn() -> None:
    drawn = {random_graphs.Generator(seed).draw().spoiled for seed in range(200)}
    assert drawn == {None, *random_graphs.SPOILED}


@pytest.mark.parametrize("count", [FEW_STREAMS, pytest.param(STREAMS, marks=pytest.mark.slow)])
def test_what_streams_short_streams_long(count: int) -> None:
    tally = random_streams.tally(range(count))
    assert tally.graphs == count and tally.held >= count // 10
    assert not tally.broken
