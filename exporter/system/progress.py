"""Progress of a conversion, shown to its caller."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from linexport.system import memory
from linexport.system.json_object import JsonObject

Advance = Callable[[int, str], None]


class Progress(Protocol):
    """Shows stages; the command line has one with a spinner."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Entered when a stage begins and left when it ends."""
        ...

    def steps(self, name: str, total: int) -> AbstractContextManager[Advance]:
        """Entered for work of so many steps; gives a function to tell the steps done and a note."""
        ...

    def note(self, text: str) -> None:
        """Something to be read before the work goes on."""
        ...


class Silent:
    """Shows nothing: the default of the library."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """See ``Progress``."""
        yield

    @contextmanager
    def steps(self, name: str, total: int) -> Iterator[Advance]:
        """See ``Progress``."""
        yield lambda done, note: None

    def note(self, text: str) -> None:
        """See ``Progress``."""


class Stopwatch:
    """Passes stages on and keeps how long each took."""

    def __init__(self, shown: Progress) -> None:
        self.shown = shown
        self.stages: list[JsonObject] = []

    def seconds(self, name: str) -> float:
        """Return how long the stages of a name took so far."""
        return sum(float(one["seconds"]) for one in self.stages if one["name"] == name)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """See ``Progress``."""
        start = time.perf_counter()
        with self.shown.stage(name):
            yield
        memory.trim_memory()
        self.stages.append({"name": name, "seconds": round(time.perf_counter() - start, 3)})
