"""Check which dependencies are installed and work, and how to get the missing ones."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

from linexport.errors import EnvironmentProblemError
from linexport.plugins import shared_library
from linexport.plugins.cpu import library as cpu_library
from linexport.plugins.cuda import library as cuda_library
from linexport.plugins.tensorrt.flavour import FLAVOURS, Flavour
from linexport.system import environment
from linexport.targets.runtime.providers import PROVIDERS, Execution, is_beside

REQUIRED = ("torch", "onnx", "onnxruntime", "onnx-graphsurgeon", "onnxscript", "numpy", "typer")
EXTRAS = {
    "transformers": "pip install 'linexport[hf]'",
    "starlette": "pip install 'linexport[serve]'",
    "sklearn": "pip install 'linexport[train]'",
}


def examine() -> dict[str, Any]:
    """Versions, providers opened for real, TensorRT flavours, extras, and what is missing."""
    report: dict[str, Any] = {
        "environment": environment.describe(),
        "required": {name: environment.version(name) for name in REQUIRED},
        "providers": _providers(),
        "libraries": {
            cpu_library.TITLE: _library(cpu_library.instruction_set),
            cuda_library.TITLE: _library(cuda_library.version),
        },
        "tensorrt": {name: _flavour(flavour) for name, flavour in FLAVOURS.items()},
        "extras": {name: _module(name) for name in EXTRAS},
        "gpu": _gpu(),
    }
    missing = {
        **{n: f"pip install {n}" for n, v in report["required"].items() if v is None},
        **{n: m["install"] for n, m in report["libraries"].items() if m["version"] is None},
        **{n: FLAVOURS[n].install for n, m in report["tensorrt"].items() if m["version"] is None},
        **{n: EXTRAS[n] for n, m in report["extras"].items() if m["version"] is None},
    }
    report["missing"] = [{"what": n, "install": command} for n, command in missing.items()]
    cpu = next((p for p in report["providers"] if p["name"] == "CPUExecutionProvider"), None)
    report["ok"] = all(report["required"].values()) and bool(cpu and cpu["works"])
    return report


def _library(version: Callable[[], str]) -> dict[str, Any]:
    install = shared_library.INSTALL
    try:
        return {"version": version(), "error": None, "install": install}
    except EnvironmentProblemError as error:
        return {"version": None, "error": str(error), "install": install}


def _flavour(flavour: Flavour) -> dict[str, Any]:
    try:
        return {"version": flavour.version(), "error": None}
    except EnvironmentProblemError as error:
        return {"version": None, "error": str(error).partition(".")[0]}


def _module(name: str) -> dict[str, Any]:
    """Version of an importable module; importing is the test, since wheels can lack libraries."""
    try:
        module = importlib.import_module(name)
        return {"version": str(getattr(module, "__version__", "unknown")), "error": None}
    except ModuleNotFoundError:
        return {"version": None, "error": "not installed"}
    except Exception as error:
        return {"version": None, "error": f"{type(error).__name__}: {error}".splitlines()[0]}


def _providers() -> list[dict[str, Any]]:
    """Every provider of this ONNX Runtime and beside it, each opened and run on a tiny model."""
    try:
        import onnxruntime
    except ImportError:
        return []
    names = onnxruntime.get_available_providers()
    own = {name: partial(onnxruntime.InferenceSession, providers=[name]) for name in names}
    named = {
        provider.ort_name: partial(_open, name)
        for name, provider in PROVIDERS.items()
        if provider.ort_name in names or is_beside(provider)
    }
    return [_try_provider(name, opened) for name, opened in (own | named).items()]


def _open(name: str, model: bytes) -> Any:
    from linexport.targets.base import OrtSession

    return OrtSession(model, execution=Execution(name)).inner


def _try_provider(name: str, opened: Callable[[bytes], Any]) -> dict[str, Any]:
    import numpy as np
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "neg", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    try:
        session = opened(model.SerializeToString())
        (result,) = session.run(["y"], {"x": np.ones(1, np.float32)})
        used = name in session.get_providers()
        if not used:
            raise EnvironmentProblemError("ONNX Runtime fell back to another provider")
        return {"name": name, "works": bool(result[0] == -1), "error": None}
    except Exception as error:
        return {"name": name, "works": False, "error": str(error).splitlines()[0][:200]}


def _gpu() -> str | None:
    """Name and driver of the first NVIDIA GPU, or None."""
    tool = shutil.which("nvidia-smi")
    if tool is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    done = subprocess.run(
        [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None
