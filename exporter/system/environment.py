"""The machine and the libraries a result was obtained with."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from linexport.system.json_object import JsonObject

LIBRARIES = ("torch", "onnx", "onnxruntime", "onnx-graphsurgeon", "onnxscript", "numpy")


def version(distribution: str) -> str | None:
    """Installed version, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def describe() -> JsonObject:
    """Return versions and machine as the manifest has them."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
        "platform": platform.platform(terse=True),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
