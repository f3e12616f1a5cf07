"""The contract of a pass: one object that says what it is, requires and ensures, and runs it.

    PASS = Pass(
        name="fold_transposes",
        stage="tidy",
        ensures="no Transpose or Reshape reads another one directly",
        run=run,
    )

``run`` changes an onnx-graphsurgeon graph in place and returns a ``PassResult``. Most passes are a
match, which says of a node whether and how it fits, and a replacement: see ``rewrite_matches``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import onnx_graphsurgeon as gs

from linexport.graph.findings import Findings

STAGES = ("canonicalise", "fuse", "scan", "stream", "state", "absorb", "tidy")
STATELESS = ("canonicalise", "fuse", "scan", "absorb", "tidy")
"""Stages whose passes leave the inputs and outputs of the graph as they are."""

TARGET = "target"
"""Stage of the passes of one target, which run after all others; see ``passes.target_passes``."""

M = TypeVar("M")


@dataclass(frozen=True)
class PassResult:
    """Result of a pass.

    Attributes:
        modified: whether the pass changed the graph.
        findings: matches and unmatched candidates worth reporting to the user.
    """

    modified: bool
    findings: Findings = field(default_factory=Findings)


@dataclass(frozen=True)
class Pass:
    """One rewrite of the graph.

    Attributes:
        name: unique among all passes; ``--stop-after`` and dumps use it.
        stage: one of ``STAGES``, which run in this order, or ``TARGET``. Within a stage the order
            is free.
        ensures: what holds of the graph afterwards.
        run: changes the graph in place. Run again at once, it must change nothing. A pass of a
            stage in ``STATELESS``, or of a target, leaves the graph's inputs and outputs as they
            are.
        requires: what must hold of the graph before.
    """

    name: str
    stage: str
    ensures: str
    run: Callable[[gs.Graph], PassResult]
    requires: str = "a valid graph, its nodes in the order of evaluation"

    def __post_init__(self) -> None:
        if self.stage not in (*STAGES, TARGET):
            raise ValueError(
                f"pass {self.name!r} has the stage {self.stage!r}; expected one of "
                f"{', '.join((*STAGES, TARGET))}"
            )


class NoMatchError(Exception):
    """Why a node that is a candidate for a rewrite does not qualify."""


def rewrite_matches(
    graph: gs.Graph,
    match: Callable[[gs.Graph, gs.Node], M | None],
    replace: Callable[[gs.Graph, gs.Node, M], None],
    log: logging.Logger,
) -> PassResult:
    """Replace every node that matches; log at debug level why a candidate does not.

    Args:
        graph: changed in place.
        match: returns what ``replace`` needs, None for a node that is not a candidate; raises
            ``NoMatchError`` with the reason for a candidate that does not qualify.
        replace: rewrites one matched node.
        log: of the pass's module.
    """
    modified = False
    for node in list(graph.nodes):
        try:
            found = match(graph, node)
        except NoMatchError as reason:
            log.debug("%s %r is left as it is: %s", node.op, node.name, reason)
            continue
        if found is not None:
            log.info("rewriting %s %r", node.op, node.name)
            replace(graph, node, found)
            modified = True
    return PassResult(modified)
