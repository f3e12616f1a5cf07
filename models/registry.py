"""Reference models by name: one file per model, found by scanning this folder.

A model is a subclass of ``ReferenceModel`` with a ``name`` and a ``Config`` dataclass; subclassing
registers it. Everything needed to rebuild one is its name, its ``config`` dict and its weights.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

from torch import Tensor, nn

from linexport.errors import UsageError
from linexport.models.config import did_you_mean, parse
from linexport.system.untyped import DynamicShapes

_models: dict[str, type[ReferenceModel]] = {}


class ReferenceModel(nn.Module, ABC):
    """A complete model that says how to rebuild it and how to trace it.

    Class attributes:
        name: what checkpoints and users call it.
        Config: a dataclass of JSON types; the only argument of the constructor.
        gives_classes: its output are logits of classes, along the last dimension.

    Attributes:
        config: the fields of ``Config``, as a plain dict.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Any]]
    gives_classes: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: object) -> None:
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
    def dynamic_shapes(self) -> DynamicShapes:
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


def build(name: str, config: Mapping[str, object]) -> ReferenceModel:
    """A freshly initialised model.

    Raises:
        UsageError: no such model, or a key of config that is unknown, missing or of the wrong type.
    """
    known = [name] if name in _models else names()
    if name not in known:
        raise UsageError(
            f"Unknown model {name!r}; expected one of {', '.join(known)}."
            f"{did_you_mean(name, known)}"
        )
    return _models[name](parse(_models[name].Config, config, name))
