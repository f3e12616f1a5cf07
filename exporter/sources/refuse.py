"""Everything linexport does not read, each with what to do instead."""

from __future__ import annotations

from pathlib import Path

from linexport.errors import LinexportError, UsageError
from linexport.sources.detect import Kind
from linexport.sources.files import FACTORY_ADVICE, refuse
from linexport.sources.own_classes import command_of, weights_advice
from linexport.sources.pickles import globals_named, outside_torch_weights
from linexport.sources.sizes import safetensors_shapes

_TAKES = (
    "Expected a linexport checkpoint (.pt), an exported program (.pt2), an ONNX file or a factory"
)

CONFIG, ADAPTER = "config.json", "adapter_config.json"
NAMED = 5
"""Folders that are named, of those that have a model."""

_GGUF = (
    "`linexport convert` reads it; here, give the folder of the model that it was made of, with "
    "config.json and safetensors"
)

_ADVICE = {
    Kind.OLD_EXPORTED_PROGRAM: "open it with torch.export.load in the torch that wrote it, and "
    "save it again with torch.export.save of torch 2.9 or newer",
    Kind.TORCHSCRIPT: "a TorchScript archive carries code and is not opened; export the original "
    "module with torch.export.save, or " + FACTORY_ADVICE,
    Kind.KERAS: "linexport converts PyTorch models only; rebuild it in PyTorch",
    Kind.NUMPY: f"arrays alone do not say how the model computes; {FACTORY_ADVICE}",
    Kind.OTHER_ZIP: f"no PyTorch model is inside; {_TAKES[0].lower()}{_TAKES[1:]}",
    Kind.DAMAGED_ZIP: "the end of the file is missing or overwritten; copy or download it again",
    Kind.HDF5: "linexport converts PyTorch models only; for Keras weights rebuild the model in "
    "PyTorch",
    Kind.GGUF: _GGUF,
    Kind.LFS_POINTER: "this is a stand-in for the real file; fetch it with `git lfs pull`",
    Kind.EMPTY: "it has no bytes; copy or download it again",
    Kind.UNKNOWN: f"it may be damaged; {_TAKES[0].lower()}{_TAKES[1:]}",
    Kind.ARTIFACT_FOLDER: "it is converted already; use `linexport validate`, `linexport bench` "
    "or `linexport inspect` on it",
    Kind.GGUF_FOLDER: _GGUF,
    Kind.SAVED_MODEL_FOLDER: "linexport converts PyTorch models only; rebuild it in PyTorch",
}


def refusal(path: Path, kind: Kind) -> LinexportError:
    """The error to raise for a path of a kind that is not loaded.

    Returns:
        UsageError for a folder without a model (nothing to judge), UnsupportedModelError else.
    """
    if kind is Kind.OTHER_FOLDER:
        return UsageError(f"{path} is a folder without a model. {_within(path)}")
    if kind is Kind.PICKLE:
        return pickle_refusal(path, globals_named(path))
    if kind is Kind.SAFETENSORS:
        return refuse(path, "weights alone", weights_advice(path, safetensors_shapes(path)))
    if kind is Kind.PYTHON:
        return refuse(path, "Python source", f"name the class or function in it:{command_of(path)}")
    article = "an" if kind.value[0].lower() in "aeiou" else "a"
    return refuse(path, f"{article} {kind.value}", _ADVICE[kind])


def _within(folder: Path) -> str:
    """Return what to give in the place of a folder: those in it that have a model, if any."""
    found = sorted({p.parent.name for name in (CONFIG, ADAPTER) for p in folder.glob(f"*/{name}")})
    if not found:
        return f"{_TAKES}, or a folder with {CONFIG} or {ADAPTER}; give that."
    named = ", ".join(found[:NAMED])
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"Folders in it have one: {named}{more}. Give one of them."


def pickle_refusal(path: Path, names: tuple[str, ...]) -> LinexportError:
    """The error for a pickle, given the importable names it refers to, in order."""
    foreign = outside_torch_weights(names)
    if foreign:
        return refuse(
            path,
            f"a pickle that would import {foreign[0]}, and opening it can run any code. "
            "linexport does not unpickle objects",
            FACTORY_ADVICE,
        )
    return refuse(
        path,
        "a pickle in a format that torch stopped writing with version 1.6",
        f"load and save it again with a current torch, or {FACTORY_ADVICE}",
    )
