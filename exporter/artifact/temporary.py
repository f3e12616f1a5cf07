"""Graphs opened from temporary files, which are too large to be opened without."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx
from numpy.typing import NDArray

from linexport import targets
from linexport.artifact import write
from linexport.artifact.staging import temporary_folder
from linexport.manifest import DATA
from linexport.targets.runtime.options import LOGITS_TO_KEEP

MAPPED_ABOVE = 2**26
"""Bytes of a temporary model above which its weights are mapped from a data file."""

Arrays = Mapping[str, NDArray]
Run = Callable[[Arrays], dict[str, NDArray]]


def open_written(
    model: onnx.ModelProto,
    values: Mapping[str, NDArray],
    threads: int,
    settings: Mapping[str, str] | None = None,
    low_memory: bool = True,
    target: str = targets.DEFAULT,
    logits: str | None = None,
    native: bool = False,
) -> Run:
    """Open a graph from a temporary file; returns a function from its inputs to its outputs.

    Args:
        model: not changed.
        values: of external initializers, by name; others are left out.
        threads: 0 for ONNX Runtime's choice.
        settings: of its session configuration.
        low_memory: map weights of large models from a file, which leaves them unpacked.
        target: whose models are opened as this one.
        logits: the output that is computed for the last tokens alone, see ``runs``.
        native: run what it can of the graph by the CPU library.
    """
    named = {t.name for t in model.graph.initializer}
    external = {name: value for name, value in values.items() if name in named}
    with temporary_folder() as folder:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        path = write.save_model(copy, folder, external, MAPPED_ABOVE)
        session = targets.find_target(target).open(
            path,
            threads=threads,
            taking_turns=True,
            low_memory=low_memory and (folder / DATA).exists(),
            settings=settings,
            logits=logits,
            native=native,
        )
    return runs(session)


def runs(session: targets.InferenceSession) -> Run:
    """Return a function from a model's inputs, with ``logits_to_keep`` or without, to its outputs.

    A session that cannot leave logits out computes all of them.
    """
    if getattr(session, "keeps_logits", False):
        return session.run
    return lambda feeds: session.run({n: x for n, x in feeds.items() if n != LOGITS_TO_KEEP})
