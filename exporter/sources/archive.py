"""A zip written by torch, opened by torch's own reader, its sizes, names and checksums checked.

Two zip parsers may see different members in one crafted file. torch reads with its C++ reader, so
checks made with another parser prove nothing against forgery; here that reader is used for every
byte, and a file in which Python's parser sees other members is refused. torch's reader never
compares a CRC32, so Python's does: it proves that nothing was damaged by accident.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
from pathlib import Path

from linexport.errors import UnsupportedModelError

_MAX_MEMBERS = 200_000
_NAME = re.compile(r"[A-Za-z0-9_.@+][A-Za-z0-9_.@+ /-]*")


class TorchArchive:
    """Checked access to the members of a torch zip.

    Attributes:
        names: the members, without the folder that torch puts around them.
    """

    def __init__(self, source: Path | bytes) -> None:
        """Open and check.

        Raises:
            UnsupportedModelError: damaged, compressed, ambiguous, larger inside than outside, or
                with a member that differs from its CRC32.
        """
        self._sizes = _members(source)
        from linexport.system.torch_internals.files import archive

        opened = io.BytesIO(source) if isinstance(source, bytes) else str(source)
        try:
            self._reader = archive(opened)
            seen = self._reader.get_all_records()
            sizes = {name: int(self._reader.get_record_size(name)) for name in seen}
        except (RuntimeError, UnicodeDecodeError) as error:  # names that are not UTF-8
            raise UnsupportedModelError("torch cannot read the zip archive") from error
        if len(seen) != len(sizes) or sizes != self._sizes:
            raise UnsupportedModelError("two zip readers see different members in it")
        self.names = tuple(seen)

    def size(self, name: str) -> int:
        """Bytes of a member."""
        return self._sizes[name]

    def read(self, name: str, limit: int) -> bytes:
        """Content of a member.

        Raises:
            UnsupportedModelError: it is missing, damaged, or holds more than `limit` bytes.
        """
        if name not in self._sizes:
            raise UnsupportedModelError(f"its member {name} is missing")
        if self._sizes[name] > limit:
            raise UnsupportedModelError(
                f"its member {name} holds {self._sizes[name]} bytes, more than the {limit} expected"
            )
        try:
            return bytes(self._reader.get_record(name))
        except RuntimeError as error:
            raise UnsupportedModelError(f"its member {name} is damaged") from error


def _members(source: Path | bytes) -> dict[str, int]:
    """Size of each member as Python's parser sees it, without the outer folder."""
    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    try:
        with zipfile.ZipFile(io.BytesIO(source) if isinstance(source, bytes) else source) as zipped:
            entries = zipped.infolist()
            _check_entries(entries, size)
            _check_checksums(zipped)
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise UnsupportedModelError("it is not a readable zip archive") from error
    sizes = {_inner_name(entry.filename, entries[0].filename): entry.file_size for entry in entries}
    if len(sizes) != len(entries):
        raise UnsupportedModelError("it has two members of the same name")
    return sizes


def _check_entries(entries: list[zipfile.ZipInfo], size: int) -> None:
    """Check what the directory of a zip of ``size`` bytes says of its members."""
    if len(entries) > _MAX_MEMBERS:
        raise UnsupportedModelError(f"it has {len(entries)} members, more than {_MAX_MEMBERS}")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise UnsupportedModelError("it has compressed members, which torch does not write")
    if sum(entry.file_size for entry in entries) > size:
        raise UnsupportedModelError("its members claim more bytes than the file has")


def _check_checksums(zipped: zipfile.ZipFile) -> None:
    """Compare every member with its CRC32, unless torch wrote none (all zero)."""
    if not any(entry.CRC for entry in zipped.infolist()):
        return
    try:
        damaged = zipped.testzip()
    except (zipfile.BadZipFile, EOFError, RuntimeError, struct.error) as error:
        raise UnsupportedModelError(f"a member of it cannot be read ({error})") from error
    if damaged is not None:
        inner = damaged.partition("/")[2]
        raise UnsupportedModelError(f"its member {inner} is damaged: it differs from its CRC32")


def _inner_name(name: str, first: str) -> str:
    folder, _, inner = name.partition("/")
    if folder != first.partition("/")[0] or not _NAME.fullmatch(inner) or ".." in inner:
        raise UnsupportedModelError(f"its member {name!r} has a name that torch does not write")
    return inner
