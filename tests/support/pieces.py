"""A rewritten graph fed in pieces by plain ONNX Runtime, its states carried from call to call."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn
from torch.export import Dim

from linexport import passes
from linexport.graph.external_data import with_weights
from linexport.graph.states import find_states
from linexport.plugins.ops.registry import attach_functions
from linexport.sources.factory import load_module
from linexport.trace import trace


def rewritten(module: nn.Module, example: torch.Tensor, axis: int = 1) -> onnx.ModelProto:
    """The graph of a module of one input (batch and tokens dynamic) after all passes."""
    dynamic = ({0: Dim.DYNAMIC, axis: Dim.DYNAMIC},)
    traced = trace(load_module((module.eval(), (example,), dynamic), "pieces:module"))
    found = passes.rewrite(traced.graph, weights=traced.weights)
    return with_weights(found.model, found.weights)


def in_pieces(
    model: onnx.ModelProto, x: np.ndarray, pieces: Sequence[int], axis: int = 1, batch: int = 0
) -> np.ndarray:
    """The first output, joined.

    Args:
        model: with past inputs and present outputs.
        x: the first input.
        pieces: numbers of tokens of the calls; what they leave is the last piece.
        axis: of the tokens, in the input and in the output.
        batch: the axis of the batch.
    """
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    attach_functions(copy)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(copy.SerializeToString(), options)
    given, states = session.get_inputs()[0].name, find_states(copy)
    names = [session.get_outputs()[0].name, *(s.present for s in states)]
    carried = {s.past: s.start(x.shape[batch]) for s in states}
    parts = []
    ends = [0, *itertools.accumulate(pieces), x.shape[axis]]
    for start, end in itertools.pairwise(ends):
        if end > start:
            fed = {given: np.take(x, range(start, end), axis), **carried}
            part, *present = session.run(names, fed)
            carried = {s.past: value for s, value in zip(states, present, strict=True)}
            parts.append(part)
    return np.concatenate(parts, axis)


def random_pieces(length: int, longest: int, seed: int) -> list[int]:
    """Lengths of pieces from one token up to the longest, that sum to the length."""
    random, pieces = np.random.default_rng(seed), [1, 1]
    while sum(pieces) < length:
        pieces.append(min(int(random.integers(1, longest + 1)), length - sum(pieces)))
    return pieces


def largest_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, of the largest value that was expected."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
