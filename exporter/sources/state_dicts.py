"""Weights of a file, as data, for a module that the user's own code builds.

    torch.save(model.state_dict())    tensors by name
    torch.save({"model": ..., ...})   a training checkpoint with one state_dict in it
    torch.save(model)                 a pickled module: its tensors; its classes are not imported
    safetensors                       tensors by name

Nothing in the file is run. Classes that a pickled module names become empty ones, which hold what
the file says of their objects.
"""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linexport.errors import EnvironmentProblemError, UnsupportedModelError, UsageError
from linexport.sources.archive import TorchArchive
from linexport.sources.callables import without_arguments
from linexport.sources.detect import Kind, recognise
from linexport.sources.files import first_line, refuse
from linexport.sources.pickles import UnsafePickleError, load_plain
from linexport.sources.weights import mismatches

if TYPE_CHECKING:
    import torch

LISTED = 4
COMPILED = "_orig_mod"
"""Name in which ``torch.compile`` keeps the module that it was given."""

SAVE_WEIGHTS = (
    'write its weights where you have the model, by torch.save(model.state_dict(), "weights.pt"), '
    "and give that file"
)
_EXPECTED = "Expected a file of torch.save or of safetensors"


@dataclass(frozen=True)
class StateDict:
    """Tensors of a file.

    Attributes:
        tensors: by name.
        class_name: package.module.Name of a pickled module; None of other files.
    """

    tensors: Mapping[str, torch.Tensor]
    class_name: str | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Sizes of the tensors."""
        return shapes_of(self.tensors)


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the sizes of tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


class _Empty:
    """An object of a pickled module, whose class is not imported."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def load_weights(module: torch.nn.Module, path: str | Path, location: str) -> None:
    """Give a module the weights of a file, all of which must fit.

    Args:
        module: it.
        path: of the file.
        location: what the user calls the module.

    Raises:
        UsageError: the file cannot be read, or has other weights than the module.
        UnsupportedModelError: it is of another kind, or damaged.
    """
    file = Path(path)
    weights = dict(read_weights(file).tensors)
    expected = {name: tensor for name, tensor in module.state_dict().items() if _is_tensor(tensor)}
    weights = _without_prefix(weights, expected)
    tied = _tied(expected)
    weights |= {
        name: weights[other]
        for names in tied
        for name in names
        for other in names
        if name not in weights and other in weights
    }
    wrong = [*mismatches(expected, weights), *_untied(tied, weights)]
    if wrong:
        more = f"; and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise UsageError(
            f"The weights of {file} do not fit {location}: {'; '.join(wrong[:LISTED])}{more}. "
            f"{_advice(module, location, _sizes(expected, weights))}"
        )
    try:
        module.load_state_dict(weights, strict=False)  # what is no tensor is not of the file
    except RuntimeError as error:  # lazy, sparse or quantised tensors
        raise UsageError(
            f"The weights of {file} cannot be copied into {location}: {first_line(error)}. Load "
            "them in a function without arguments that returns the module, and name that."
        ) from error


def read_weights(path: Path) -> StateDict:
    """Return the tensors of a file.

    Raises:
        UsageError: it is not there, cannot be read, or has several state_dicts.
        UnsupportedModelError: it has none, or is damaged.
    """
    if not path.exists():
        raise UsageError(f"--state-dict {path}: there is no such file. {_EXPECTED}.")
    kind = recognise(path)
    if kind is Kind.SAFETENSORS:
        return StateDict(_safetensors(path))
    if kind is not Kind.TORCH_ZIP:
        raise refuse(path, f"{kind.value}, not weights", f"{_EXPECTED}: {SAVE_WEIGHTS}")
    try:
        TorchArchive(path)
        return _found(path, load_plain(path))
    except UnsafePickleError:
        return pickled(path)
    except (UnsupportedModelError, UsageError):
        raise
    except Exception as error:  # a damaged file fails in many ways inside torch
        raise refuse(
            path, f"a damaged torch.save file ({first_line(error)})", "copy or download it again"
        ) from error


def state_dict_of(path: Path, loaded: Any) -> Mapping[str, torch.Tensor] | None:
    """Return the state_dict of what a file holds: it, or the only one in it; None without any.

    Raises:
        UsageError: there are several.
    """
    if _is_state_dict(loaded):
        return dict(loaded)
    if not isinstance(loaded, dict):
        return None
    inner = {str(key): value for key, value in loaded.items() if _is_state_dict(value)}
    if len(inner) > 1:
        raise UsageError(
            f"{path} has several state_dicts: {', '.join(list(inner)[:LISTED])}. Write the one you "
            'mean: torch.save(torch.load(PATH, weights_only=True)["NAME"], "weights.pt").'
        )
    return dict(*inner.values()) if inner else None


