"""A model exported as ``convert`` exports it, without state: a file to be measured."""

from __future__ import annotations

from pathlib import Path

from linexport import passes, targets, trace
from linexport.artifact import write
from linexport.loaders.model import LoadedModel
from linexport.targets.lowering import lower

TARGET = "ort"


def export(loaded: LoadedModel, folder: Path) -> Path:
    """The model file, in a new folder.

    Raises:
        LinexportError: it cannot be traced or lowered.
    """
    target = targets.find(TARGET)
    model = target.prepare(passes.run(trace.trace(loaded).model, passes.STATELESS))
    lowered, _ = lower(model, target.candidates)
    folder.mkdir()
    return write.save_model(lowered, folder)
