"""How far ONNX Runtime's integer kernels take a quantised file from what its operators say.

    DequantizeLinear, DequantizeLinear -> MatMul -> QuantizeLinear     ->     QLinearMatMul

ONNX Runtime fuses these when it opens a file as most programs do. On CPUs without VNNI
instructions its products of 8 bits saturate, and an output may be off by tens of percent. A
conversion is compared with what the operators say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch

from linexport.graph.walk import all_nodes, subgraphs
from linexport.loaders.onnx_file.module import OnnxModule

WORTH_SAYING = 1e-3
"""Distance from the specified values, relative to the largest, that users are told of."""


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
    nodes = list(all_nodes(model))
    # A dequantised value that is read inside of a body may end the process, see ``shield_bodies``.
    if any(node.op_type == "QuantizeLinear" for node in nodes) and not any(
        body for node in nodes for body in subgraphs(node)
    ):
        distance = max(map(_distance, module(*args), _run(path, args)), default=0.0)
        if distance > WORTH_SAYING:
            yield (
                "ONNX Runtime computes this file by integer kernels that round or saturate: on "
                f"the example inputs its outputs are {distance:.0e} of the largest value away from "
                "what the operators say. The artifact is compared with what they say, which ONNX "
                "Runtime computes with the session option session.disable_quant_qdq = 1."
            )


def _run(path: Path, args: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Return the outputs of a file that is opened with the default options; none if that fails."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
        names = (given.name for given in session.get_inputs())
        found = session.run(None, dict(zip(names, (x.numpy() for x in args), strict=True)))
    except Exception:  # ONNX Runtime has no common error; the module says what it runs
        return []
    return list(found)


def _distance(specified: torch.Tensor, computed: np.ndarray) -> float:
    exact = specified.numpy().astype(np.float64)
    largest = np.abs(exact).max(initial=0.0)
    return float(np.abs(computed - exact).max(initial=0.0) / largest) if largest else 0.0
