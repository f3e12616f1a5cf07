"""What other exporters get wrong without an error, and linexport right on the same model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime as ort
import pytest
import torch

import linexport
from linexport.loaders import load_model

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_epsilon_that_an_optimiser_drops(
    factories: SimpleNamespace, converted: Callable[..., Path]
) -> None:
    """torch.onnx.export's default optimiser takes x + 1e-15 for x, and 0 / 0 is no number."""
    loaded = load_model(factories.source("epsilon"))
    exported = torch.onnx.export(loaded.module, loaded.args, dynamo=True, verbose=False)
    assert exported is not None
    session = ort.InferenceSession(
        exported.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    x = -np.ones((2, 16, 8), np.float32)
    x[0, 0] = 0
    with torch.no_grad():
        expected = loaded.module(torch.from_numpy(x)).numpy()
    theirs = session.run(None, {session.get_inputs()[0].name: x})[0]
    ours = linexport.load(converted("epsilon"), threads=1).run(x)["output"]
    assert not np.isfinite(theirs).all()
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(ours, expected, rtol=1e-6)
