"""Images in prompts: what clients send to inputs of the model.

bytes --process with limits--> pixel values --vision tower--> inputs of the prompt's tokens
token ids with one image token a picture                  --> as many as each picture takes
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from linexport.artifact.opened_folder import OpenedFolder
from linexport.artifact.text.images import OFFSETS, Image, images_of, vision_of
from linexport.artifact.text.picture_reader import Admit, PictureReader
from linexport.errors import UsageError
from linexport.serving.call_memory import CallMemory
from linexport.serving.computing import Computing
from linexport.serving.prompt_length import ContextLengthError, too_long
from linexport.serving.text import ImageInputs
from linexport.sources.onnx_file.skeleton import skeleton

COPIES = 3
"""Times that the inputs of a prompt are held: by the tower's call, in a queue and in a call."""


class PromptImages:
    """Images of the prompts of one artifact.

    Args:
        source: the artifact.
        computing: where its vision tower runs.
        most: pixels of the images of one request.

    Raises:
        UsageError: the model takes text alone, or images of it cannot be prepared.
        EnvironmentProblemError: a library is not installed.
    """

    def __init__(self, source: OpenedFolder, computing: Computing, most: int) -> None:
        self._vision = vision_of(source.manifest, source.path)
        self._reader = PictureReader(source, most)
        self._computing = computing
        self._memory = CallMemory(
            self._vision.inputs, (), skeleton(source.path / self._vision.file)
        )

    async def inputs(
        self, ids: Sequence[int], pictures: Sequence[bytes], most_tokens: int, admit: Admit
    ) -> tuple[list[int], ImageInputs]:
        """Return a prompt with the tokens of its images, and their inputs.

        Args:
            ids: of the prompt, with one image token for each picture.
            pictures: contents of files, in the order of the tokens.
            most_tokens: of the prompt; the inputs of a longer one are not computed.
            admit: takes the bytes of each stage before it.

        Raises:
            ContextLengthError: the prompt has more tokens.
            UsageError: a picture cannot be read, they have too many pixels, or the prompt has
                other numbers of image tokens.
            Exception: what ``admit`` raises.
        """
        token = self._vision.image_token
        found = sum(one == token for one in ids)
        if found != len(pictures):
            raise UsageError(
                f"The prompt has {found} image tokens for {len(pictures)} images. The chat "
                "template places one for each image: leave out text that is such a token."
            )
        prepared = await self._reader.prepare(pictures, admit)
        prompt = prepared.placed(self._vision, ids)
        if len(prompt) > most_tokens:
            raise ContextLengthError(too_long(len(prompt), most_tokens))
        images = images_of(prepared.images)
        admit(await asyncio.to_thread(self._tower_bytes, images), "the vision tower")
        admit(COPIES * len(prompt) * self._token_bytes(), "the images in its prompt")
        inputs = await self._computing.image_inputs(np.asarray(prompt), prepared.images)
        return prompt, ImageInputs(inputs)

    async def close(self) -> None:
        """End the process that prepares pictures."""
        await self._reader.close()

    def _tower_bytes(self, images: Sequence[Image]) -> int:
        """Return the bytes of the largest call of the tower: of the image of the most patches."""
        pixels, grid = max(images, key=lambda image: len(image[0]))
        names = (given.name for given in self._vision.inputs)
        return self._memory.bytes(dict(zip(names, (pixels, grid), strict=True)))

    def _token_bytes(self) -> int:
        """Return the bytes of a token's inputs: its embedding, its mask and its position."""
        width = self._vision.outputs[0].shape[-1]
        return 4 * int(str(width)) + 8 + 8 * OFFSETS
