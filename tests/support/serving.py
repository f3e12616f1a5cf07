"""A server in this process, and texts as they are when nobody else is served."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linexport.artifact import Artifact
from linexport.artifact.text.tokenizer import find_tokenizer
from linexport.serving.computing import LocalComputing
from linexport.serving.engine import Engine
from linexport.serving.http.server import Address, Server, listen
from linexport.serving.limits import Limits
from linexport.serving.service import Service

PATIENCE = 20.0
"""Seconds after which what should have happened has not."""


@dataclass(frozen=True)
class Served:
    """A server that runs.

    Attributes:
        service: its inside.
        url: without a path.
        port: of this machine.
    """

    service: Service
    url: str
    port: int

    @property
    def engine(self) -> Engine:
        """That of the model."""
        assert isinstance(self.service.computing, LocalComputing)
        return self.service.computing.engine

    def idle(self) -> bool:
        """Whether no slot is taken and nothing waits."""
        return not self.engine.sessions and not self.engine.waiting


@contextmanager
def served(
    model: Artifact,
    *,
    token: str | None = None,
    park: Path | None = None,
    name: str = "tiny",
    **limits: int,
) -> Iterator[Served]:
    """Serve a model from a thread; afterwards no text may be left."""
    most = Limits(**{"grace_seconds": 0, **limits})
    service = Service(model, LocalComputing(model, most), name, most, park)
    address = Address(port=0, token=token)
    bound = listen(address)
    port = bound.getsockname()[1]
    server = Server(service, address)
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    eventually(lambda: server.started)
    try:
        yield Served(service, f"http://127.0.0.1:{port}", port)
    finally:
        server.should_exit = True
        thread.join()


def eventually(condition: Callable[[], object]) -> None:
    """Wait for a condition to hold."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never held"
        time.sleep(0.005)


def alone(model: Artifact, prompt: bytes | list[int], **settings: Any) -> str:
    """Return the text that ``generate`` writes."""
    decode = find_tokenizer(model.path, 256).decoder()
    pieces = [decode(token) for token in model.generate(prompt, **settings)]
    return "".join([*pieces, decode.end()])


POISON = 7
"""Byte after which a poisoned model's logits are NaN."""


def changed(model: Artifact, *, seconds: float = 0.0, poisoned: bool = False) -> Artifact:
    """Make a model slower, or its logits NaN after POISON, in the rows that have it."""
    inner = model.call

    def call(feeds: Any, *rest: Any, **options: Any) -> Any:
        time.sleep(seconds)
        outputs, after = inner(feeds, *rest, **options)
        if poisoned:
            rows = (feeds["tokens"] == POISON).any(1)
            outputs = {**outputs, "output": outputs["output"].copy()}
            outputs["output"][rows] = np.nan
        return outputs, after

    model.call = call  # type: ignore[method-assign]
    return model
