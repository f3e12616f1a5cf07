"""The plugin library and run.cpp of prepared folders, compiled with TensorRT's headers."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from linexport.plugins.tensorrt import library
from linexport.targets.trt import prepared
from tests.support import environments

VARIABLE = "LINEXPORT_TENSORRT_INCLUDE"
"""Environment variable that names folders of headers, with ``:`` between them."""

FLAGS = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden")


def folders() -> list[Path]:
    """Return the folders that the environment names, or that of a package which has headers."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    named = [Path(p) for p in os.environ.get(VARIABLE, "").split(":") if p]
    return named or [environments.made("headers") / "kernel_lens/include/tensorrt"]


def version(include: Path) -> str:
    """Return the version that NvInferVersion.h defines, as in 10.3.0.26."""
    text = (include / "NvInferVersion.h").read_text(encoding="utf-8")
    found = dict(re.findall(r"#define (\w+) (\w+)", text))
    names = [found[f"NV_TENSORRT_{part}"] for part in ("MAJOR", "MINOR", "PATCH", "BUILD")]
    return ".".join(found.get(name, name) for name in names)


def of_cuda() -> Path:
    """Return a folder that has cuda.h."""
    return next(f for f in library.cuda_folders() if (f / "cuda.h").is_file())


def compiled(folder: Path, include: Path, output: Path) -> Path:
    """Compile both sources of a prepared folder.

    Args:
        folder: the prepared folder.
        include: folder of TensorRT's headers.
        output: the plugin library to write.

    Raises:
        subprocess.CalledProcessError: there are errors or warnings; has them as ``stderr``.
    """
    command = ["c++", *FLAGS, "-isystem", str(include), "-isystem", str(of_cuda())]
    for name, made in ((prepared.CPP, Path(os.devnull)), (prepared.SOURCE, output)):
        words = [*command, str(folder / name), "-o", str(made), "-ldl"]
        subprocess.run(words, check=True, capture_output=True, text=True)
    return output


def creators(made: Path) -> int:
    """Return how many creators of plugins a library hands to TensorRT."""
    count = ctypes.c_int32()
    get = ctypes.CDLL(str(made)).getCreators
    get.restype = ctypes.c_void_p
    assert get(ctypes.byref(count))
    return count.value
