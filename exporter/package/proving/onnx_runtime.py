"""Texts of a file in ONNX Runtime's own format, by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnxruntime

from linexport.package.destination import BatchPrompts, Packaging, WrittenTexts
from linexport.package.proving.steps import write_by_steps


def write_texts(job: Packaging, prompts: BatchPrompts) -> WrittenTexts:
    """See ``Destination.write_texts``."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    path = str(job.folder / "model.ort")
    session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def call(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(names, session.run(names, dict(feeds)), strict=True))

    texts = write_by_steps(call, job.manifest, prompts)
    return WrittenTexts(f"ONNX Runtime {onnxruntime.__version__}", texts)
