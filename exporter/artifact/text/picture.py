"""Pictures of files or bytes that anybody may have sent: to RGB, turned as their camera says.

    size from the header  ->  within the limit  ->  decoded

The format is found by the content. A format whose pictures are programs is not among those read.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from linexport.errors import EnvironmentProblemError, UsageError
from linexport.system.install import pip_install_here

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats of pictures that are read, by their content, whatever a file is called."""

MOST_PIXELS = 2**25
"""Pixels of a picture, from a file of any size: 128 MiB once it is decoded, and four times that
while WEBP is."""

MOST_SCANS = 100
"""Scans of a JPEG file, each of which goes over all pixels: a progressive one has about ten. It is
the limit of libtiff for the same in its files."""

START_OF_SCAN = b"\xff\xda"
"""Its marker; data of a picture never have these bytes."""

TILE_SIZE = (322, 323)
"""Tags of TIFF: width and height of a tile, which may be larger than the picture."""

EXTRA = pip_install_here("images")


def read_picture(path: Path) -> Image:
    """Return a picture in RGB, turned as its camera says.

    Raises:
        UsageError: it cannot be read, is not in a supported format, or is too large.
        EnvironmentProblemError: Pillow is not installed.
    """
    name = str(path)
    with _errors(name), path.open("rb") as file, opened_picture(file, name) as (picture, _):
        return in_rgb(picture)


@contextmanager
def opened_picture(file: BinaryIO, name: str) -> Iterator[tuple[Image, int]]:
    """Yield a picture whose header was read, and the pixels to decode; nothing is decoded yet.

    Args:
        file: is read from its beginning.
        name: of the picture, for errors.

    Raises:
        UsageError: it cannot be read, here or while it is decoded; is not in a supported format;
            or is too large.
        EnvironmentProblemError: Pillow is not installed.
    """
    with _errors(name):
        from PIL import Image
        from PIL.JpegImagePlugin import JpegImageFile

        # Others are programs, as PostScript is, which Pillow gives to an interpreter.
        with _without_warnings(), Image.open(file, formats=FORMATS) as picture:
            sizes = picture.size, _tile(file, picture)
            for width, height in sizes:
                if width * height > MOST_PIXELS:
                    raise UsageError(
                        f"{name} has {width} x {height} pixels; at most {MOST_PIXELS:,} are "
                        "decoded. Scale it down."
                    )
            # A file of several pictures has the format MPO, and its first is decoded as JPEG is.
            if isinstance(picture, JpegImageFile) and (scans := _scans(file)) > MOST_SCANS:
                raise UsageError(
                    f"{name} has {scans} scans; at most {MOST_SCANS} are decoded. Save it again."
                )
            yield picture, max(width * height for width, height in sizes)


def in_rgb(picture: Image) -> Image:
    """Decode an opened picture: in RGB, turned as its camera says."""
    from PIL import ImageOps

    ImageOps.exif_transpose(picture, in_place=True)
    return picture if picture.mode == "RGB" else picture.convert("RGB")


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Convert what Pillow raises to errors for the user."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise EnvironmentProblemError(f"Reading {name} needs Pillow: {EXTRA}.") from None
    try:
        yield
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "its format is not known" if unknown else error
        raise UsageError(
            f"{name} cannot be read as an image: {reason}. Expected one of {', '.join(FORMATS)}."
        ) from None


@contextmanager
def _kept_place(file: BinaryIO) -> Iterator[None]:
    """Read a file from its beginning, and leave it where it was."""
    place = file.tell()
    file.seek(0)
    try:
        yield
    finally:
        file.seek(place)


def _scans(file: BinaryIO) -> int:
    """Return the number of scans of a JPEG file, those of its thumbnails among them."""
    with _kept_place(file):
        found, last = 0, b""
        while part := file.read(2**20):
            found += (last + part).count(START_OF_SCAN)
            last = part[-1:]
    return found


def _tile(file: BinaryIO, picture: Image) -> tuple[int, int]:
    """Return the size of the tiles of a TIFF file, which are decoded whole; (1, 1) without.

    Raises:
        ValueError: the size is not a number, or may be listed twice: libraries differ in which of
            the two they take.
    """
    tags: Mapping[int, object] = getattr(picture, "tag_v2", {})
    if picture.format != "TIFF" or not any(tag in tags for tag in TILE_SIZE):
        return 1, 1
    width, height = (tags.get(tag) for tag in TILE_SIZE)
    if not isinstance(width, int) or not isinstance(height, int) or _entries(file) != len(tags):
        raise ValueError("the size of its tiles is not clear")
    return width, height


def _entries(file: BinaryIO) -> int:
    """Return how many entries the first directory of a TIFF file has."""
    with _kept_place(file):
        head = file.read(16)
        order: Literal["little", "big"] = "little" if head.startswith(b"II") else "big"
        large = 43 in head[2:4]
        start, counted = (head[8:16], 8) if large else (head[4:8], 2)
        file.seek(int.from_bytes(start, order))
        return int.from_bytes(file.read(counted), order)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Leave out Pillow's warnings, of pictures that are refused here or of damaged details."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
