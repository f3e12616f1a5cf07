"""Time of each node of a graph, from ONNX Runtime's profile of the graph as it runs it.

ONNX Runtime joins nodes, lays out their data anew and runs the bodies of functions. What is not in
the original graph counts for the nearest value of that graph that it leads to.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from linexport.graph import external_data
from linexport.graph.walk import reads
from linexport.targets.base import OrtSession

RUNS = 9
"""Counted calls; one before them is not."""

_KERNEL = "_kernel_time"


def node_times(
    path: Path, fed: Mapping[str, np.ndarray], threads: int = 0, native: bool = False
) -> dict[str, float]:
    """Return the microseconds of each node, by its name: the median of a few calls.

    Args:
        path: the model.
        fed: its inputs by name.
        threads: 0 for ONNX Runtime's choice.
        native: run linexport ops by the CPU library, where it is built.
    """
    with tempfile.TemporaryDirectory() as work:
        session = OrtSession(path, threads, native=native, profile=Path(work))
        for _ in range(RUNS + 1):
            session.run(fed)
        events = json.loads(Path(session.inner.end_profiling()).read_text())
        run = external_data.read_graph(Path(work) / "optimized.onnx").graph
    written = external_data.read_graph(path).graph.node
    spent = _spent(events, [n.name for n in run.node])
    homes = _homes(run.node, {name: n.name for n in written for name in n.output if name})
    found: dict[str, float] = defaultdict(float)
    for name, microseconds in spent.items():
        if name in homes:
            found[homes[name]] += microseconds
    return dict(found)


def _spent(events: Sequence[Mapping[str, object]], names: Sequence[str]) -> dict[str, float]:
    """Return the median microseconds of nodes of the graph itself, by name."""
    calls: dict[str, list[float]] = defaultdict(list)
    known = {*names}
    for event in events:
        name = str(event["name"]).removesuffix(_KERNEL)
        if event.get("cat") == "Node" and name != event["name"] and name in known:
            calls[name].append(float(event["dur"]))  # type: ignore[arg-type]
    return {name: _median(took) for name, took in calls.items()}


def _median(took: Sequence[float]) -> float:
    """Return the median of all calls but the first; nodes that share a name are one."""
    shared = max(1, len(took) // (RUNS + 1))
    sums = [sum(took[i : i + shared]) for i in range(0, len(took), shared)]
    return statistics.median(sums[1:] or sums)


def _homes(nodes: Sequence[onnx.NodeProto], written: Mapping[str, str]) -> dict[str, str]:
    """Return which written node each of these counts for, by their names.

    Args:
        nodes: of the graph that is run, in an order in which it can be.
        written: names of nodes by the values they compute.
    """
    homes: dict[str, str] = {}  # value -> the written node it leads to
    found: dict[str, str] = {}
    for node in reversed(nodes):
        own = next((written[name] for name in node.output if name in written), None)
        home = own or next((homes[name] for name in node.output if name in homes), None)
        if home is None:
            continue
        found[node.name] = home
        for name in reads(node):
            homes.setdefault(name, home)
    return found
