"""Example inputs of an exported program, the one pickle that is read from it.

torch falls back to unrestricted unpickling when the restricted way fails, so the restricted way
must be seen to succeed on the same bytes. Keys and strings among the inputs end up in generated
source (see `names`), so they are checked as well.
"""

from __future__ import annotations

from typing import Any

from linexport.errors import UnsupportedModelError
from linexport.sources.archive import TorchArchive
from linexport.sources.files import first_line
from linexport.sources.pickles import UnsafePickleError, load_plain
from linexport.sources.pt2.source_strings import label, shorten

_MISSING = (
    "it has no example inputs, which every check needs; export it with torch.export.export(module, "
    "args) and save it without changing program.example_inputs"
)


def check_example_inputs(data: bytes) -> None:
    """Check the pickle and what it holds.

    Raises:
        UnsupportedModelError: absent, unsafe, damaged, or anything but tensors, numbers and None
            in tuples, lists and dictionaries.
    """
    if not data:
        raise UnsupportedModelError(_MISSING)
    TorchArchive(data)
    try:
        inputs = load_plain(data)
    except UnsafePickleError as error:
        raise UnsupportedModelError(
            f"its example inputs are a pickle that would import {error.name or 'objects'}, and "
            "opening it can run any code; export with tensors only"
        ) from error
    except Exception as error:  # a damaged file fails in many ways inside torch
        raise UnsupportedModelError(
            f"its example inputs are damaged ({first_line(error)})"
        ) from error
    if not (isinstance(inputs, tuple) and len(inputs) == 2):
        raise UnsupportedModelError(_MISSING)
    args, kwargs = inputs
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise UnsupportedModelError(_MISSING)
    _check(inputs)


def _check(value: Any) -> None:
    import torch

    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                label(key)
            elif not isinstance(key, int):
                raise UnsupportedModelError(f"its example inputs have the key {shorten(key)}")
            _check(item)
    elif isinstance(value, tuple | list):
        for item in value:
            _check(item)
    elif isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
            raise UnsupportedModelError(f"an example input is a {type(value).__name__}")
    elif value is not None and not isinstance(value, bool | int | float):
        raise UnsupportedModelError(
            f"an example input is {shorten(value)}; tensors, numbers and None are read"
        )