def pickled(path: Path) -> StateDict:
    """Return the tensors of a pickled module.

    Raises:
        UnsupportedModelError: it holds something else, or asks for what is blocked.
    """
    import torch

    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        empty: list[Any] = [(type(name, (_Empty,), {}), name) for name in names]
        with torch.serialization.safe_globals(empty):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(loaded, _Empty):
            return StateDict(dict(_of_module(loaded, "", 0)), type(loaded).__name__)
        return _found(path, loaded)
    except (UnsupportedModelError, UsageError):
        raise
    except (pickle.UnpicklingError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise refuse(
            path, f"a pickle that is not read as data ({first_line(error)})", SAVE_WEIGHTS
        ) from error


def _found(path: Path, loaded: Any) -> StateDict:
    if isinstance(loaded, dict):  # a module that was saved with other things
        inner = [value for value in loaded.values() if isinstance(value, _Empty)]
        modules = [value for value in inner if hasattr(value, "_modules")]
        if len(modules) == 1 and state_dict_of(path, loaded) is None:
            return StateDict(dict(_of_module(modules[0], "", 0)), type(modules[0]).__name__)
    tensors = state_dict_of(path, loaded)
    if tensors is None:
        raise refuse(
            path, f"a torch.save file of a {type(loaded).__name__} without weights", SAVE_WEIGHTS
        )
    return StateDict(tensors)


DEEPEST = 100
"""Levels of modules in modules."""


def _of_module(module: Any, prefix: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers as a state_dict has them."""
    if depth > DEEPEST:
        raise ValueError("modules contain themselves")
    kept = vars(module)
    for name, value in {**_dict(kept, "_parameters"), **_dict(kept, "_buffers")}.items():
        if _is_tensor(value) and name not in kept.get("_non_persistent_buffers_set", ()):
            yield f"{prefix}{name}", value
    for name, value in _dict(kept, "_modules").items():
        if isinstance(value, _Empty):
            yield from _of_module(value, f"{prefix}{name}.", depth + 1)


def _dict(kept: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = kept.get(name)
    return found if isinstance(found, dict) else {}


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise EnvironmentProblemError(
            f"{path} is of safetensors, which is not installed: pip install safetensors."
        ) from None
    try:
        found: dict[str, torch.Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise refuse(
            path, f"a damaged safetensors file ({first_line(error)})", "copy or download it again"
        ) from error
    return found


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _is_state_dict(value: Any) -> bool:
    if not isinstance(value, dict) or not value:
        return False
    return all(isinstance(k, str) and _is_tensor(v) for k, v in value.items())


def _without_prefix(
    weights: dict[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return weights without what a wrapper puts before all names: ``module.``, ``_orig_mod.``.

    ``torch.compile`` of parts puts the latter into names as well.
    """
    own = {name.partition(".")[0] for name in expected}
    if COMPILED not in {part for name in expected for part in name.split(".")}:
        weights = {
            ".".join(part for part in name.split(".") if part != COMPILED): tensor
            for name, tensor in weights.items()
        }
    while weights:
        first = {name.partition(".")[0] for name in weights}
        if len(first) > 1 or first <= own or not all("." in name for name in weights):
            break
        weights = {name.partition(".")[2]: tensor for name, tensor in weights.items()}
    return weights


def _tied(expected: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of each tensor that a module has under several names."""
    import torch
    from torch.nn.parameter import is_lazy

    found: dict[object, list[str]] = {}
    for name, tensor in expected.items():
        stored = not (tensor.is_meta or is_lazy(tensor)) and tensor.layout is torch.strided
        if stored and tensor.numel():
            place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            found.setdefault(place, []).append(name)
    return [names for names in found.values() if len(names) > 1]


def _untied(tied: list[list[str]], weights: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield where a file has two values for what is one tensor in the module."""
    import torch

    for first, *others in tied:
        for name in (name for name in others if first in weights and name in weights):
            if not torch.equal(weights[first], weights[name]):
                yield f"{first} and {name} are one tensor in the model, and differ here"


def _sizes(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> dict[int, int]:
    """Return sizes of a module that are always the same other ones in a file."""
    pairs = {
        pair
        for name, tensor in expected.items()
        if name in found and found[name].dim() == tensor.dim()
        for pair in zip(tensor.shape, found[name].shape, strict=True)
    }
    sizes = [size for size, _ in pairs]
    return {size: other for size, other in pairs if sizes.count(size) == 1 and size != other}


def _advice(module: torch.nn.Module, location: str, sizes: Mapping[int, int]) -> str:
    """Return how to name the class, with sizes of its constructor's arguments where known."""
    taken = inspect.signature(type(module)).parameters
    names = [name for name in taken if name not in ("args", "kwargs")]
    known = {name: sizes[p.default] for name, p in taken.items() if _is_size(p.default, sizes)}
    own, kind = without_arguments(location), type(module).__name__
    is_class = re.split("[:.]", own)[-1] == kind
    place = own if is_class else kind
    if known:
        given = ", ".join(f"{name}={size}" for name, size in known.items())
        return f"By their sizes they are of '{place}({given})'."
    if not is_class:
        return f"Let {own} return the {kind} that these weights are of, with the sizes it had."
    if not names:
        return "Name the class that these weights are of, as it was then."
    return (
        "Name the class that these weights are of, with the arguments it had: "
        f"'{place}({', '.join(f'{name}=...' for name in names)})'."
    )


def _is_size(default: object, sizes: Mapping[int, int]) -> bool:
    return isinstance(default, int) and not isinstance(default, bool) and default in sizes
