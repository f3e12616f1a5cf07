"""Pictures in a prompt of text, by the image processor of the model's folder.

    files --Pillow--> pictures --transformers' processor--> pixel values, grids
    token ids with one image token a picture  -->  as many as the grid of each has tokens

Where a processor cuts pictures into tiles and writes tokens around each, it returns
the tokens too. The processor's files are data: no code of a folder's is run, and nothing is
fetched.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from linexport.artifact.staging import temporary_folder
from linexport.artifact.text.images import PROCESSED, images_of, tokens_of, vision_of
from linexport.artifact.text.language_interface import language_interface
from linexport.artifact.text.tokenizer import MODEL_CONFIG, find_tokenizer, read_file, read_json
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.manifest.file_names import LANGUAGE_FILES, PROCESSOR_FILES
from linexport.system.install import pip_install_here

if TYPE_CHECKING:
    from PIL.Image import Image

    from linexport.artifact.text.model import TextModel

FAMILIES = ("qwen3_5", "qwen3_5_moe")
"""Model types whose pictures are runs of image tokens, and nothing between them."""

TILED = ("lfm2_vl",)
"""Model types whose processor cuts pictures into tiles."""

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


def with_pictures(
    model: TextModel, ids: Sequence[int], paths: Sequence[Path]
) -> tuple[list[int], dict[str, Any]]:
    """Return the prompt with the tokens of its pictures, and the pictures for ``generate``.

    Args:
        model: that takes them.
        ids: of the prompt, with one image token for each picture.
        paths: of the pictures, in the order of the tokens.

    Raises:
        UsageError: the model has no vision tower, or is of another family; the artifact lacks the
            files of the processor; a picture cannot be read; or the prompt has other numbers of
            image tokens.
        EnvironmentProblemError: Pillow, transformers or torchvision is not installed.
    """
    vision = vision_of(model.manifest, model.path)
    family = read_json(model.path / MODEL_CONFIG, model.verified).get("model_type")
    if family not in (*FAMILIES, *TILED):
        raise UsageError(
            f"{model.path} is a model of {family}; images are prepared for "
            f"{', '.join((*FAMILIES, *TILED))}. "
            "Call the model's processor in Python and give what it returns to "
            "linexport.load(...).generate(..., images=...)."
        )
    found = sum(token == vision.image_token for token in ids)
    if found != len(paths):
        vocabulary = language_interface(model.manifest).vocabulary
        tokenizer = find_tokenizer(model.path, vocabulary, model.verified)
        raise UsageError(
            f"The prompt has {found} image tokens for {len(paths)} images. Write "
            f"{tokenizer.token_text(vision.image_token)} where an image is, with what the model "
            "expects around it, or have its chat template do so: --chat."
        )
    pictures = [read_picture(path) for path in paths]
    if family in TILED:
        parts, images = _tiles(model, pictures)
    else:
        images = _processed(model, pictures)
        parts = [[vision.image_token] * n for n in tokens_of(vision, images_of(images))]
    left = iter(parts)
    spread = (next(left) if i == vision.image_token else [i] for i in ids)
    return [token for part in spread for token in part], images


def read_picture(path: Path) -> Image:
    """Return a picture in RGB, turned as its camera says.

    Raises:
        UsageError: it cannot be read, is not in a supported format, or is too large.
        EnvironmentProblemError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps
        from PIL.JpegImagePlugin import JpegImageFile
    except ImportError:
        raise EnvironmentProblemError(f"Reading {path} needs Pillow: {EXTRA}.") from None
    try:
        # Others are programs, as PostScript is, which Pillow gives to an interpreter.
        with _without_warnings(), Image.open(path, formats=FORMATS) as picture:
            for width, height in (picture.size, _tile(path, picture)):  # nothing is decoded yet
                if width * height > MOST_PIXELS:
                    raise UsageError(
                        f"{path} has {width} x {height} pixels; at most {MOST_PIXELS:,} are "
                        "decoded. Scale it down."
                    )
            # A file of several pictures has the format MPO, and its first is decoded as JPEG is.
            if isinstance(picture, JpegImageFile) and (scans := _scans(path)) > MOST_SCANS:
                raise UsageError(
                    f"{path} has {scans} scans; at most {MOST_SCANS} are decoded. Save it again."
                )
            ImageOps.exif_transpose(picture, in_place=True)
            return picture if picture.mode == "RGB" else picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(
            f"{path} cannot be read as an image: {error}. Expected one of {', '.join(FORMATS)}."
        ) from None


