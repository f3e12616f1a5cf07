"""Private names of torch that linexport uses: in this folder, and nowhere else.

    Internal("torch.onnx._internal.exporter._registration", "ONNXRegistry", purpose, without)

Each says what it stands in for and what is done where a release has it no more: a slower way, or an
error that names the release, and those that are tested. ``all_internals`` lists them.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass

from linexport.errors import EnvironmentProblemError
from linexport.system.untyped import TorchInternal
from linexport.system.versions import TORCH

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Internal:
    """A name that torch does not promise.

    Attributes:
        module: that has it.
        name: in that module; "Class.method" for a method.
        purpose: what linexport does with it.
        without: what is done where it is gone; None: what needs it is refused.
    """

    module: str
    name: str
    purpose: str
    without: str | None = None

    def find(self) -> TorchInternal:
        """Return what has this name; None where this torch has not."""
        try:
            found: object = importlib.import_module(self.module)
        except ImportError:
            found = None
        for part in self.name.split("."):
            found = getattr(found, part, None)
        if found is None:
            log.info("torch has no %s.%s", self.module, self.name)
        return found

    def need(self) -> TorchInternal:
        """Return what has this name.

        Raises:
            EnvironmentProblemError: this torch has not.
        """
        found = self.find()
        if found is None:
            raise self.gone(self.name)
        return found

    def of(self, holder: object, name: str) -> TorchInternal:
        """Return an attribute of an object that is one of these.

        Raises:
            EnvironmentProblemError: it has no such attribute in this torch.
        """
        try:
            return getattr(holder, name)
        except AttributeError:
            raise self.gone(f"{self.name}.{name}") from None

    def gone(self, name: str) -> EnvironmentProblemError:
        """Return the error for a name that its module does not have."""
        return EnvironmentProblemError(
            f"{self.module}.{name}, by which linexport {self.purpose}, does not exist. "
            f"{TORCH.advice()}"
        )

    def holder(self) -> tuple[object, str] | None:
        """Return what has it as an attribute, and the name there; None where nothing has."""
        if self.find() is None:
            return None
        owner: TorchInternal = importlib.import_module(self.module)
        *path, name = self.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        return owner, name


def all_internals() -> Iterator[Internal]:
    """Yield those that the modules of this folder name."""
    for found in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{found.name}")
        yield from (value for value in vars(module).values() if isinstance(value, Internal))
