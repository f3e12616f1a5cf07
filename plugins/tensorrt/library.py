"""The plugins as one shared library, compiled from ``cpp/`` where TensorRT's headers are found.

trtexec takes it as ``--dynamicPlugins=FILE`` or ``--staticPlugins=FILE``, a C++ program through
``IPluginRegistry::loadLibrary``, and Triton Inference Server as
``--backend-config=tensorrt,plugins=FILE``.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import util
from pathlib import Path

from linexport.errors import BuildError, EnvironmentProblemError

NAME = "liblinexport_tensorrt.so"
SOURCES = Path(__file__).parent / "cpp"

LAUNCHING = Path(__file__).parents[1] / "kernels" / "cpp"

PARTS = ("description", "driver", "modules", "launcher")
"""Sources of what launches kernels, each behind those that it includes."""

TENSORRT_FOLDERS = (
    "/usr/include/x86_64-linux-gnu",
    "/usr/include/aarch64-linux-gnu",
    "/usr/include",
    "/usr/local/tensorrt/include",
    "/opt/tensorrt/include",
)
CUDA_FOLDERS = ("/usr/local/cuda/include", "/usr/include")


def build_library(output: Path, tensorrt: Path | None = None, cuda: Path | None = None) -> Path:
    """Compile the library.

    Args:
        output: the file to write.
        tensorrt: folder of NvInferRuntime.h; None: the usual places.
        cuda: folder of cuda.h; None: the usual places, or that which Triton carries.

    Returns:
        ``output``.

    Raises:
        EnvironmentProblemError: headers, CMake or a compiler are missing.
        BuildError: it does not compile; holds the compiler's words.
    """
    include = _find(
        "NvInferRuntime.h",
        [tensorrt] if tensorrt else [Path(folder) for folder in TENSORRT_FOLDERS],
        "TensorRT's headers come with its packages (libnvinfer-headers-dev, or the tar file), and "
        "are public: github.com/NVIDIA/TensorRT, folder include. Name their folder: --include",
    )
    cuda_include = _find(
        "cuda.h",
        [cuda] if cuda else cuda_folders(),
        "It comes with the CUDA toolkit. Name its folder: --cuda-include",
    )
    cmake = shutil.which("cmake")
    if cmake is None:
        raise EnvironmentProblemError("CMake was not found. Install it: pip install cmake")
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"-DTENSORRT_INCLUDE={include}", f"-DCUDA_INCLUDE={cuda_include}"]
        release = "-DCMAKE_BUILD_TYPE=Release"
        _run([cmake, "-S", str(SOURCES), "-B", folder, release, *settings])
        _run([cmake, "--build", folder])
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = output.with_name(f".{output.name}.partial")
        shutil.copyfile(Path(folder) / NAME, partial)
        partial.replace(output)
    return output


def single_source() -> str:
    """Return the library's source as one file, which one call of a compiler makes the library of.

    Headers come first, each file without the lines that include another of them.
    """
    files = [LAUNCHING / f"{name}.{end}" for end in ("h", "cpp") for name in PARTS]
    parts = [path.read_text(encoding="utf-8") for path in (*files, SOURCES / "plugin.cpp")]
    lines = (line for part in parts for line in part.splitlines())
    kept = [s for s in lines if not s.startswith(('#include "', "#pragma once"))]
    return "\n".join(kept) + "\n"


def cuda_folders() -> list[Path]:
    """Return where cuda.h may be: the usual places, and what Triton carries."""
    usual, triton = [Path(folder) for folder in CUDA_FOLDERS], util.find_spec("triton")
    if triton is None or triton.origin is None:
        return usual
    return [*usual, Path(triton.origin).parent / "backends" / "nvidia" / "include"]


def _find(header: str, folders: Sequence[Path], advice: str) -> Path:
    for folder in folders:
        if (folder / header).is_file():
            return folder.resolve()
    searched = ", ".join(map(str, folders))
    raise EnvironmentProblemError(f"{header} was not found in {searched}. {advice} FOLDER.")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = f"{done.stderr}\n{done.stdout}".strip()
        if "CMAKE_CXX_COMPILER" in said:
            raise EnvironmentProblemError("CMake finds no C++ compiler. Install g++ or clang.")
        raise BuildError(f"The plugin library does not compile:\n{said[:4000]}")
