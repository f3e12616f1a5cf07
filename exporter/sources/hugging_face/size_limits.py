"""Bound on a configuration's sizes by the weights present, checked before memory is taken.

    parameters registered <= 2^24 + 4 n
    values of buffers     <= 2^26 + 4 n,    n = max(bytes of the weights / 2, their values)

The factor allows for parameters that are registered more than once, and that are shared or made
again; the constants, for what small models hold beside their weights: a mask of 2048 x 2048 in each
layer, say. transformers builds a model without memory first, then computes its buffers in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from linexport.sources.files import refuse
from linexport.sources.packed import StoredWeights

if TYPE_CHECKING:
    import torch

_SLACK = {"parameters": 2**24, "values of buffers": 2**26}
_MOST_LAYERS = 10_000
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


@contextmanager
def limit_size(folder: Path, weights: StoredWeights) -> Iterator[None]:
    """Refuse a model while it is built, once it has more values than its weights could fill.

    Args:
        folder: of the model, which the refusal names.
        weights: of it.

    Raises:
        UnsupportedModelError: see above.
    """
    from torch.nn.modules import module as hooks

    filled = 4 * weights.size

    def counter(what: str) -> Callable[[torch.nn.Module, str, torch.Tensor | None], None]:
        most, count = _SLACK[what] + filled, 0

        def register(module: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
            nonlocal count
            count += 0 if tensor is None else tensor.numel()
            if count > most:
                raise refuse(
                    folder,
                    f"a configuration of more than {most:,} {what}, which the weights beside it "
                    "cannot fill",
                    "compare the configuration with the weights",
                )

        return register

    with (
        hooks.register_module_parameter_registration_hook(counter("parameters")),
        hooks.register_module_buffer_registration_hook(counter("values of buffers")),
    ):
        yield


def check_layers(path: Path, config: Mapping[str, object]) -> None:
    """Refuse a number of layers for which the library would make lists without end.

    Raises:
        UnsupportedModelError: more than 10,000.
    """
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in _LAYERS:
            found = part.get(key)
            if isinstance(found, int | float) and found > _MOST_LAYERS:
                raise refuse(
                    path,
                    f"{key} is {found:,}; expected at most {_MOST_LAYERS:,}",
                    "take the folder as its author published it",
                )
