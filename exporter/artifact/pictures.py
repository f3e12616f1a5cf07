"""Pictures in a prompt of text, by the image processor of the model's folder.

    files --Pillow--> pictures --transformers' image processor--> pixel values, grids
    token ids with one image token a picture  -->  as many as the grid of each has tokens

Of families whose own processor writes these tokens and nothing between them. The processor's files
are data: no code of a folder's is run, and nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linexport.artifact.images import images_of, tokens_of, vision_of
from linexport.artifact.language_interface import language_interface
from linexport.artifact.staging import temporary_folder
from linexport.artifact.tokenizer import MODEL_CONFIG, find_tokenizer, read_file, read_json
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.manifest.file_names import PROCESSOR_FILES

if TYPE_CHECKING:
    from PIL.Image import Image

    from linexport.artifact.text_model import TextModel

FAMILIES = ("qwen3_5", "qwen3_5_moe")
"""Model types of such families."""

EXTRA = "pip install 'linexport[images]'"


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
        EnvironmentProblemError: Pillow or transformers is not installed.
    """
    vision = vision_of(model.manifest, model.path)
    family = read_json(model.path / MODEL_CONFIG, model.verified).get("model_type")
    if family not in FAMILIES:
        raise UsageError(
            f"{model.path} is a model of {family}; images are prepared for {', '.join(FAMILIES)}. "
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
    images = _processed(model, [read_picture(path) for path in paths])
    counts = iter(tokens_of(vision, images_of(images)))
    spread = ([i] * (next(counts) if i == vision.image_token else 1) for i in ids)
    return [token for part in spread for token in part], images


def read_picture(path: Path) -> Image:
    """Return a picture in RGB, turned as its camera says.

    Raises:
        UsageError: it cannot be read, or is no picture.
        EnvironmentProblemError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise EnvironmentProblemError(f"Reading {path} needs Pillow: {EXTRA}.") from None
    try:
        with Image.open(path) as picture:
            return ImageOps.exif_transpose(picture).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(
            f"{path} cannot be read as an image: {error}. Expected a file that Pillow opens, such "
            "as PNG or JPEG."
        ) from None


def _processed(model: TextModel, pictures: Sequence[Image]) -> dict[str, Any]:
    """Return what the image processor of the model's folder gives."""
    try:
        from transformers import AutoImageProcessor
    except ImportError:
        raise EnvironmentProblemError(f"Preparing images needs transformers: {EXTRA}.") from None
    present = [name for name in PROCESSOR_FILES if (model.path / name).is_file()]
    if not present:
        raise UsageError(
            f"{model.path} has no image processor: expected {' or '.join(PROCESSOR_FILES)}. "
            "Convert a model folder that holds one."
        )
    with temporary_folder() as folder:
        for name in (*present, MODEL_CONFIG):
            (folder / name).write_bytes(read_file(model.path / name, model.verified))
        try:
            processor = AutoImageProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            found: Mapping[str, Any] = processor(images=list(pictures), return_tensors="np")
        except ImportError as error:
            raise EnvironmentProblemError(f"The image processor says: {error}") from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(
                f"The image processor of {model.path} ({', '.join(present)}) refuses the images, "
                f"or is damaged: {error}"
            ) from None
    return dict(found)
