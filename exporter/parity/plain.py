"""The error of a plain export, beside which that of an artifact stands."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import onnxruntime
import torch

from linexport.parity.check import ModelUnderTest
from linexport.parity.compare import compare_arrays
from linexport.parity.reference import Arguments, Reference, feeds
from linexport.trace import Traced, plain_export


def plain_error(tested: ModelUnderTest, traced: Traced, inputs: Arguments) -> float | None:
    """Return the largest relative error of PyTorch's own ONNX export; None where it has none.

    Args:
        tested: the model that is exported.
        traced: the same, traced.
        inputs: of the comparison.
    """
    if tested.loaded.graph is not None:  # the source is one
        return None
    with TemporaryDirectory() as folder:
        try:
            path, _ = plain_export(tested.loaded, Path(folder), traced.program)
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            got = session.run(None, feeds(inputs, [given.name for given in session.get_inputs()]))
        except Exception:  # a plain export that fails is not the subject here
            return None
    expected = Reference(tested.loaded, torch.float32)(inputs)
    errors = [
        compare_arrays(e, g, tested.tolerance).max_relative_error
        for e, g in zip(expected, got, strict=False)
    ]
    return max(errors, default=None)
