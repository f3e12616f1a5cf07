"""Places for the nodes of a small graph: layers from top to bottom, few crossings.

A node lies below all it depends on, and directly above the first that depends on it where nothing
feeds it. Edges over several layers bend at points in between. Within layers nodes are ordered by
the mean place of their neighbours, up and down in turns, and then drawn together likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

SWEEPS = 8
GAP = 22.0


@dataclass(frozen=True)
class Placed:
    """Centres of nodes across, their layers, the bends of edges, the width and number of layers."""

    x: Mapping[str, float]
    layer: Mapping[str, int]
    bends: Mapping[tuple[str, str], tuple[tuple[float, int], ...]]
    width: float
    layers: int


def place(widths: Mapping[str, float], edges: Sequence[tuple[str, str]]) -> Placed:
    """Lay out nodes of the given widths; edges that would close a circle are left out."""
    kept = _acyclic(list(widths), edges)
    layer = _layers(list(widths), kept)
    bent, size, chains = _with_bends(widths, kept, layer)
    rows = _ordered(bent, size, layer)
    x = _across(rows, size, bent)
    left = min((x[n] - size[n] / 2 for n in x), default=0.0)
    right = max((x[n] + size[n] / 2 for n in x), default=0.0)
    x = {n: v - left for n, v in x.items()}
    bends = {e: tuple((x[n], layer[n]) for n in chain) for e, chain in chains.items()}
    return Placed({n: x[n] for n in widths}, layer, bends, right - left, len(rows))


def _acyclic(nodes: Sequence[str], edges: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    below: dict[str, set[str]] = {n: set() for n in nodes}
    kept = []
    for start, end in edges:
        reached, todo = {end}, [end]
        while todo:
            fresh = below[todo.pop()] - reached
            reached |= fresh
            todo += fresh
        if start not in reached:
            below[start].add(end)
            kept.append((start, end))
    return kept


def _layers(nodes: Sequence[str], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    layer = dict.fromkeys(nodes, 0)
    for _ in nodes:
        changed = False
        for start, end in edges:
            if layer[end] <= layer[start]:
                layer[end], changed = layer[start] + 1, True
        if not changed:
            break
    fed = {end for _, end in edges}
    for node in nodes:
        readers = [layer[end] for start, end in edges if start == node]
        if node not in fed and readers:
            layer[node] = min(readers) - 1
    return layer


def _with_bends(
    widths: Mapping[str, float], edges: Sequence[tuple[str, str]], layer: dict[str, int]
) -> tuple[list[tuple[str, str]], dict[str, float], dict[tuple[str, str], list[str]]]:
    """Edges of one layer each, through bends that are added to the layers."""
    size = dict(widths)
    short: list[tuple[str, str]] = []
    chains: dict[tuple[str, str], list[str]] = {}
    for number, (start, end) in enumerate(edges):
        chain = [f"\0{number}.{at}" for at in range(layer[start] + 1, layer[end])]
        for at, bend in enumerate(chain, layer[start] + 1):
            layer[bend], size[bend] = at, 8.0
        path = [start, *chain, end]
        short += pairwise(path)
        chains[start, end] = chain
    return short, size, chains


def _ordered(
    edges: Sequence[tuple[str, str]], size: Mapping[str, float], layer: Mapping[str, int]
) -> list[list[str]]:
    rows: list[list[str]] = [[] for _ in range(max(layer.values(), default=-1) + 1)]
    for node in size:
        rows[layer[node]].append(node)
    above, below = _neighbours(edges)
    for sweep in range(SWEEPS):
        near = below if sweep % 2 else above
        for row in reversed(rows) if sweep % 2 else rows:
            at = {n: i / max(len(r) - 1, 1) for r in rows for i, n in enumerate(r)}
            mean = {n: sum(at[m] for m in near[n]) / len(near[n]) for n in row if near.get(n)}
            row.sort(key=lambda n: mean.get(n, at[n]))
    return rows


def _neighbours(
    edges: Sequence[tuple[str, str]],
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    above: dict[str, list[str]] = {}
    below: dict[str, list[str]] = {}
    for start, end in edges:
        above.setdefault(end, []).append(start)
        below.setdefault(start, []).append(end)
    return above, below


def _across(
    rows: Sequence[Sequence[str]], size: Mapping[str, float], edges: Sequence[tuple[str, str]]
) -> dict[str, float]:
    """Centres: each drawn towards its neighbours, none overlapping, the order kept."""
    x: dict[str, float] = {}
    for row in rows:
        total = sum(size[n] + GAP for n in row)
        at = -total / 2
        for node in row:
            x[node] = at + (size[node] + GAP) / 2
            at += size[node] + GAP
    above, below = _neighbours(edges)
    for sweep in range(4 * SWEEPS):
        near = below if sweep % 2 else above
        for row in reversed(rows) if sweep % 2 else rows:
            wish = {n: sum(x[m] for m in near[n]) / len(near[n]) for n in row if near.get(n)}
            _settle(row, {n: wish.get(n, x[n]) for n in row}, size, x)
    return x


def _settle(
    row: Sequence[str], wish: Mapping[str, float], size: Mapping[str, float], x: dict[str, float]
) -> None:
    """Nearest to the wishes in turn from the left and from the right, taking the middle."""
    left: dict[str, float] = {}
    right: dict[str, float] = {}
    for i, node in enumerate(row):
        before = row[i - 1] if i else None
        least = left[before] + (size[before] + size[node]) / 2 + GAP if before else wish[node]
        left[node] = max(wish[node], least)
    for i, node in reversed(list(enumerate(row))):
        after = row[i + 1] if i + 1 < len(row) else None
        most = right[after] - (size[after] + size[node]) / 2 - GAP if after else wish[node]
        right[node] = min(wish[node], most)
    for node in row:
        x[node] = (left[node] + right[node]) / 2
