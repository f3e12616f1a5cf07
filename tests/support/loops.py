"""Loops over tokens rewritten, and run by plain ONNX Runtime beside their modules in float64."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn
from torch.export import Dim

from linexport import passes
from linexport.graph import states
from linexport.graph.external_data import with_weights
from linexport.plugins.ops.registry import attach_functions
from linexport.sources.factory import load_module
from linexport.trace import trace

WIDTH = 8
"""Of the inputs (B, T, WIDTH)."""


def rewritten(module: nn.Module) -> passes.Rewritten:
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    traced = trace(load_module((module.eval(), (torch.randn(2, 16, WIDTH),), dynamic), "a:loop"))
    return passes.rewrite(traced.graph, weights=traced.weights)


def operators(found: passes.Rewritten) -> list[str]:
    """Ops of linexport, and loops."""
    return [n.op_type for n in found.model.graph.node if n.domain or n.op_type in ("Scan", "Loop")]


def reasons(found: passes.Rewritten) -> set[str]:
    """Why something was left as it was."""
    findings = found.findings
    return {candidate.reason for candidate in (*findings.unmatched, *findings.rejected)}


def session_of(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    attach_functions(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def check_streams(found: passes.Rewritten, module: nn.Module, limit: float = 2e-6) -> None:
    """Compare whole sequences, pieces and single tokens; a state of each operator is carried."""
    model = with_weights(found.model, found.weights)
    carried = states.find_states(model)
    assert carried
    session = session_of(model)
    names = [model.graph.output[0].name, *(state.present for state in carried)]
    for length, sizes in ((1, [1]), (150, [150]), (150, [7, 64, 78, 1]), (40, [1] * 40)):
        x = torch.randn(3, length, WIDTH)
        with torch.no_grad():
            expected = module.double()(x.double()).numpy()
        module.float()
        past, got = [state.start(3) for state in carried], []
        for piece in x.split(sizes, 1):
            given = {state.past: x for state, x in zip(carried, past, strict=True)}
            y, *past = session.run(names, {"x": piece.numpy(), **given})
            got.append(y)
        error = np.abs(np.concatenate(got, 1) - expected).max() / np.abs(expected).max()
        assert error < limit, f"{length} tokens in {len(sizes)} pieces: {error}"
