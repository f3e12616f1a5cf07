"""An artifact of target ort-cuda for Triton: on a GPU, by ONNX Runtime's CUDA provider.

    REPOSITORY/NAME/1/model.onnx             with its functions, whose nodes may carry kernels
    REPOSITORY/NAME/liblinexport_cuda.so     what launches these, where there are any
    config.pbtxt                             KIND_GPU, the library, products not rounded to TF32

Backend onnxruntime opens the library by its name, where the system's loader finds it. The model of
backend python takes the provider by the kind of its instance, and the library from its folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import onnx

from linexport.manifest import MODEL
from linexport.package.destination import Packaging
from linexport.package.standalone import check_size, rename_interface
from linexport.plugins.cuda import library
from linexport.system.escape import protobuf_string
from linexport.targets.runtime.options import STRICT_NORMS

TARGET = "ort-cuda"

OLDEST = "1.31"
"""The first ONNX Runtime that has the operators of the target."""


def is_for_gpus(job: Packaging) -> bool:
    """Return whether an artifact is of the target that this is for."""
    return job.manifest.target == TARGET


def model(job: Packaging) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Return the model with its functions, and the inputs and outputs that got other names.

    Raises:
        UsageError: it is too large.
    """
    check_size(job)
    written = onnx.load_model(str(job.source / MODEL))
    return written, rename_interface(written)


def requirement(newest: str) -> str:
    """Return what pip installs for GPUs, where ONNX Runtime ``newest`` has checked the artifact.

    Not that version alone: the package for GPUs may be published later, or not at all.
    """
    return f"onnxruntime-gpu[cuda,cudnn]>={OLDEST},<={newest}"


def write_library(job: Packaging, written: onnx.ModelProto) -> str | None:
    """Write the CUDA library next to a model whose nodes carry kernels; return its name.

    Raises:
        EnvironmentProblemError: it was not built here.
    """
    from linexport.plugins.kernels.description import carried_by  # packages for a CPU need none

    if not any(map(carried_by, written.graph.node)):
        return None
    file = library.path()
    shutil.copyfile(file, job.folder / job.name / file.name)
    return file.name


def place(backend: str, library_name: str | None) -> Iterator[str]:
    """Yield the lines of config.pbtxt that say where and how the model runs."""
    yield "instance_group [ { kind: KIND_GPU count: 1 } ]"
    if backend == "python":  # whose model does the rest
        return
    if library_name:
        yield f"model_operations {{ op_library_filename: [ {protobuf_string(library_name)} ] }}"
    values = {"use_tf32": "0", STRICT_NORMS: "1"}
    exact = " ".join(f'parameters {{ key: "{k}" value: "{v}" }}' for k, v in values.items())
    accelerator = f'gpu_execution_accelerator: [ {{ name: "cuda" {exact} }} ]'
    yield f"optimization {{ execution_accelerators {{ {accelerator} }} }}"


def notes(job: Packaging, backend: str, library_name: str | None) -> Iterator[str]:
    """Yield what users should know."""
    if library_name:
        sms = job.manifest.options.sms if job.manifest.options else ()
        capabilities = ", ".join(f"{sm / 10:.1f}" for sm in sms)
        yield (
            f"{library_name} was compiled on this machine, for its version of Linux. On GPUs of "
            f"another compute capability than {capabilities} it refuses to run: remove it, and "
            "functions run."
        )
    if library_name and backend == "onnxruntime":
        yield (
            f"Start the server with REPOSITORY/{job.name} in LD_LIBRARY_PATH, where it looks for "
            f"{library_name}."
        )
