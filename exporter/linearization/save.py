"""The linear form on disk: data that ``linexport convert`` reads, and never code.

A reference model becomes a linexport checkpoint. Any other module becomes an exported program, a
``.pt2`` file: it holds the computation itself, so that loading does not need the module's source.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from linexport.errors import UsageError
from linexport.manifest.records import SoftmaxOriginal
from linexport.models import checkpoint
from linexport.models.registry import ReferenceModel
from linexport.sources.linearized import NAME, as_json
from linexport.sources.loaded_model import LoadedModel
from linexport.system.replace_file import replacing
from linexport.trace import export_program

CHECKPOINT, PROGRAM = ".pt", ".pt2"


def check_checkpoint_path(path: Path, reference: bool, overwrite: bool) -> None:
    """Before minutes are spent on what cannot be written.

    Raises:
        UsageError: another ending than that of the kind of file, a folder that does not exist, or
            something in its place.
    """
    ending = CHECKPOINT if reference else PROGRAM
    if path.suffix != ending:
        what = "a linexport checkpoint" if reference else "an exported program"
        raise UsageError(
            f"The linear form of this model is {what}: name it {path.with_suffix(ending)} rather "
            f"than {path}."
        )
    if not path.absolute().parent.is_dir():
        raise UsageError(f"The folder {path.absolute().parent} does not exist. Make it first.")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; expected the path of a file.")
    if path.exists() and not overwrite:
        raise UsageError(f"{path} is there already. Pass --overwrite, or choose another name.")


def save(linear: LoadedModel, path: Path, original: SoftmaxOriginal) -> None:
    """Write the file whole or not at all, with what it is a linear form of.

    Raises:
        BuildError, UnsupportedModelError: torch cannot export the module; see ``export_program``.
        UsageError: the file cannot be written.
    """
    try:
        if isinstance(linear.module, ReferenceModel):
            checkpoint.save(linear.module, path, {NAME: as_json(original)})
            return
        program = linear.program or export_program(linear)
        with replacing(path) as partial, partial.open("wb") as file:
            notes = {f"{NAME}.json": json.dumps(as_json(original))}
            torch.export.save(program, file, extra_files=notes)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
