"""The error of a plain export, which an artifact's is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime
import torch

from linexport.parity.check import ModelUnderTest
from linexport.parity.compare import compare_arrays
from linexport.parity.reference.module import Arguments, Reference, feeds
from linexport.system.time_limit import opening, watched
from linexport.trace import Traced, plain_export
from linexport.trace.messages import error_summary, innermost


@dataclass(frozen=True)
class PlainExport:
    """Outcome of running PyTorch's own ONNX export of a model.

    Attributes:
        relative_error: its largest; None where it does not run, or where there is none.
        failure: why it does not run; None where it does, or where there is none.
    """

    relative_error: float | None = None
    failure: str | None = None


def run_plain_export(
    tested: ModelUnderTest,
    traced: Traced,
    inputs: Arguments,
    counted: Callable[[np.ndarray], np.ndarray] = lambda values: values,
) -> PlainExport:
    """Run PyTorch's own ONNX export in ONNX Runtime, as a user does who has nothing else.

    Args:
        tested: the model that is exported.
        traced: the same, traced.
        inputs: of the comparison.
        counted: takes the values that count out of an output.
    """
    loaded, program = tested.loaded, traced.program
    if loaded.graph is not None:  # the source is one
        return PlainExport()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what it would log is the failure below
    with TemporaryDirectory() as folder:
        try:
            if loaded.decode_module is not None:  # the module's own code, without states and ops
                shapes = loaded.dynamic_shapes
                with torch.no_grad():
                    program = torch.export.export(loaded.module, loaded.args, dynamic_shapes=shapes)
            path, _ = plain_export(loaded, Path(folder), program)
            with opening(options):
                session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
            given = feeds(inputs, [one.name for one in session.get_inputs()])
            with watched() as running:
                got = session.run(None, given, running)
        except Exception as error:
            return PlainExport(failure=error_summary(innermost(error)))
    expected = Reference(loaded, torch.float32)(inputs)
    errors = [
        compare_arrays(counted(e), counted(g), tested.tolerance).max_relative_error
        for e, g in zip(expected, got, strict=False)
        if e.shape == g.shape
    ]
    return PlainExport(relative_error=max(errors, default=None))
