"""``ort-mobile``: model.ort in ONNX Runtime's own format, with the operators a build must have."""

from __future__ import annotations

import tempfile
from pathlib import Path

from linexport.artifact import write
from linexport.manifest import MODEL
from linexport.package.destination import Destination, Packaged, Packaging
from linexport.package.proving import onnx_runtime
from linexport.package.standalone import standalone

OPERATORS = "required_operators_and_types.config"


def _write(job: Packaging) -> Packaged:
    """Convert by ONNX Runtime's own tool, which saves the model as it has optimised it."""
    from onnxruntime.tools.convert_onnx_models_to_ort import (
        OptimizationStyle,
        convert_onnx_models_to_ort,
    )

    model, renamed = standalone(job)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        write.save_model(model, folder)
        convert_onnx_models_to_ort(
            folder / MODEL,
            output_dir=folder / "out",
            optimization_styles=[OptimizationStyle.Fixed],
            enable_type_reduction=True,
        )
        for path in (folder / "out").iterdir():
            kept = "model.ort" if path.suffix == ".ort" else OPERATORS
            (job.folder / kept).write_bytes(path.read_bytes())
    return Packaged(renamed)


DESTINATION = Destination(
    "ort-mobile",
    "model.ort for ONNX Runtime on phones, and the operators it needs.",
    _write,
    write_texts=onnx_runtime.write_texts,
)
