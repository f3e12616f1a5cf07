"""Images among the inputs of a model: what an image processor gives -> inputs of the decoder.

    pixel values, grids --vision tower--> features --places of the image token--> inputs_embeds

One image is a run of tokens with the id that the manifest names, as many as its grid has blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from linexport.artifact.call_inputs import Arrays
from linexport.errors import UsageError
from linexport.manifest import Manifest
from linexport.manifest.records import VisionRecord

Image = tuple[np.ndarray, np.ndarray]
"""Pixel values (patches, channels) and grid (2,)."""

OFFSETS = 4

_MASK = "pixel_attention_mask"
PROCESSED = ("pixel_values", "pixel_values_videos", "image_grid_thw", "spatial_shapes", _MASK)
"""Arrays of image processors that are read."""


def images_of(processed: Mapping[str, object]) -> list[Image]:
    """Return the images in what an image processor of transformers gives.

    Args:
        processed: ``pixel_values`` with ``image_grid_thw``, as of Qwen's, or with
            ``spatial_shapes`` and ``pixel_attention_mask``, as of LFM2's; arrays or tensors. Other
            entries are left aside.

    Raises:
        UsageError: something else, or a video.
    """
    known = {name: np.asarray(processed[name]) for name in PROCESSED if name in processed}
    if "pixel_values_videos" in known:
        raise UsageError("Found pixel_values_videos; this model takes images. Leave out the video.")
    values = known.get("pixel_values")
    if values is not None and "image_grid_thw" in known:
        grids = _rows(known["image_grid_thw"], "image_grid_thw", 3)
        if (grids[:, 0] != 1).any():
            raise UsageError(f"image_grid_thw is {grids.tolist()}; an image has one frame.")
        ends = np.cumsum(grids.prod(1))
        if values.ndim != 2 or len(values) != ends[-1]:
            raise UsageError(
                f"pixel_values has shape {values.shape}; the grids have {ends[-1]} patches."
            )
        return list(zip(np.split(values, ends[:-1]), grids[:, 1:], strict=True))
    if values is not None and {"spatial_shapes", "pixel_attention_mask"} <= known.keys():
        grids, mask = _rows(known["spatial_shapes"], "spatial_shapes", 2), known[_MASK].astype(bool)
        if values.ndim != 3 or mask.shape != values.shape[:2] or len(grids) != len(values):
            raise UsageError(
                f"pixel_values has shape {values.shape}, {_MASK} {mask.shape} and spatial_shapes "
                f"{grids.shape}; expected (images, patches, channels), (images, patches) and "
                "(images, 2)."
            )
        return [(v[m], g) for v, m, g in zip(values, mask, grids, strict=True)]
    raise UsageError(
        f"Found {sorted(processed)}; expected what the model's image processor gives: pixel_values "
        f"with image_grid_thw, or with spatial_shapes and {_MASK}."
    )


def vision_of(manifest: Manifest, path: Path) -> VisionRecord:
    """Return the vision tower's record.

    Args:
        manifest: of the artifact.
        path: its folder, for the message.

    Raises:
        UsageError: the artifact has no vision tower.
    """
    if manifest.vision is None:
        raise UsageError(f"{path} has no vision tower: it takes text alone.")
    return manifest.vision


def tokens_of(vision: VisionRecord, images: Sequence[Image]) -> list[int]:
    """Return the number of tokens of each image.

    Raises:
        UsageError: an image whose grid is not that of its patches, or cannot be divided into
            tokens.
    """
    return [rows * columns for rows, columns in (_tokens(vision, *image) for image in images)]


def image_inputs(
    vision: VisionRecord,
    encode: Callable[[Arrays], Arrays],
    ids: np.ndarray,
    images: Sequence[Image],
) -> Arrays:
    """Return the decoder's inputs for the images among token ids.

    Args:
        vision: of the manifest.
        encode: runs the tower.
        ids: (B, T), with the image token where images are.
        images: in the order of the tokens, row after row.

    Raises:
        UsageError: an image whose grid is not that of its patches, or cannot be divided into
            tokens, or other numbers of image tokens than the images have.
    """
    sizes = [_tokens(vision, pixels, grid) for pixels, grid in images]
    taken = ids == vision.image_token
    counts = [rows * columns for rows, columns in sizes]
    if taken.sum() != sum(counts):
        raise UsageError(
            f"The prompt has {int(taken.sum())} tokens of the id {vision.image_token}; "
            f"{len(images)} images of {counts} tokens need {sum(counts)}. Take the token ids from "
            "the processor that prepared the images."
        )
    (width,) = vision.outputs[0].shape[1:]
    embeds = np.zeros((*ids.shape, int(str(width))), np.float32)
    if images:
        embeds[taken] = np.concatenate([_encoded(vision, encode, *image) for image in images])
    found = {"inputs_embeds": embeds, "embeds_mask": taken.astype(np.int64)}
    if vision.grid_positions:
        found["position_offsets"] = _offsets(taken, sizes)
    return found


def _rows(values: np.ndarray, name: str, width: int) -> np.ndarray:
    if values.ndim != 2 or values.shape[1] != width or not len(values) or (values < 1).any():
        raise UsageError(f"{name} is {values.tolist()}; expected (images, {width}), 1 or more.")
    return values.astype(np.int64)


def _tokens(vision: VisionRecord, pixels: np.ndarray, grid: np.ndarray) -> tuple[int, int]:
    """Return rows and columns of an image's tokens."""
    channels = vision.inputs[0].shape[1]
    if pixels.ndim != 2 or pixels.shape[1] != channels or len(pixels) != grid.prod():
        raise UsageError(
            f"An image of the grid {grid.tolist()} has pixel values {pixels.shape}; expected "
            f"({int(grid.prod())}, {channels})."
        )
    if (grid % vision.merge).any():
        raise UsageError(
            f"An image has the grid {grid.tolist()}; both sides have to be multiples of "
            f"{vision.merge}, the patches of a token."
        )
    rows, columns = (int(n) // vision.merge for n in grid)
    return rows, columns


def _encoded(
    vision: VisionRecord, encode: Callable[[Arrays], Arrays], pixels: np.ndarray, grid: np.ndarray
) -> np.ndarray:
    first, second = (i.name for i in vision.inputs)
    fed: Arrays = {first: pixels.astype(np.float32), second: grid.astype(np.int64)}
    return encode(fed)[vision.outputs[0].name]


def _offsets(taken: np.ndarray, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return ``position_offsets``: time, row, column, and what the last token adds.

    Raises:
        UsageError: the tokens of an image are not one after another in one row.
    """
    offsets = np.zeros((*taken.shape, OFFSETS), np.int64)
    rows, places = np.nonzero(taken)
    start = 0
    for height, width in sizes:
        part = slice(start, start + height * width)
        row, place = rows[part], places[part]
        if (row != row[0]).any() or (np.diff(place) != 1).any():
            raise UsageError(
                f"The {height * width} tokens of an image are not one after another. Take the "
                "token ids from the processor that prepared the images."
            )
        offsets[row, place, 1:3] = np.indices((height, width)).reshape(2, -1).T
        offsets[row, place, 3] = -1
        offsets[row[-1], place[-1], 3] = max(height, width) - 1
        start += height * width
    return offsets
