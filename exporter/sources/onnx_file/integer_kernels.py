"""How far ONNX Runtime's integer kernels take a quantised file from what its operators say.

    DequantizeLinear, DequantizeLinear -> MatMul -> QuantizeLinear     ->     QLinearMatMul

ONNX Runtime fuses these when it opens a file as most programs do. On CPUs without VNNI
instructions its products of 8 bits saturate, and an output may be off by tens of percent. A
conversion is compared with what the operators say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch

from linexport.graph.walk import all_nodes, subgraphs
from linexport.sources.onnx_file.dynamic_shapes import inputs
from linexport.sources.onnx_file.module import OnnxModule

WORTH_SAYING = 1e-3
"""Distance from the specified values, relative to the largest, that is reported."""


def integer_kernels(
    path: Path, model: onnx.ModelProto, module: OnnxModule, args: Sequence[torch.Tensor]
) -> Iterator[str]:
    """Yield a warning where the file is computed otherwise than it says.

    Args:
        path: of the file.
        model: its graph.
        module: runs it as it says.
        args: example inputs.
    """
    distance = distance_by_default(path, model, module, args)
    if distance > WORTH_SAYING:
        yield (
            "ONNX Runtime computes this file by integer kernels that round or saturate: on the "
            f"example inputs its outputs are {distance:.0e} of the largest value away from what "
            "the operators say. The artifact is compared with what they say, which ONNX Runtime "
            "computes with the session option session.disable_quant_qdq = 1."
        )


def distance_by_default(
    path: Path, model: onnx.ModelProto, module: OnnxModule, args: Sequence[torch.Tensor]
) -> float:
    """Return how far a file, opened as most programs do, is from what it says; 0 if unknown.

    Arguments are those of ``integer_kernels``.
    """
    # A dequantised value that is read inside of a body may end the process, see ``shield_bodies``.
    bodies = any(body for node in all_nodes(model) for body in subgraphs(node))
    if not quantises(model) or bodies:
        return 0.0
    names = [value.name for value in inputs(model)]
    found = run_by_default(path, dict(zip(names, (x.numpy() for x in args), strict=True)))
    return max(map(distance, module(*args), found.values()), default=0.0)


def quantises(model: onnx.ModelProto) -> bool:
    """Return whether values are quantised in a graph, and not weights alone."""
    return any(node.op_type == "QuantizeLinear" for node in all_nodes(model))


def run_by_default(path: Path, fed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the outputs of a file that is opened with the default options; none if that fails."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(None, dict(fed)), strict=True))
    except Exception:  # ONNX Runtime has no common error; the module says what it runs
        return {}


def distance(specified: torch.Tensor, computed: np.ndarray) -> float:
    """Return the largest difference of an output, relative to its largest value."""
    exact = specified.numpy().astype(np.float64)
    largest = np.abs(exact).max(initial=0.0)
    return float(np.abs(computed - exact).max(initial=0.0) / largest) if largest else 0.0
