"""A search on disk: what was measured so far, so that an interrupted one goes on where it was.

    FOLDER/search.json      costs, losses, points and seconds, replaced in one step
    FOLDER/NAME.npz         tensors that were learned: of forms, and of points after fine-tuning

The key has digests of the model and of the data and all that measurements depend on: a record of
anything else is refused. Files are data alone.
"""

from __future__ import annotations

import hashlib
import os
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from linexport.errors import UsageError
from linexport.manifest.linearization_records import FormCost
from linexport.system.folder_lock import hold
from linexport.system.npz import save_npz
from linexport.system.replace_file import replacing

NAME = "search.json"


@dataclass(frozen=True)
class PointLosses:
    """A choice of forms as it was judged on the rows of the search.

    Attributes:
        drop: mean.
        bound: upper confidence bound of it.
        steps: of fine-tuning.
        cut: that ended with the time.
    """

    drop: float
    bound: float
    steps: int
    cut: bool = False


@dataclass
class KeptMeasurements:
    """Content of the file.

    Attributes:
        key: what the measurements are of.
        seconds: spent so far.
        costs: by the name of a form and the shape of a layer.
        losses: mean smooth losses by choice of forms.
        points: choices that were judged, by choice; ``tuned`` those after fine-tuning.
        tuned: likewise.
        transferred: attention transfer has ended.
    """

    key: dict[str, str]
    seconds: float = 0.0
    costs: list[FormCost] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)
    points: dict[str, PointLosses] = field(default_factory=dict)
    tuned: dict[str, PointLosses] = field(default_factory=dict)
    transferred: bool = False


_ADAPTER = TypeAdapter(KeptMeasurements)


class SearchFile:
    """The record of one search; in memory alone without a folder.

    Args:
        folder: of the record; see ``opened``.
        key: what the measurements are of.

    Raises:
        UsageError: the folder has a record of something else, or one that cannot be read.
    """

    def __init__(self, folder: Path | None, key: Mapping[str, str]) -> None:
        self.folder, self.kept = folder, KeptMeasurements(dict(key))
        self.tensors: dict[str, list[Tensor]] = {}
        if folder is not None and (folder / NAME).exists():
            self.kept = _read(folder / NAME)
            _check_key(folder, self.kept.key, dict(key))
        self.resumed = len(self.kept.losses) + len(self.kept.costs)
        self._before, self._start = self.kept.seconds, time.monotonic()

    @property
    def seconds(self) -> float:
        """Return the seconds spent, earlier runs included."""
        return self._before + time.monotonic() - self._start

    def save(self) -> None:
        """Write what is known.

        Raises:
            UsageError: the file cannot be written.
        """
        self.kept.seconds = self.seconds
        if self.folder is None:
            return
        try:
            with replacing(self.folder / NAME) as partial:
                partial.write_bytes(_ADAPTER.dump_json(self.kept, indent=1))
        except OSError as error:
            raise UsageError(f"{self.folder / NAME} cannot be written: {error.strerror}.") from None

    def keep(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Keep tensors by a name."""
        found = [x.detach().clone() for x in tensors]
        self.tensors[name] = found
        if self.folder is not None:
            with replacing(self.folder / f"{name}.npz") as partial:
                save_npz(partial, {str(at): x.numpy() for at, x in enumerate(found)})

    def restore(self, name: str, tensors: Sequence[Tensor]) -> bool:
        """Set tensors to what is kept by that name; False where that is missing or of other sizes.

        Raises:
            UsageError: the file is damaged.
        """
        kept = self.tensors.get(name) or self._load(name)
        if kept is None or [x.shape for x in kept] != [x.shape for x in tensors]:
            return False
        with torch.no_grad():
            for x, value in zip(tensors, kept, strict=True):
                x.copy_(value)
        return True

    def _load(self, name: str) -> list[Tensor] | None:
        if self.folder is None or not (self.folder / f"{name}.npz").is_file():
            return None
        path = self.folder / f"{name}.npz"
        try:
            with np.load(path, allow_pickle=False) as file:
                return [torch.from_numpy(file[str(at)]) for at in range(len(file.files))]
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise _damaged(path, str(error)) from None


@contextmanager
def opened(folder: Path | None, key: Mapping[str, str]) -> Iterator[SearchFile]:
    """Open the record of a search, for this run alone.

    Two runs would learn the same tensors, and each would write its own.

    Raises:
        UsageError: as ``SearchFile`` does, or another run has the folder.
    """
    if folder is None:
        yield SearchFile(None, key)
        return
    try:
        folder.mkdir(exist_ok=True)
        held = hold(folder)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}.") from None
    if held is None:
        raise UsageError(
            f"Another run of this search is at work in {folder}. Wait for its end, or write to "
            "another output."
        )
    try:
        yield SearchFile(folder, key)
    finally:
        with suppress(OSError):
            folder.rmdir()  # where nothing was measured
        os.close(held)


def _read(path: Path) -> KeptMeasurements:
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except OSError as error:
        raise _damaged(path, str(error.strerror)) from None
    except ValidationError as error:
        raise _damaged(path, f"{error.error_count()} entries are not as expected") from None


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path} cannot be read as the record of a search ({why}). Remove the folder "
        f"{path.parent} to search anew."
    )


def _check_key(folder: Path, found: dict[str, str], expected: dict[str, str]) -> None:
    names = [n for n in sorted({*found, *expected}) if found.get(n) != expected.get(n)]
    if names:
        raise UsageError(
            f"{folder} has the record of another search: {', '.join(names)} differ. Remove that "
            "folder to search anew, or write to another output."
        )


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 of types, shapes and values."""
    found = hashlib.sha256()
    for x in tensors:
        found.update(f"{x.dtype} {tuple(x.shape)};".encode())
        values = x.detach().contiguous().reshape(-1).view(torch.uint8) if x.numel() else x
        found.update(values.numpy().tobytes() if x.numel() else b"")
    return found.hexdigest()


def digest_of_module(module: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers, and of their names."""
    named = [*module.named_parameters(), *module.named_buffers()]
    names = hashlib.sha256("\n".join(name for name, _ in named).encode()).hexdigest()
    return f"{names[:16]}{digest_of(x for _, x in named)}"
