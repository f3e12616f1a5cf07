"""A linexport checkpoint (``.pt``) becomes a LoadedModel.

The format is that of `linexport.models.checkpoint`, which builds the module from name and config.
Here the file is read under torch's weights_only rules, checked, and distinguished from everything
else that torch.save writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from linexport.errors import LinexportError, UnsupportedModelError, UsageError
from linexport.sources.archive import TorchArchive
from linexport.sources.files import FACTORY_ADVICE, first_line, refuse, sha256, unreadable
from linexport.sources.linearized import NAME, original_of
from linexport.sources.loaded_model import LoadedModel, Source
from linexport.sources.own_classes import weights_advice
from linexport.sources.pickles import UnsafePickleError, load_plain
from linexport.sources.state_dicts import SAVE_WEIGHTS, pickled, shapes_of, state_dict_of
from linexport.sources.weights import (
    check_finite,
    mismatches,
    named_tensors,
    parameter_summary,
)
from linexport.system.json_object import JsonObject

if TYPE_CHECKING:
    import torch

    from linexport.models.registry import ReferenceModel

# Two of each: torch.export takes a dim of size 1 for a constant.
_EXAMPLE_BATCH = 2
# Several chunks: where an example fits into one, a plain export of the module, which everything is
# measured against, takes the one for a constant and is wrong at every other length.
_EXAMPLE_LENGTH = 100
_LISTED = 4
_AGAIN = "copy or download it again"
_SAVE = "write it with linexport.models.save(module, path)"


def load_checkpoint_file(path: Path, *, seed: int) -> LoadedModel:
    """Load a linexport checkpoint; recognise and refuse other torch.save files.

    Args:
        path: of the file, a zip with a ``data.pkl``.
        seed: of the example inputs.

    Returns:
        The module in eval mode, with the inputs and dims it declares itself.

    Raises:
        UnsupportedModelError: another kind of torch.save file, damaged, of a newer linexport, or
            weights that do not fit the model.
        UsageError: the file cannot be read.
    """
    digest = sha256(path)
    content = _content(path)
    module = _module(path, content)
    check_finite(named_tensors(module), str(path))
    return LoadedModel(
        module=module,
        args=module.example_inputs(_EXAMPLE_BATCH, _EXAMPLE_LENGTH, seed),
        kwargs={},
        dynamic_shapes=module.dynamic_shapes(),
        source=Source(
            kind="checkpoint",
            location=str(path),
            sha256=digest,
            description=parameter_summary(content["model"], module),
            linearized=original_of(content.get(NAME)),
        ),
        integer_ranges=module.integer_ranges(),
    )


def _content(path: Path) -> JsonObject:
    """Return the checked dict of the file."""
    from linexport.models.checkpoint import FORMAT

    try:
        TorchArchive(path)
        loaded = load_plain(path)
    except UnsafePickleError as error:
        name = error.name or "an object"
        raise refuse(
            path,
            f"a pickled module or other object (it would import {name}), and opening it can run "
            "any code",
            _pickled_advice(path),
        ) from error
    except UnsupportedModelError as error:
        raise refuse(path, f"a damaged torch.save file: {error}", _AGAIN) from error
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:  # a damaged file fails in many ways inside torch
        raise refuse(path, f"a damaged torch.save file ({first_line(error)})", _AGAIN) from error
    if not isinstance(loaded, dict) or loaded.get("format") != FORMAT:
        weights = state_dict_of(path, loaded)
        advice = FACTORY_ADVICE if weights is None else weights_advice(path, shapes_of(weights))
        raise refuse(path, _kind_of(loaded), advice)
    return _checked(path, loaded)


def _pickled_advice(path: Path) -> str:
    try:
        found = pickled(path)
        return weights_advice(path, found.shapes, found.class_name)
    except (UnsupportedModelError, UsageError):
        return SAVE_WEIGHTS


def _kind_of(loaded: object) -> str:
    """Describe a torch.save file without linexport's mark."""
    import torch

    if isinstance(loaded, torch.Tensor):
        return "a single tensor, which does not say how the model computes"
    if not isinstance(loaded, dict):
        return f"a torch.save file of a {type(loaded).__name__}, not a linexport checkpoint"
    if loaded and all(isinstance(value, torch.Tensor) for value in loaded.values()):
        return f"a state_dict of {len(loaded)} tensors, which does not say how the model computes"
    keys = ", ".join(repr(key) for key in list(loaded)[:_LISTED])
    return f"a training checkpoint (with {keys or 'nothing in it'}), not a linexport checkpoint"


def _checked(path: Path, loaded: JsonObject) -> JsonObject:
    import torch

    from linexport.models.checkpoint import VERSION

    version = loaded.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise refuse(path, f"a linexport checkpoint with version {version!r}", _AGAIN)
    if version > VERSION:
        raise refuse(
            path,
            f"a linexport checkpoint of format version {version}; this linexport reads up to "
            f"{VERSION}",
            "update linexport",
        )
    for key, kind in (("model", str), ("config", dict), ("state_dict", dict)):
        if not isinstance(loaded.get(key), kind):
            found = type(loaded.get(key)).__name__ if key in loaded else "nothing"
            raise refuse(
                path,
                f"a linexport checkpoint whose {key!r} is {found}, not a {kind.__name__}",
                _SAVE,
            )
    weights = loaded["state_dict"]
    if not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in weights.items()):
        raise refuse(path, "a linexport checkpoint whose state_dict is not all tensors", _AGAIN)
    return loaded


def _module(path: Path, content: JsonObject) -> ReferenceModel:
    """Return the model of the config with the weights of the file, in eval mode."""
    import torch

    # On the meta device first: a config may ask for more memory than its weights need.
    with torch.device("meta"):
        _compare(path, _build(path, content), content["state_dict"])
    module = _build(path, content)
    try:
        # A plain dict: attributes of an OrderedDict in the file are not part of the format.
        module.load_state_dict(dict(content["state_dict"]))
    except RuntimeError as error:  # sparse or quantised tensors
        raise refuse(path, f"weights that cannot be copied ({first_line(error)})", _SAVE) from error
    return module.eval()


def _build(path: Path, content: JsonObject) -> ReferenceModel:
    from linexport.models.checkpoint import build

    try:
        return build(content["model"], content["config"])
    except LinexportError as error:
        raise UnsupportedModelError(
            f"{path}: the model of this checkpoint cannot be built. {error} If a newer linexport "
            "wrote it, update linexport."
        ) from error
    except (TypeError, ValueError, KeyError, RuntimeError, MemoryError) as error:
        raise refuse(
            path,
            f"a checkpoint of {content['model']!r} whose config cannot be built "
            f"({first_line(error)})",
            "compare the config with the fields of the model's Config",
        ) from error


def _compare(path: Path, module: ReferenceModel, weights: dict[str, torch.Tensor]) -> None:
    problems = mismatches(module.state_dict(), weights)
    if problems:
        more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise refuse(
            path,
            "weights that do not fit the model its config describes: "
            f"{'; '.join(problems[:_LISTED])}{more}",
            _SAVE,
        )
