"""Read pickles without running them.

`load_plain` takes tensors and plain containers only; `globals_named` lists what a pickle would
import by reading its opcodes.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from pathlib import Path
from typing import BinaryIO

_BLOCKED = re.compile(r"GLOBAL (\S+) was not an allowed")
# A pickle of tensors is small; storages follow it.
_SCAN_BYTES = 64 * 2**20
_STRING_OPS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}


class UnsafePickleError(Exception):
    """A pickle that needs more than tensors and plain containers.

    Attributes:
        name: the importable name it needs, or None when it was refused for another reason.
    """

    def __init__(self, name: str | None, reason: str) -> None:
        super().__init__(reason)
        self.name = name


def load_plain(source: Path | bytes) -> object:
    """Load a torch.save file (or its bytes) under torch's weights_only rules, onto the CPU.

    Raises:
        UnsafePickleError: it refers to something other than tensors and plain containers.
        Exception: whatever torch raises for a damaged file.
    """
    import torch

    stream = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        blocked = _BLOCKED.search(str(error))
        raise UnsafePickleError(blocked and blocked[1], str(error)) from error


def globals_named(path: Path) -> tuple[str, ...]:
    """Importable names a pickle file refers to, in order, without executing it."""
    with path.open("rb") as stream:
        data = io.BytesIO(stream.read(_SCAN_BYTES))
    return tuple(dict.fromkeys(_scan(data)))


def _scan(data: BinaryIO) -> list[str]:
    names: list[str] = []
    strings = ["", ""]
    try:
        while data.read(1):
            data.seek(-1, io.SEEK_CUR)
            for opcode, argument, _ in pickletools.genops(data):
                if opcode.name in ("GLOBAL", "INST"):
                    names.append(str(argument).replace(" ", "."))
                elif opcode.name == "STACK_GLOBAL":
                    names.append(".".join(strings))
                elif opcode.name in _STRING_OPS:
                    strings = [strings[1], str(argument)]
    except (ValueError, UnicodeDecodeError, OverflowError):
        pass  # raw storages follow the pickles; what came before has been read
    return names


def outside_torch_weights(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names that a pickle of plain tensors would not contain."""
    plain = re.compile(
        r"(collections\.OrderedDict|torch\._utils\._rebuild_\w+|torch\.\w*Storage|torch\.Size"
        r"|torch\.storage\.\w+|torch\.\w*(int|float|bool|complex)\w*)"
    )
    return tuple(name for name in names if not plain.fullmatch(name))