def _scans(path: Path) -> int:
    """Return the number of scans of a JPEG file, those of its thumbnails among them."""
    with path.open("rb") as file:
        found, last = 0, b""
        while part := file.read(2**20):
            found += (last + part).count(START_OF_SCAN)
            last = part[-1:]
    return found


def _tile(path: Path, picture: Image) -> tuple[int, int]:
    """Return the size of the tiles of a TIFF file, which are decoded whole; (1, 1) without.

    Raises:
        ValueError: the size is not a number, or may be listed twice: libraries differ in which of
            the two they take.
    """
    tags: Mapping[int, object] = getattr(picture, "tag_v2", {})
    if picture.format != "TIFF" or not any(tag in tags for tag in TILE_SIZE):
        return 1, 1
    width, height = (tags.get(tag) for tag in TILE_SIZE)
    if not isinstance(width, int) or not isinstance(height, int) or _entries(path) != len(tags):
        raise ValueError("the size of its tiles is not clear")
    return width, height


def _entries(path: Path) -> int:
    """Return how many entries the first directory of a TIFF file has."""
    with path.open("rb") as file:
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


def _processed(model: TextModel, pictures: Sequence[Image]) -> dict[str, Any]:
    """Return what the image processor of the model's folder gives."""
    with _processor(model, "AutoImageProcessor") as processor:
        return dict(processor(images=list(pictures), return_tensors="np"))


def _tiles(
    model: TextModel, pictures: Sequence[Image]
) -> tuple[list[list[int]], dict[str, np.ndarray]]:
    """Return the tokens of each picture, and what the processor gives for all of them.

    Raises:
        EnvironmentProblemError: torchvision, which this processor computes with, is not installed.
    """
    _check_torchvision()
    with _processor(model, "AutoProcessor", LANGUAGE_FILES) as processor:
        made = [
            dict(
                processor(
                    **{"images": [picture], "text": processor.image_token},
                    **{"add_special_tokens": False, "return_tensors": "np"},
                )
            )
            for picture in pictures
        ]
        parts = [[int(token) for token in each["input_ids"][0]] for each in made]
        names = [name for name in made[0] if name in PROCESSED]
        return parts, {name: np.concatenate([each[name] for each in made]) for name in names}


def _check_torchvision() -> None:
    try:
        importlib.import_module("torchvision")
    except ImportError:
        raise EnvironmentProblemError(
            "The image processor of this model computes with torchvision, which is not installed: "
            "pip install torchvision, in the build (CPU or CUDA) that torch is installed in."
        ) from None
    except RuntimeError as error:
        raise EnvironmentProblemError(
            f"torchvision is installed and does not work with this torch: {error}. Install the "
            "version and the build (CPU or CUDA) that belong to it."
        ) from None


@contextmanager
def _processor(
    model: TextModel, auto: str, language: Sequence[str] = (MODEL_CONFIG,)
) -> Iterator[Any]:
    """Yield the processor of the model's folder, and convert its errors to errors for the user.

    Args:
        model: with the folder.
        auto: class of transformers that opens it.
        language: files that it needs in addition to its own, where the folder has them.
    """
    try:
        import transformers
    except ImportError:
        raise EnvironmentProblemError(f"Preparing images needs transformers: {EXTRA}.") from None
    present = [name for name in PROCESSOR_FILES if (model.path / name).is_file()]
    if not present:
        raise UsageError(
            f"{model.path} has no image processor: expected {' or '.join(PROCESSOR_FILES)}. "
            "Convert a model folder that holds one."
        )
    with temporary_folder() as folder:
        for name in (*present, *language):
            if (model.path / name).is_file():
                (folder / name).write_bytes(read_file(model.path / name, model.verified))
        try:
            yield getattr(transformers, auto).from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except ImportError as error:
            raise EnvironmentProblemError(f"The image processor says: {error}") from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(
                f"The image processor of {model.path} ({', '.join(present)}) refuses the images, "
                f"or is damaged: {error}"
            ) from None
