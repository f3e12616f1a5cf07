"""The error of a plain export, beside which that of an artifact stands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime
import torch

from linexport.parity.check import ModelUnderTest
from linexport.parity.compare import compare_arrays
from linexport.parity.reference import Arguments, Reference, feeds
from linexport.trace import Traced, plain_export


def plain_error(
    tested: ModelUnderTest,
    traced: Traced,
    inputs: Arguments,
    counted: Callable[[np.ndarray], np.ndarray] = lambda values: values,
) -> float | None:
    """Return the largest relative error of PyTorch's own ONNX export; None where it has none.

    Args:
        tested: the model that is exported.
        traced: the same, traced.
        inputs: of the comparison.
        counted: takes the values that count out of an output.
    """
    loaded, program = tested.loaded, traced.program
    if loaded.graph is not None:  # the source is one
        return None
    with TemporaryDirectory() as folder:
        try:
            if loaded.decode_module is not None:  # the module's own code, without states and ops
                shapes = loaded.dynamic_shapes
                with torch.no_grad():
                    program = torch.export.export(loaded.module, loaded.args, dynamic_shapes=shapes)
            path, _ = plain_export(loaded, Path(folder), program)
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            got = session.run(None, feeds(inputs, [given.name for given in session.get_inputs()]))
        except Exception:  # a plain export that fails is not the subject here
            return None
    expected = Reference(loaded, torch.float32)(inputs)
    errors = [
        compare_arrays(counted(e), counted(g), tested.tolerance).max_relative_error
        for e, g in zip(expected, got, strict=False)
        if e.shape == g.shape
    ]
    return max(errors, default=None)
