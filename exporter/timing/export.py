"""A model exported as ``convert`` exports it, without state: a file to be measured."""

from __future__ import annotations

from pathlib import Path

from linexport import passes, targets
from linexport.artifact import write
from linexport.targets.lowering.choice import lower
from linexport.trace import Traced

TARGET = "ort"


def export(traced: Traced, folder: Path) -> Path:
    """The model file, in a new folder.

    Raises:
        LinexportError: it cannot be lowered.
    """
    target = targets.find_target(TARGET)
    model = target.prepare(passes.run(traced.model, passes.STATELESS, TARGET))
    lowered, _ = lower(model, target.candidates)
    folder.mkdir()
    return write.save_model(lowered, folder)
