"""Reference models by name: one file per model, found by scanning this folder.

A model is a subclass of ``ReferenceModel`` with a ``name`` and a ``Config`` dataclass; subclassing
registers it. Everything needed to rebuild one is its name, its ``config`` dict and its weights.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from torch import Tensor, nn

from linexport.errors import UsageError

_models: dict[str, type[ReferenceModel]] = {}

C = TypeVar("C")


class ReferenceModel(nn.Module, ABC):
    """A complete model that says how to rebuild it and how to trace it.

    Class attributes:
        name: what checkpoints and users call it.
        Config: a dataclass of JSON types; the only argument of the constructor.

    Attributes:
        config: the fields of ``Config``, as a plain dict.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            _models[cls.name] = cls

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config: dict[str, Any] = asdict(config)

    @abstractmethod
    def example_inputs(self, batch: int, length: int, seed: int) -> tuple[Tensor, ...]:
        """Arguments of ``forward``; ``length`` is left aside where it is fixed."""

    @abstractmethod
    def dynamic_shapes(self) -> tuple[Any, ...]:
        """One entry per argument of ``forward``, as ``torch.export`` takes them."""

    def integer_ranges(self) -> dict[int, tuple[int, int]]:
        """Half-open range of each integer input, by its position among the flattened inputs."""
        return {}


def names() -> list[str]:
    """Names of all models, sorted."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{module.name}")
    return sorted(_models)


def build(name: str, config: Mapping[str, Any]) -> ReferenceModel:
    """A freshly initialised model.

    Raises:
        UsageError: no such model, or a key of config that is unknown, missing or of the wrong type.
    """
    known = [name] if name in _models else names()
    if name not in known:
        raise UsageError(
            f"Unknown model {name!r}; expected one of {', '.join(known)}.{_nearest(name, known)}"
        )
    return _models[name](parse(_models[name].Config, config, name))


def parse(kind: type[C], values: Mapping[str, Any], owner: str) -> C:
    """The dataclass ``kind`` from a plain dict; its integers are sizes and counts, at least 1.

    Raises:
        UsageError: names every key that does not fit, and the known ones.
    """
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    problems = [f"unknown key {k!r}.{_nearest(k, known)}" for k in values if k not in known]
    problems += [
        f"missing key {k!r}."
        for k, f in known.items()
        if k not in values and f.default is MISSING and f.default_factory is MISSING
    ]
    for key, value in values.items():
        if key in known and not _fits(value, hints[key]):
            wanted = getattr(hints[key], "__name__", str(hints[key])).replace("int", "int >= 1")
            problems.append(f"{key!r} is {value!r}; expected {wanted}.")
    if problems:
        raise UsageError(f"Config of {owner}: {' '.join(problems)} Known keys: {', '.join(known)}.")
    return kind(**values)


def _fits(value: Any, hint: Any) -> bool:
    """Exactly the type, so that a bool is no int; an int, as JSON writes 1.0, is also a float."""
    kinds = get_args(hint) or (hint,)
    if type(value) is int and int in kinds:
        return value >= 1
    return type(value) in kinds or (type(value) is int and float in kinds)


def _nearest(name: Any, known: Any) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
