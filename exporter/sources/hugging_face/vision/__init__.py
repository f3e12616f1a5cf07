"""Vision towers of language models of transformers, one model type in each file.

    pixel_values (patches, channels), grid (2,) -> image_features (tokens, width)

for one image of grid[0] x grid[1] patches. What transformers computes from the grid in Python, so
that a trace would freeze it, is computed here from tensors: places of patches, interpolation of
position embeddings. All else is the library's own modules.
"""

from __future__ import annotations

from collections.abc import Callable

from linexport.sources.hugging_face.named_class import named_class
from linexport.sources.hugging_face.vision import lfm2_vl, qwen3_5
from linexport.sources.loaded_model import VisionTower
from linexport.system.json_object import JsonObject
from linexport.system.untyped import LibraryObject

TOWERS: dict[str, Callable[[LibraryObject], VisionTower]] = {
    "lfm2_vl": lfm2_vl.tower,
    "qwen3_5": qwen3_5.tower,
    "qwen3_5_moe": qwen3_5.tower,
}
"""The tower of a model, by its model type."""


def has_tower(config: JsonObject) -> bool:
    """Return whether a configuration is of a language model with a tower that is converted."""
    named = named_class(config) or ""
    return config["model_type"] in TOWERS and named.endswith("ForConditionalGeneration")
