"""Building a model of diffusers from a folder that was read and found harmless."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch

from linexport.errors import EnvironmentProblemError
from linexport.sources.diffusers.folder import NAME, VERSION
from linexport.sources.files import first_line, refuse
from linexport.sources.hugging_face.folder import CONFIG, check_weights
from linexport.sources.hugging_face.size_limits import limit_size
from linexport.sources.memory_map import mapped_parameters
from linexport.sources.packed import SETTINGS, StoredWeights
from linexport.system.environment import version
from linexport.system.install import pip_install_here
from linexport.system.json_object import JsonObject
from linexport.system.untyped import LibraryObject

EXTRA = PACKAGE = "diffusers"


def built(folder: Path, config: JsonObject, weights: StoredWeights) -> LibraryObject:
    """Return the model of a configuration with its weights, in float32 and in eval mode.

    Args:
        folder: of the model, which errors name.
        config: its configuration, whose class is converted.
        weights: of it, in any precision.

    Raises:
        EnvironmentProblemError: diffusers is not installed, or has no such class.
        UnsupportedModelError: settings that the class does not have or does not take, or weights
            that do not fit.
    """
    name = str(config[NAME])
    kind = _class(name)
    settings = {k: v for k, v in config.items() if not k.startswith("_") and k not in SETTINGS}
    unknown = sorted(settings.keys() - inspect.signature(kind.__init__).parameters.keys())
    if unknown:
        raise refuse(
            folder / CONFIG,
            f"settings that {name} of diffusers {version(PACKAGE)} does not have: "
            f"{', '.join(unknown)}; the folder is of diffusers {config.get(VERSION, 'unknown')}",
            "install that release or a later one, or delete what is not a setting",
        )
    try:
        with (
            torch.random.fork_rng(devices=[]),
            limit_size(folder, weights),
            mapped_parameters(weights.float32_bytes),
        ):
            model = kind(**settings)
    except (TypeError, ValueError, ArithmeticError, LookupError, RuntimeError) as error:
        raise refuse(
            folder / CONFIG,
            f"settings that {name} of diffusers {version(PACKAGE)} does not take "
            f"({first_line(error)})",
            "compare it with that of a published model of the same class",
        ) from error
    _fill(model, folder, weights)
    return model.eval()


def _class(name: str) -> LibraryObject:
    """Return a class of diffusers.

    Raises:
        EnvironmentProblemError: diffusers is not installed, or has no such class.
    """
    try:
        import diffusers
    except ImportError as error:
        raise EnvironmentProblemError(
            f"A model of diffusers needs {error.name}: {pip_install_here(EXTRA)}."
        ) from None
    found = getattr(diffusers, name, None)
    if found is None:
        raise EnvironmentProblemError(
            f"diffusers {version(PACKAGE)} is installed and has no {name}: "
            f"{pip_install_here(EXTRA, '--upgrade')}."
        )
    return found


def _fill(model: torch.nn.Module, folder: Path, weights: StoredWeights) -> None:
    """Copy the weights into a model, one at a time.

    Raises:
        UnsupportedModelError: they are not those of the model.
    """
    own, stored = model.state_dict(), weights.tensors
    check_weights(
        folder,
        own.keys() - stored.keys(),
        [
            (name, stored[name].shape, tensor.shape)
            for name, tensor in own.items()
            if name in stored and stored[name].shape != tuple(tensor.shape)
        ],
        stored.keys() - own.keys(),
    )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(stored[name].read())
