"""Time and error of every node, as node data of Model Explorer.

    DIR/times.json     microseconds of a node
    DIR/errors.json    largest error against the original's value of the node, relative to the
                       largest element

Source: https://github.com/google-ai-edge/model-explorer, "Custom node data"; keys are names of
nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from linexport.artifact import write
from linexport.parity.bisection import WIDTH
from linexport.parity.diverge import BothValues

COLOURS = ("#ffffff", "#f28b30")
"""Backgrounds of the least and of the largest number."""

LARGEST = 1e9
"""In the place of an infinite error, which JSON does not have."""


def errors(both: BothValues) -> dict[str, float]:
    """Return the relative error of every node whose value the original has, by the node's name."""
    found = {}
    comparable = sorted(both.comparable)
    for start in range(0, len(comparable), WIDTH):
        names = comparable[start : start + WIDTH]
        expected, got = both.original.get(names), both.got(names)
        for name in names:
            if name in expected and name in got:
                result = both.compare(name, expected[name], got[name])
                node = both.ancestry.producer[name].name
                found[node] = min(result.max_relative_error, LARGEST)
    return found


def write_overlay(
    place: Path, graph: str, times: Mapping[str, float], errors: Mapping[str, float]
) -> None:
    """Write the folder in one step.

    Args:
        place: a new or empty folder.
        graph: name of the graph.
        times: microseconds by node.
        errors: relative error by node.

    Raises:
        UsageError: the folder has something in it.
        EnvironmentProblemError: it cannot be written.
    """
    write.check_output(place, overwrite=False)
    gradient = [{"stop": stop, "bgColor": colour} for stop, colour in enumerate(COLOURS)]
    with write.staged(place) as folder:
        for file, values in (("times.json", times), ("errors.json", errors)):
            results = {name: {"value": value} for name, value in values.items()}
            data = {graph: {"results": results, "gradient": gradient}}
            (folder / file).write_text(json.dumps(data, indent=2) + "\n")
        write.publish(folder, place)
