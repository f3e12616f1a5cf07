"""A language model of transformers with its vision tower, as its library runs it: the original.

input_ids, attention_mask               text alone
and inputs_embeds, embeds_mask, ...     as the decoder of an artifact takes it
and images                              as the library takes them, tower and positions included
images alone                            -> features of all images, (tokens, width)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linexport import patches
from linexport.patches import rotary
from linexport.sources.hugging_face.causal_model import OriginalCausalModel
from linexport.sources.hugging_face.heads import Head
from linexport.sources.hugging_face.vision.positions import advances, embeddings, grid_positions
from linexport.sources.loaded_model import Images, VisionTower
from linexport.system.untyped import LibraryObject


class OriginalWithImages(OriginalCausalModel):
    """The model in plain PyTorch."""

    def __init__(self, model: LibraryObject, head: Head, vision: VisionTower) -> None:
        super().__init__(model, head)
        self._image_token, self._inputs = vision.image_token, vision.inputs

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        embeds_mask: Tensor | None = None,
        position_offsets: Tensor | None = None,
        images: Images = (),
    ) -> Tensor:
        """The output of the head, or what the tower gives."""
        rotary.reset(self.model)
        if input_ids is None or attention_mask is None:
            return self._features(images)
        if images:
            given = self._inputs(input_ids, self._image_token, images)
            positions = {} if "mm_token_type_ids" in given else self._counted(attention_mask)
            given = {"input_ids": input_ids, **given, **positions}
        elif inputs_embeds is not None and embeds_mask is not None:
            own = embeddings(self.model, input_ids, inputs_embeds, embeds_mask)
            given = {"inputs_embeds": own, **self._counted(attention_mask)}
            if position_offsets is not None:
                steps = advances(attention_mask, position_offsets)
                nothing = steps.new_zeros(len(steps), 1)
                given["position_ids"] = grid_positions(steps, position_offsets, nothing)
        else:
            return super().forward(input_ids, attention_mask)
        with patches.original(patches.modeling_files(self.model)):
            output = self.run(**given, attention_mask=attention_mask, use_cache=False)
        return self.head.result(output, attention_mask)

    def step(self, input_ids: Tensor, attention_mask: Tensor, *given: Any) -> Tensor:
        """See ``OriginalCausalModel``; embeddings of images are not timed separately."""
        if hasattr(self.model.model, "rope_deltas"):  # of images of an earlier call
            self.model.model.rope_deltas = None
        return super().step(input_ids, attention_mask, given[-1])

    def _counted(self, mask: Tensor) -> dict[str, Tensor]:
        return self.positions(mask, mask.shape[1])

    def _features(self, images: Images) -> Tensor:
        given = self._inputs(torch.zeros(1, 1), self._image_token, images)
        given.pop("mm_token_type_ids", None)
        with patches.original(patches.modeling_files(self.model)):
            return torch.cat(list(self.model.get_image_features(**given).pooler_output))
