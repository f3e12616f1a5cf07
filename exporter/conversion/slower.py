"""Warnings of an artifact that is slower than the plain export, measured or by counts.

    measured        its median time over that of the plain export, at every length
    not measured    its work over that of the graph it came from, see ``timing.work``

A rewrite is worth it where it is faster, or where it gives the states by which a model streams. One
that is neither is a fault; one that costs time for its states is the user's to know of.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import onnx

from linexport.graph import dims
from linexport.graph.external_data import with_weights
from linexport.manifest import Manifest
from linexport.manifest.measured import LatencyRow
from linexport.parity import ModelUnderTest
from linexport.parity.cases import Case, draw_inputs
from linexport.parity.reference.module import feeds
from linexport.plugins.ops.op import DOMAIN
from linexport.timing.work import Work, work_of
from linexport.trace import Traced

log = logging.getLogger(__name__)

LENGTH = 1024
"""Tokens that work is counted at, or as many as the model takes: of few of them, what a node costs
by itself is most of the time."""

MEASURED, COUNTED = 1.05, 1.25
"""Times as long as the baseline from which an artifact is said to be slower: by medians, and by an
estimate."""

MOST_WEIGHTS = 2**26
"""Bytes of weights of a model whose work is counted: it is opened twice more for that."""

SAID = "Slower than a plain export: "
"""How the warnings begin; those of an earlier measurement are dropped."""


def with_slowness_measured(manifest: Manifest) -> Manifest:
    """Name the lengths at which the artifact was measured to be slower than the plain export."""
    kept = [warning for warning in manifest.warnings if not warning.startswith(SAID)]
    slow = [(row, ratio) for row in manifest.latency or () if (ratio := _ratio(row)) > MEASURED]
    if slow:
        at = ", ".join(f"{ratio:.2g} times as long {_at(row)}" for row, ratio in slow)
        kept.append(f"{SAID}it takes {at}{_for_states(manifest)}.")
    return replace(manifest, warnings=tuple(kept))


def with_work_counted(
    manifest: Manifest, tested: ModelUnderTest, traced: Traced, model: Path, seed: int
) -> Manifest:
    """Say where an artifact that was not measured has more work than the graph it came from.

    Nothing is said of one whose graph has ops of linexport already, or large weights.

    Args:
        manifest: of the artifact.
        tested: the same with its original.
        traced: the original's graph.
        model: the artifact's model file.
        seed: of the inputs.
    """
    nodes, weights = traced.graph.graph.node, traced.weights.values()
    if any(node.domain == DOMAIN for node in nodes):
        return manifest
    if sum(values.nbytes for values in weights) > MOST_WEIGHTS:
        return manifest
    found = _more_work(tested, traced, model, seed)
    if found is None:
        return manifest
    length, ratio = found
    said = (
        f"{SAID}by the bytes it moves and the numbers it multiplies it takes about {ratio:.2g} "
        f"times as long at {length:,} tokens{_for_states(manifest)}. linexport bench measures it."
    )
    return replace(manifest, warnings=(*manifest.warnings, said))


def _ratio(row: LatencyRow) -> float:
    ours, plain = row.artifact_ms, row.plain_export_ms
    return ours / plain if ours and plain else 0.0


def _at(row: LatencyRow) -> str:
    return f"at {row.length:,} tokens" + (f" in batches of {row.batch}" if row.batch > 1 else "")


def _for_states(manifest: Manifest) -> str:
    return ", for the states by which it streams" if manifest.states else ""


def _more_work(
    tested: ModelUnderTest, traced: Traced, model: Path, seed: int
) -> tuple[int, float] | None:
    """Return how many times as long it takes, at so many tokens; None where it is not slower."""
    sequence = dims.sequence(tested.dims)
    if sequence is None:
        return None
    length = tested.dims[sequence].nearest(LENGTH)
    chosen = {
        n: limits.nearest(1 if limits.batch else tested.traced[n])
        for n, limits in tested.dims.items()
    }
    sizes = {**chosen, sequence: length}
    plain = with_weights(traced.graph, traced.weights)
    try:
        before, after = _counted(tested, plain, model, sizes, seed)
    except Exception as error:  # ONNX Runtime has no common error; parity says what runs
        log.info("the work at %d tokens was not counted: %s", length, error)
        return None
    log.info("at %d tokens: %s before, %s after", length, before, after)
    ratio = after.microseconds / before.microseconds
    return (length, ratio) if ratio > COUNTED else None


def _counted(
    tested: ModelUnderTest,
    plain: onnx.ModelProto,
    model: Path,
    sizes: Mapping[str, int],
    seed: int,
) -> tuple[Work, Work]:
    inputs = draw_inputs(tested.loaded, tested.input_shapes, Case("work", sizes, seed))
    fed = feeds(inputs, tested.input_names)
    names = [given.name for given in plain.graph.input]
    by_position = dict(zip(names, fed.values(), strict=True))
    state = tested.initial_state(tested.batch(sizes))
    return work_of(plain.SerializeToString(), by_position), work_of(model, {**fed, **state})
