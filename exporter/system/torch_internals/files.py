"""Files of torch: its reader of zip archives, and the schema of exported programs."""

from __future__ import annotations

import importlib

from linexport.system.torch_internals import Internal
from linexport.system.untyped import TorchInternal

READER = Internal(
    "torch._C",
    "PyTorchFileReader",
    "reads a checkpoint or an exported program as torch will read it",
)
SCHEMA = Internal(
    "torch._export.serde.schema", "ExportedProgram", "checks every string of an exported program"
)
PARSER = Internal(
    "torch._export.serde.serialize",
    "_bytes_to_dataclass",
    "reads an exported program as data before torch loads it",
)
ARCHIVE = Internal(
    "torch.export.pt2_archive._package", "load_pt2", "loads an exported program that was checked"
)


def archive(opened: object) -> TorchInternal:
    """Return torch's own reader of a zip archive.

    Raises:
        EnvironmentProblemError: this torch has none.
        RuntimeError: the archive cannot be read.
    """
    return READER.need()(opened)


def schema() -> TorchInternal:
    """Return the module of the classes that an exported program is read to.

    Raises:
        EnvironmentProblemError: this torch has none.
    """
    SCHEMA.need()
    return importlib.import_module(SCHEMA.module)


def serialize() -> TorchInternal:
    """Return the module that reads them.

    Raises:
        EnvironmentProblemError: this torch has none.
    """
    PARSER.need()
    return importlib.import_module(PARSER.module)
