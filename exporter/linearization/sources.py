"""Inputs named on the command line: a model, and calibration data."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linexport.errors import UnsupportedModelError, UsageError
from linexport.sources import load_model
from linexport.sources.callables import find_callable, user_code
from linexport.sources.loaded_model import LoadedModel

EXAMPLES = 2
"""Rows that stand for example inputs."""

USUAL = {torch.float64: torch.float32, torch.uint8: torch.int64, torch.uint16: torch.int64}
"""Types that numpy and files of tokens have, and those that modules take."""


def source(name: str, seed: int, data: tuple[Any, ...]) -> LoadedModel:
    """The model, in PyTorch.

    Args:
        name: of a file, a folder or a function.
        seed: of weights that a function draws.
        data: calibration data, whose first rows are example inputs of a module without any.

    Raises:
        UnsupportedModelError: an ONNX file.
        LinexportError: see ``load_model``.
    """
    examples = tuple(
        x[:EXAMPLES].to(USUAL.get(x.dtype, x.dtype))
        for x in data
        if isinstance(x, Tensor) and x.dim()
    )
    loaded = load_model(name, seed=seed, whole=True, examples=examples)
    if loaded.graph is not None:
        raise UnsupportedModelError(
            f"{name} is an ONNX graph, whose softmax attention cannot be distinguished and fine-"
            "tuned. Give the PyTorch model it was made from."
        )
    return loaded


def rows(name: str, kind: str = "calibration data") -> tuple[Any, ...]:
    """Arguments of the model, in order: of a ``.npz`` file, or what a function returns.

    Args:
        name: of the file or the function.
        kind: what they are called in errors.

    Raises:
        UsageError: the file or function does not exist, or it fails.
    """
    path = Path(name)
    if path.suffix != ".npz" and ":" in name:
        function = find_callable(name, "a function without arguments that returns tensors")
        with user_code(f"{name} failed"):
            found = function()
        return (found,) if isinstance(found, Tensor) else tuple(found)
    try:
        if path.is_file() and not zipfile.is_zipfile(path):
            raise ValueError("it is not an .npz archive")
        with np.load(path, allow_pickle=False) as file:
            return tuple(torch.from_numpy(file[key]) for key in file.files)
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise UsageError(
            f"{name} cannot be read as {kind} ({error}). Write it with numpy.savez, one "
            "array for each argument of the model, in order, or name package.module:callable."
        ) from error
