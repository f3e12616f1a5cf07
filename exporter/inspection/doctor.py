"""Check what is installed and works here, what each part is for, and how to get the rest."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from linexport.errors import EnvironmentProblemError
from linexport.plugins import shared_library
from linexport.plugins.cpu import library as cpu_library
from linexport.plugins.cuda import library as cuda_library
from linexport.plugins.tensorrt.flavour import FLAVOURS, Flavour
from linexport.system import environment
from linexport.system.install import pip_install
from linexport.system.json_object import JsonObject
from linexport.targets.runtime.providers import (
    CUDA,
    PROVIDERS,
    Execution,
    install_command,
    is_beside,
)

REQUIRED = ("torch", "onnx", "onnxruntime", "onnx-graphsurgeon", "onnxscript", "numpy", "typer")


@dataclass(frozen=True)
class Extra:
    """An optional dependency.

    Attributes:
        extra: of linexport, that installs it.
        purpose: what one would want it for.
    """

    extra: str
    purpose: str

    @property
    def install(self) -> str:
        """The command that installs it."""
        return pip_install(self.extra)


EXTRAS = {
    "transformers": Extra("hf", "convert Hugging Face model folders"),
    "gguf": Extra("gguf", "convert GGUF files"),
    "PIL": Extra("images", "give images to models with a vision tower"),
    "starlette": Extra("serve", "serve artifacts to many clients: linexport serve"),
    "cryptography": Extra("sign", "sign artifacts, and verify those of others"),
    "onnxruntime_genai": Extra("genai", "run what package --for genai writes"),
    "sklearn": Extra("train", "train the examples"),
}
PURPOSES = {
    cpu_library.TITLE: "run linear attention and quantised weights fast on this CPU",
    cuda_library.TITLE: "run artifacts of target ort-cuda by linexport's kernels",
}
NEEDED = "linexport does not run without it"


def examine() -> dict[str, object]:
    """Versions, providers opened for real, TensorRT flavours, extras, and what is missing."""
    report: JsonObject = {
        "environment": environment.describe(),
        "required": {name: environment.version(name) for name in REQUIRED},
        "providers": _providers(),
        "libraries": {
            cpu_library.TITLE: _library(cpu_library.TITLE, cpu_library.instruction_set),
            cuda_library.TITLE: _library(cuda_library.TITLE, cuda_library.version),
        },
        "tensorrt": {name: _flavour(flavour) for name, flavour in FLAVOURS.items()},
        "extras": {
            name: {**_module(name), "install": extra.install, "purpose": extra.purpose}
            for name, extra in EXTRAS.items()
        },
        "gpu": _gpu(),
    }
    report["ok"] = all(report["required"].values()) and "CPUExecutionProvider" in _working(report)
    report["usable"] = list(_usable(report))
    report["missing"] = list(_missing(report))
    return report


def parts(report: JsonObject) -> dict[str, JsonObject]:
    """Return what may be missing, besides what linexport needs: libraries, TensorRT, extras."""
    return {**report["libraries"], **report["tensorrt"], **report["extras"]}


def _working(report: JsonObject) -> set[str]:
    return {provider["name"] for provider in report["providers"] if provider["works"]}


def _usable(report: JsonObject) -> Iterator[str]:
    """Yield what this machine can do, with the parts that work."""
    if report["ok"]:
        yield "convert models, and run artifacts on the CPU"
    working = _working(report)
    for provider in PROVIDERS.values():
        if provider.ort_name in working:
            yield provider.purpose
    works = {name: part["version"] is not None for name, part in report["libraries"].items()}
    works[cuda_library.TITLE] &= PROVIDERS[CUDA].ort_name in working
    for name, flavour in FLAVOURS.items():
        found = report["tensorrt"][name]["version"] is not None
        works[name] = found and (report["gpu"] is not None or not flavour.on_gpu)
    works |= {name: part["version"] is not None for name, part in report["extras"].items()}
    for name, part in parts(report).items():
        if works[name]:
            yield part["purpose"]


def _missing(report: JsonObject) -> Iterator[dict[str, str]]:
    """Yield what is not installed: its name, what one would want it for, what installs it."""
    for name, version in report["required"].items():
        if version is None:
            yield {"what": name, "why": NEEDED, "install": f"pip install {name}"}
    for name, part in parts(report).items():
        if part["version"] is None:
            yield {"what": name, "why": part["purpose"], "install": part["install"]}
    here = {provider["name"] for provider in report["providers"]}
    for name, provider in PROVIDERS.items():
        if provider.ort_name not in here:
            yield {
                "what": f"--provider {name}",
                "why": provider.purpose,
                "install": install_command(provider),
            }


def _library(title: str, version: Callable[[], str]) -> dict[str, object]:
    more = {"install": shared_library.INSTALL, "purpose": PURPOSES[title]}
    try:
        return {"version": version(), "error": None, **more}
    except EnvironmentProblemError as error:
        return {"version": None, "error": str(error), **more}


def _flavour(flavour: Flavour) -> dict[str, object]:
    purpose = f"build engines of target {flavour.name}, which run on NVIDIA GPUs"
    more = {"install": flavour.install, "purpose": purpose}
    try:
        return {"version": flavour.version(), "error": None, **more}
    except EnvironmentProblemError as error:
        return {"version": None, "error": str(error).partition(".")[0], **more}


def _module(name: str) -> JsonObject:
    """Version of an importable module; importing is the test, since wheels can lack libraries."""
    try:
        module = importlib.import_module(name)
        return {"version": str(getattr(module, "__version__", "unknown")), "error": None}
    except ModuleNotFoundError:
        return {"version": None, "error": "not installed"}
    except Exception as error:
        return {"version": None, "error": f"{type(error).__name__}: {error}".splitlines()[0]}


def _providers() -> list[dict[str, object]]:
    """Return every provider, in this ONNX Runtime or a plugin, opened and run on a tiny model."""
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


def _try_provider(name: str, opened: Callable[[bytes], Any]) -> dict[str, object]:
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
