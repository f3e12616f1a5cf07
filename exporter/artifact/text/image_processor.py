"""Pictures in a prompt of text, by the image processor of the model's folder.

    files --Pillow--> pictures --transformers' processor--> pixel values, grids
    token ids with one image token a picture  -->  as many as the grid of each has tokens

Where a processor cuts pictures into tiles and writes tokens around each, it returns
the tokens too. The processor's files are data: no code of a folder's is run, and nothing is
fetched.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from linexport.artifact.opened_folder import OpenedFolder
from linexport.artifact.staging import temporary_folder
from linexport.artifact.text.images import PROCESSED, images_of, tokens_of, vision_of
from linexport.artifact.text.language_interface import language_interface
from linexport.artifact.text.picture import EXTRA, read_picture
from linexport.artifact.text.tokenizer import MODEL_CONFIG, find_tokenizer, read_file, read_json
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.manifest.file_names import LANGUAGE_FILES, PROCESSOR_FILES
from linexport.manifest.records import VisionRecord

if TYPE_CHECKING:
    from PIL.Image import Image

FAMILIES = ("qwen3_5", "qwen3_5_moe")
"""Model types whose pictures are runs of image tokens, and nothing between them."""

TILED = ("lfm2_vl",)
"""Model types whose processor cuts pictures into tiles."""


@dataclass(frozen=True)
class Prepared:
    """Pictures as a model takes them.

    Attributes:
        images: arrays of the processor, by name, as ``images_of`` reads them.
        tokens: that stand where each picture is; None where these are image tokens alone.
    """

    images: dict[str, np.ndarray]
    tokens: list[list[int]] | None

    def placed(self, vision: VisionRecord, ids: Sequence[int]) -> list[int]:
        """Return a prompt with the tokens of its pictures.

        Args:
            vision: of the model.
            ids: with one image token for each picture.

        Raises:
            UsageError: an image whose grid is not that of its patches.
        """
        tokens = self.tokens
        if tokens is None:
            counts = tokens_of(vision, images_of(self.images))
            tokens = [[vision.image_token] * count for count in counts]
        left = iter(tokens)
        spread = (next(left) if i == vision.image_token else [i] for i in ids)
        return [token for part in spread for token in part]


def with_pictures(
    model: OpenedFolder, ids: Sequence[int], paths: Sequence[Path]
) -> tuple[list[int], dict[str, np.ndarray]]:
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
    family = check_pictures(model)
    check_count(model, ids, len(paths))
    pictures = [read_picture(path) for path in paths]
    with processor_folder(model, family) as folder:
        prepared = ImageProcessor(folder, family, str(model.path)).prepared(pictures)
    return prepared.placed(vision_of(model.manifest, model.path), ids), prepared.images


def check_pictures(model: OpenedFolder) -> str:
    """Check that pictures can be prepared for a model; returns its family.

    Raises:
        UsageError: the model has no vision tower, is of another family, or lacks the files of its
            processor.
    """
    vision_of(model.manifest, model.path)
    family = read_json(model.path / MODEL_CONFIG, model.verified).get("model_type")
    if family not in (*FAMILIES, *TILED):
        raise UsageError(
            f"{model.path} is a model of {family}; images are prepared for "
            f"{', '.join((*FAMILIES, *TILED))}. "
            "Call the model's processor in Python and give what it returns to "
            "linexport.load(...).generate(..., images=...)."
        )
    if not any((model.path / name).is_file() for name in PROCESSOR_FILES):
        raise UsageError(
            f"{model.path} has no image processor: expected {' or '.join(PROCESSOR_FILES)}. "
            "Convert a model folder that holds one."
        )
    return str(family)


def check_count(model: OpenedFolder, ids: Sequence[int], images: int) -> None:
    """Check that a prompt has one image token for each image.

    Raises:
        UsageError: it has other numbers of them.
    """
    vision = vision_of(model.manifest, model.path)
    found = sum(token == vision.image_token for token in ids)
    if found != images:
        vocabulary = language_interface(model.manifest).vocabulary
        tokenizer = find_tokenizer(model.path, vocabulary, model.verified)
        raise UsageError(
            f"The prompt has {found} image tokens for {images} images. Write "
            f"{tokenizer.token_text(vision.image_token)} where an image is, with what the model "
            "expects around it, or have its chat template do so: --chat."
        )


@contextmanager
def processor_folder(model: OpenedFolder, family: str) -> Iterator[Path]:
    """Yield a folder with copies of the files that the processor reads, as they were verified."""
    language = LANGUAGE_FILES if family in TILED else (MODEL_CONFIG,)
    with temporary_folder() as folder:
        for name in (*PROCESSOR_FILES, *language):
            if (model.path / name).is_file():
                (folder / name).write_bytes(read_file(model.path / name, model.verified))
        yield folder


class ImageProcessor:
    """The image processor of a model's folder.

    Args:
        folder: with the files of the processor, and nothing else.
        family: model type.
        name: of the model, for errors.

    Raises:
        UsageError: a file is damaged, or names code of the folder.
        EnvironmentProblemError: transformers is not installed; or torchvision, where the processor
            computes with it.
    """

    def __init__(self, folder: Path, family: str, name: str) -> None:
        present = [one for one in PROCESSOR_FILES if (folder / one).is_file()]
        self._tiled, self._label = family in TILED, f"{name} ({', '.join(present)})"
        if self._tiled:
            _check_torchvision()
        try:
            import transformers
        except ImportError:
            raise EnvironmentProblemError(
                f"Preparing images needs transformers: {EXTRA}."
            ) from None
        auto = transformers.AutoProcessor if self._tiled else transformers.AutoImageProcessor
        with self._errors():
            self._processor: Any = auto.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )

    def prepared(self, pictures: Sequence[Image]) -> Prepared:
        """Return pictures as the model takes them.

        Args:
            pictures: in RGB.

        Raises:
            UsageError: the processor refuses them.
        """
        with self._errors():
            if self._tiled:
                return _tiles(self._processor, pictures)
            found: Mapping[str, Any] = self._processor(images=[*pictures], return_tensors="np")
            return Prepared({n: np.asarray(found[n]) for n in found if n in PROCESSED}, None)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert what transformers raises to errors for the user."""
        try:
            yield
        except ImportError as error:
            raise EnvironmentProblemError(f"The image processor says: {error}") from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(
                f"The image processor of {self._label} refuses the images, or is damaged: {error}"
            ) from None


def _tiles(processor: Any, pictures: Sequence[Image]) -> Prepared:
    """Return the tokens of each picture, and what the processor gives for all of them."""
    made = [
        dict(
            processor(
                **{"images": [picture], "text": processor.image_token},
                **{"add_special_tokens": False, "return_tensors": "np"},
            )
        )
        for picture in pictures
    ]
    tokens = [[int(token) for token in each["input_ids"][0]] for each in made]
    names = [name for name in made[0] if name in PROCESSED]
    return Prepared({name: np.concatenate([each[name] for each in made]) for name in names}, tokens)


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
