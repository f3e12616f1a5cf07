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


def source(name: str, seed: int) -> LoadedModel:
    """The model, in PyTorch.

    Raises:
        UnsupportedModelError: an ONNX file.
        LinexportError: see ``load_model``.
    """
    loaded = load_model(name, seed=seed, whole=True)
    if loaded.graph is not None:
        raise UnsupportedModelError(
            f"{name} is an ONNX graph, whose softmax attention cannot be distinguished and fine-"
            "tuned. Give the PyTorch model it was made from."
        )
    return loaded


def rows(name: str) -> tuple[Any, ...]:
    """Arguments of the model, in order: of a ``.npz`` file, or what a function returns.

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
            f"{name} cannot be read as calibration data ({error}). Write it with numpy.savez, one "
            "array for each argument of the model, in order, or name package.module:callable."
        ) from error
