"""What becomes of a formulation: fused, streaming, refused with its reason, or wrong.

The rewritten graph is run by plain ONNX Runtime beside the module in float64: whole sequences of
lengths that were never traced, then pieces and single tokens that hand their states on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
import torch

from linexport import passes
from linexport.graph import states
from linexport.plugins.ops.op import DOMAIN
from linexport.plugins.ops.registry import attach_functions
from tests.support.packed import Packed, exported, find
from tests.support.work import times_as_long

LENGTHS = (1, 7, 130)
LIMIT = 2e-5
"""Difference from float64, of the largest output."""

HALF = 2e-3
"""The same where half precision is part of a formulation."""


@dataclass(frozen=True)
class Outcome:
    """What was found.

    Attributes:
        kind: "streams", "fused", "left" (as exported), "refused" (not exported), "crashed" (by an
            error that is not linexport's) or "wrong".
        fused: number of matches.
        reasons: of what was left.
        error: the largest, of the largest output.
        slower: times as long as its exported graph that it takes, by counts; 0 where none is fused.
    """

    kind: str
    fused: int = 0
    reasons: tuple[str, ...] = ()
    error: float = 0.0
    slower: float = 0.0


def outcome_of(name: str) -> Outcome:
    """Export, rewrite and run a formulation."""
    try:
        module, model = exported(name)
    except Exception as error:
        return Outcome("refused", reasons=(str(error).strip(),))
    rewritten = passes.rewrite(model)
    found = rewritten.findings
    reasons = tuple(n.reason for n in (*found.unmatched, *found.rejected))
    fused = sum(n.domain == DOMAIN for n in rewritten.model.graph.node)
    whole, pieces = _errors(module, rewritten.model, find(name).length)
    kept, limit = states.find_states(rewritten.model), HALF if find(name).half else LIMIT
    if whole > limit and not fused:
        return Outcome("refused", reasons=("the exported graph differs at other lengths",))
    kind = "wrong" if whole > limit else "left" if not fused else "fused"
    if kind == "fused" and kept and pieces <= limit:
        kind = "streams"
    slower = times_as_long(module, model, rewritten.model) if fused else 0.0
    return Outcome(kind, len(found.matches), reasons, whole, slower)


def _errors(module: Packed, model: onnx.ModelProto, traced: int) -> tuple[float, float]:
    """The largest errors of whole sequences, and of pieces."""
    session, kept = session_of(model), states.find_states(model)
    unit = 16 if traced > 16 else 1
    whole = pieces = 0.0
    exact = module.double()
    torch.set_default_dtype(torch.float64)
    try:
        for length in LENGTHS if unit == 1 else (unit, 3 * unit, 8 * unit):
            x = module.example(3, length, seed=length)
            with torch.no_grad():
                expected = exact(x.double()).numpy()
            largest = np.abs(expected).max() or 1.0
            random = np.random.default_rng(length)
            cuts = np.sort(random.choice(length // unit + 1, min(4, length // unit))) * unit
            for parts in ([length], np.diff([0, *cuts, length]), [unit] * (length // unit)):
                got = run_in_pieces(session, kept, x.float().numpy(), [int(n) for n in parts if n])
                good = np.isfinite(got).all() and got.shape == expected.shape
                error = float(np.abs(got - expected).max() / largest) if good else np.inf
                if len(parts) == 1:
                    whole = max(whole, error)
                pieces = max(pieces, error)
                if not kept:
                    break
    finally:
        torch.set_default_dtype(torch.float32)
        module.float()
    return whole, pieces


def session_of(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """Open a rewritten graph in plain ONNX Runtime, on one thread."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    attach_functions(copy)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return onnxruntime.InferenceSession(
        copy.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run_in_pieces(
    session: onnxruntime.InferenceSession,
    kept: list[states.State],
    x: np.ndarray,
    sizes: list[int],
) -> np.ndarray:
    """The output of an input that is fed in pieces of these sizes."""
    past = {s.past: s.start(len(x)) for s in kept}
    given = next(i.name for i in session.get_inputs() if i.name not in past)
    names = [o.name for o in session.get_outputs()]
    found, start = [], 0
    for size in sizes:
        feeds = {given: x[:, start : start + size], **past}
        try:
            got = dict(zip(names, session.run(None, feeds), strict=True))
        except Exception:  # a length that the graph does not take
            return np.full(1, np.nan)
        past = {s.past: got[s.present] for s in kept}
        found.append(got[names[0]])
        start += size
    return np.concatenate(found, 1)
