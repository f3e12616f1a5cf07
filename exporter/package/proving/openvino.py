"""Texts of one file of standard operators, by OpenVINO."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from linexport.errors import EnvironmentProblemError, UsageError
from linexport.manifest import MODEL
from linexport.package.destination import BatchPrompts, Packaging, WrittenTexts
from linexport.package.proving.steps import write_by_steps


def write_texts(job: Packaging, prompts: BatchPrompts) -> WrittenTexts:
    """See ``Destination.write_texts``; in float32, which OpenVINO leaves where a CPU has bfloat16.

    Raises:
        UsageError: OpenVINO does not take the model.
        EnvironmentProblemError: OpenVINO is not installed.
    """
    try:
        import openvino
    except ImportError as error:
        raise EnvironmentProblemError(
            f"--prove runs the package in OpenVINO, which cannot be imported here ({error}). Run: "
            "pip install openvino"
        ) from None
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    try:
        model = openvino.Core().compile_model(str(job.folder / MODEL), "CPU", settings)
    except Exception as error:
        lines = [line.strip(" -") for line in str(error).splitlines() if line.strip(" -")]
        raise UsageError(
            f"OpenVINO {openvino.__version__.partition('-')[0]} does not take the package: "
            f"{lines[-1] if lines else 'no reason given'}. It has standard operators alone: "
            "convert with --target onnx for it."
        ) from None
    names = [output.get_any_name() for output in model.outputs]

    def call(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = model(dict(feeds))
        return {name: np.array(found[name]) for name in names}

    texts = write_by_steps(call, job.manifest, prompts)
    return WrittenTexts(f"OpenVINO {openvino.__version__.partition('-')[0]}", texts)
