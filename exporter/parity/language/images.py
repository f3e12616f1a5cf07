"""Parity of a language model with its vision tower: images of many grids, and texts around them.

    the tower           features of each image, against the library's own
    the whole           logits of prompts with images, whole, in pieces that cut an image, and then
                        token by token, against the library's own call with pixel values; of
                        several prompts, against that for each alone

The library prepares nothing here that the artifact takes: it finds the image tokens, runs its
tower and computes positions by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from linexport.artifact.text.images import image_inputs
from linexport.parity.cases import Case
from linexport.parity.check import ModelUnderTest, Parity
from linexport.parity.language.in_both import add_compared
from linexport.parity.language.prompts import BATCH, SEQUENCE
from linexport.parity.reference.module import Arguments, Reference
from linexport.sources.hugging_face.vision.grid import draw
from linexport.sources.loaded_model import Images
from linexport.system import memory
from linexport.targets import InferenceSession

GRIDS = ((1, 1), (2, 3), (1, 7), (9, 2), (16, 15))
"""Rows and columns of the images that the tower is compared on, in tokens."""

PROMPTS: tuple[tuple[tuple[tuple[int, int], ...], ...], ...] = (
    (((2, 3),),),
    (((1, 4), (5, 2)),),
    (((3, 3),), (), ((1, 1), (2, 5))),
)
"""Images of each row of a prompt."""

STEPS = 12
"""Tokens after the images that are fed one by one."""


def check_images(tested: ModelUnderTest, parity: Parity, seed: int) -> None:
    """Compare the tower alone, and both together; adds cases to ``parity``."""
    vision = tested.loaded.vision
    assert vision is not None and tested.open_tower is not None
    references = [Reference(tested.loaded, torch.float32), Reference(tested.loaded, torch.float64)]
    tower, session = tested.open_tower(), tested.open()
    for number, (rows, columns) in enumerate(GRIDS):
        image = draw(vision, rows, columns, seed + number)
        expected = [_run(r, ((), {"images": [image]})) for r in references]
        fed = {"pixel_values": image[0].numpy(), "grid": image[1].numpy()}
        case = Case(
            f"image of {rows} x {columns} tokens",
            {BATCH: 1, SEQUENCE: rows * columns},
            seed + number,
        )
        add_compared(
            tested, parity, case, expected, tower.run(fed)["image_features"], "image_features"
        )
    for number, layout in enumerate(PROMPTS):
        ids, mask, images = _prompt(tested, layout, seed + number)
        expected = [_run_alone(reference, ids, mask, layout, images) for reference in references]
        fed = _fed(tested, tower, ids, mask, images)
        for pieces, how in _pieces(ids.shape[1]):
            got = _in_pieces(tested, session, fed, pieces)[mask.astype(bool)]
            name = f"{len(images)} images in {len(ids)} rows, {how}"
            sizes = {BATCH: len(ids), SEQUENCE: ids.shape[1]}
            add_compared(
                tested, parity, Case(name, sizes, seed), expected, got, tested.output_names[0]
            )
        memory.trim_memory()


def _run(reference: Reference, given: Arguments) -> np.ndarray:
    [output] = reference(given)
    return output


def _run_alone(
    reference: Reference,
    ids: np.ndarray,
    mask: np.ndarray,
    layout: Sequence[Sequence[tuple[int, int]]],
    images: Images,
) -> np.ndarray:
    """Return logits (tokens, vocabulary) of each row with its own images."""
    found, left = [], list(images)
    for row, kept, own in zip(ids, mask.astype(bool), layout, strict=True):
        alone = torch.from_numpy(row[kept][None])
        given: Arguments = ((alone, torch.ones_like(alone)), {"images": left[: len(own)]})
        found.append(_run(reference, given)[0])
        left = left[len(own) :]
    return np.concatenate(found)


def _prompt(
    tested: ModelUnderTest, layout: Sequence[Sequence[tuple[int, int]]], seed: int
) -> tuple[np.ndarray, np.ndarray, Images]:
    """Draw words, images and words; rows are padded on the left to the longest."""
    vision, language = tested.loaded.vision, tested.loaded.language
    assert vision is not None and language is not None
    random = np.random.default_rng(seed)

    def words(count: int) -> list[int]:
        drawn = random.integers(language.vocabulary - 1, size=count)
        return [int(n + (n >= vision.image_token)) for n in drawn]

    rows: list[list[int]] = []
    images: list[tuple[torch.Tensor, torch.Tensor]] = []
    for row in layout:
        ids = words(3)
        for height, width in row:
            images.append(draw(vision, height, width, seed + len(images)))
            ids += [vision.image_token] * (height * width) + words(2)
        rows.append(ids + words(STEPS))
    longest = max(map(len, rows))
    mask = np.array([[0] * (longest - len(r)) + [1] * len(r) for r in rows])
    return np.array([words(longest - len(r)) + r for r in rows]), mask, images


def _fed(
    tested: ModelUnderTest,
    tower: InferenceSession,
    ids: np.ndarray,
    mask: np.ndarray,
    images: Images,
) -> dict[str, np.ndarray]:
    assert tested.vision is not None
    arrays = [(pixels.numpy(), grid.numpy()) for pixels, grid in images]
    found = image_inputs(tested.vision, tower.run, ids, arrays)
    return tested.complete({"input_ids": ids, "attention_mask": mask, **found})


def _pieces(length: int) -> list[tuple[list[int], str]]:
    """Return lengths of pieces, with words for them."""
    first = (length - STEPS) // 2
    steps = [1] * STEPS
    return [
        ([length], "whole"),
        ([first, length - STEPS - first, *steps], f"2 pieces, then {STEPS} tokens"),
    ]


def _in_pieces(
    tested: ModelUnderTest,
    session: InferenceSession,
    fed: dict[str, np.ndarray],
    pieces: Sequence[int],
) -> np.ndarray:
    state, parts, start = tested.initial_state(len(fed["input_ids"])), [], 0
    for size in pieces:
        part = {name: values[:, start : start + size] for name, values in fed.items()}
        outputs = session.run({**part, **state})
        state = {s.past: outputs[s.present] for s in tested.states}
        parts.append(outputs[tested.output_names[0]])
        start += size
    return np.concatenate(parts, 1)
