"""``onnx``: one file of standard operators without functions, with the shapes of all values."""

from __future__ import annotations

from linexport.package.destination import Destination, Packaged, Packaging
from linexport.package.proving import openvino
from linexport.package.standalone import save_one_file, standalone


def _write(job: Packaging) -> Packaged:
    model, renamed = standalone(job)
    save_one_file(model, job.folder)
    return Packaged(renamed)


DESTINATION = Destination(
    "onnx",
    "One model.onnx without functions, for runtimes that have none (OpenVINO).",
    _write,
    write_texts=openvino.write_texts,
)
