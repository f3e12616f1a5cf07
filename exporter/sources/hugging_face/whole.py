"""A model of transformers as one module in plain PyTorch, called once for a whole sequence.

    input_ids (B, T), attention_mask (B, T) -> its first output
    pixel_values (B, C, H, W)               -> its first output

That is the logits, or the last hidden states of a model without a head. Attention is
``F.scaled_dot_product_attention``, which ``linexport linearize`` finds; nothing is patched, and no
state is carried.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

from linexport.errors import UnsupportedModelError
from linexport.patches.library import attribute
from linexport.sources.files import refuse
from linexport.sources.hugging_face.folder import CONFIG, digest, read_config, weights_of
from linexport.sources.hugging_face.pretrained import as_published
from linexport.sources.loaded_model import LoadedModel, Source
from linexport.sources.weights import check_finite, named_tensors, parameter_summary
from linexport.system.untyped import LibraryObject

EXAMPLE = (2, 8)


class Whole(nn.Module):
    """A model as one call without states.

    Raises:
        UnsupportedModelError: the model takes something else than tokens.
    """

    taken = "input_ids"

    def __init__(self, model: LibraryObject) -> None:
        super().__init__()
        if model.main_input_name != self.taken or model.config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{type(model).__name__} takes {model.main_input_name}"
                f"{' and its decoder more' if model.config.is_encoder_decoder else ''}; expected "
                "input_ids and attention_mask alone. Wrap it in a module that takes tensors, in "
                "order, and name a factory that builds it, package.module:callable."
            )
        model.set_attn_implementation("sdpa")
        self.model = model
        taken = inspect.signature(model.forward).parameters
        self.options = {"use_cache": False} if "use_cache" in taken else {}

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The first output."""
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **self.options)
        first: Tensor = output[0]
        return first


class WholeOfImages(Whole):
    """A model of images of one size, as one call."""

    taken = "pixel_values"

    def forward(self, pixel_values: Tensor) -> Tensor:  # type: ignore[override]
        """The first output."""
        first: Tensor = self.model(pixel_values=pixel_values)[0]
        return first


def load_whole(folder: Path, location: str | None = None) -> LoadedModel:
    """The model of a folder, as the class that its config names.

    Args:
        folder: with config.json and safetensors files; code in it is not run.
        location: what the user called it, where that is not the folder.

    Raises:
        LinexportError: as ``load_hugging_face``; or the model takes something else than tokens.
    """
    config = read_config(folder, trust_remote_code=False)
    weights = weights_of(folder, config)
    model = as_published(folder, config, weights)
    if not attribute(type(model), "_supports_sdpa"):
        raise refuse(
            folder,
            f"{type(model).__name__}, whose attention is not F.scaled_dot_product_attention",
            "rewrite it to call that, in a factory, package.module:callable",
        )
    return whole(
        model,
        Source(
            kind="hugging_face",
            location=location or str(folder),
            sha256=digest([folder / CONFIG, *weights.files]),
            description=f"{config['model_type']}: {parameter_summary(type(model).__name__, model)}",
        ),
    )


def whole(model: LibraryObject, source: Source) -> LoadedModel:
    """A model that is in memory already.

    Raises:
        UnsupportedModelError: see ``Whole``.
    """
    check_finite(named_tensors(model), source.location)
    if model.main_input_name == WholeOfImages.taken:
        return _of_images(model, source)
    text = model.config.get_text_config()
    ids = torch.arange(EXAMPLE[0] * EXAMPLE[1]).reshape(EXAMPLE) % int(text.vocab_size)
    length = Dim("seq", max=getattr(text, "max_position_embeddings", None))
    tokens = {0: Dim("batch"), 1: length}
    return LoadedModel(
        module=Whole(model).eval(),
        args=(ids, torch.ones_like(ids)),
        kwargs={},
        dynamic_shapes=(tokens, tokens),
        source=source,
        integer_ranges={0: (0, int(text.vocab_size)), 1: (1, 2)},
    )


def _of_images(model: LibraryObject, source: Source) -> LoadedModel:
    """A model of images; the size is that of its config."""
    config = model.config
    side = getattr(config, "image_size", None)
    sides = (side, side) if isinstance(side, int) else side
    channels = getattr(config, "num_channels", 3)
    if not (isinstance(sides, list | tuple) and len(sides) == 2):
        raise UnsupportedModelError(
            f"{type(model).__name__} takes {WholeOfImages.taken}, and its config has image_size "
            f"{side}; expected a number of pixels, or two. Wrap it in a module that takes tensors, "
            "in order, and name a factory that builds it, package.module:callable."
        )
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(EXAMPLE[0], int(channels), *map(int, sides), generator=generator)
    return LoadedModel(
        module=WholeOfImages(model).eval(),
        args=(images,),
        kwargs={},
        dynamic_shapes=({0: Dim("batch")},),
        source=source,
    )
