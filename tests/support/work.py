"""How long a rewritten formulation takes beside the graph it came from, by counts of their work."""

from __future__ import annotations

import onnx

from linexport import passes, targets
from linexport.graph import states
from linexport.plugins.ops.registry import attach_functions
from linexport.targets.lowering.choice import lower
from linexport.timing.work import work_of
from tests.support.formulations.notation import LONGEST
from tests.support.packed import Packed

LENGTH = 1024
MOST = 1.25
"""Times as long that a rewritten graph may take: counts are an estimate."""

FINISH = ("scan", "absorb", "tidy")
"""Stages behind those that fuse, of a graph without states."""


def times_as_long(module: Packed, exported: onnx.ModelProto, rewritten: onnx.ModelProto) -> float:
    """Return the estimate of the artifact's time over that of the graph as it was exported.

    Args:
        module: the formulation.
        exported: its graph.
        rewritten: the same, rewritten.
    """
    target = targets.find_target(targets.DEFAULT)
    lowered, _ = lower(target.prepare(rewritten), target.candidates)
    plain = onnx.ModelProto()
    plain.CopyFrom(exported)
    attach_functions(plain)
    unit = max(module.formulation.length, 16)
    stored = any(LONGEST in buffer.shape for buffer in module.buffers())
    x = module.example(1, -(-(LONGEST if stored else LENGTH) // unit) * unit).numpy()
    before, after = (_microseconds(model, x) for model in (plain, lowered))
    return after / before


def finished(fused: onnx.ModelProto) -> onnx.ModelProto:
    """Return a graph that was fused as the artifact has it, without states."""
    return passes.rewrite(fused, FINISH, target=targets.DEFAULT).model


def _microseconds(model: onnx.ModelProto, x: object) -> float:
    fed = {s.past: s.start(1) for s in states.find_states(model)}
    given = next(i.name for i in model.graph.input if i.name not in fed)
    return work_of(model.SerializeToString(), {given: x, **fed}).microseconds
