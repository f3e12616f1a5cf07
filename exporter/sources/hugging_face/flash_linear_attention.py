"""A checkpoint of flash-linear-attention, built from ``linexport.models.flash_linear_attention``.

The library itself is not needed. States are those of the linexport ops the model is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from linexport.errors import LinexportError
from linexport.sources.files import first_line, refuse
from linexport.sources.hugging_face.folder import (
    CONFIG,
    check_weights,
    copied_files,
    digest,
)
from linexport.sources.hugging_face.size_limits import limit_size
from linexport.sources.loaded_model import LanguageFacts, LoadedModel, Source
from linexport.sources.memory_map import mapped_parameters
from linexport.sources.packed import StoredWeights
from linexport.sources.weights import check_finite, named_tensors, parameter_summary

if TYPE_CHECKING:
    from linexport.models.flash_linear_attention import CausalLM

BATCH, SEQUENCE = "batch", "seq"
EXAMPLE = (2, 5)

EMBEDDINGS, LOGITS = "embeddings.weight", "lm_head.weight"
"""One weight under two names, where they are tied; files may hold the first alone."""


def load(
    folder: Path, config: Mapping[str, object], weights: StoredWeights, location: str
) -> LoadedModel:
    """The language model of a folder whose model type is one of ``layouts()``.

    Raises:
        UsageError: a setting of the configuration is of the wrong type.
        UnsupportedModelError: a setting that is not implemented, or weights that do not fit.
    """
    import torch
    from torch.export import Dim

    from linexport.models.flash_linear_attention import build

    copied = copied_files(folder)
    try:
        with torch.device("meta"), limit_size(folder, weights):
            build(config)
        with mapped_parameters(weights.float32_bytes):
            model = build(config)
    except LinexportError:
        raise
    except Exception as error:  # widths are computed from settings, any of which may be wrong
        raise refuse(
            folder / CONFIG,
            f"a configuration from which no model can be built ({first_line(error)})",
            "compare it with that of a published model of the same type",
        ) from error
    _load_weights(model, folder, weights)
    check_finite(named_tensors(model), str(folder))
    settings = model.settings
    about = f"{config['model_type']}: {parameter_summary('CausalLM', model)}"
    if weights.title:
        about = f"{about}, read from weights in {weights.title}"
    ids = torch.zeros(EXAMPLE, dtype=torch.int64)
    tokens = {0: Dim(BATCH), 1: Dim(SEQUENCE)}
    return LoadedModel(
        module=model.eval(),
        args=(ids, torch.ones_like(ids)),
        kwargs={},
        dynamic_shapes=(tokens, tokens),
        source=Source(
            kind="hugging_face",
            location=location,
            sha256=digest([folder / CONFIG, *weights.files]),
            description=about,
        ),
        integer_ranges={0: (0, settings.vocab_size), 1: (1, 2)},
        language=LanguageFacts(
            vocabulary=settings.vocab_size,
            context=None,
            layers=tuple(f"{model.stack}.layers.{i}" for i in range(settings.num_hidden_layers)),
        ),
        outputs=("logits",),
        defaults={"attention_mask": 1},
        files=copied,
    )


def _load_weights(model: CausalLM, folder: Path, weights: StoredWeights) -> None:
    import torch

    found, places = dict(weights.tensors), model.state_dict()
    embeddings = f"{model.stack}.{EMBEDDINGS}"
    if model.settings.tie_word_embeddings and embeddings in found:
        found.setdefault(LOGITS, found[embeddings])
    check_weights(
        folder,
        absent=places.keys() - found.keys(),
        misshapen=[
            (name, found[name].shape, tuple(place.shape))
            for name, place in places.items()
            if name in found and found[name].shape != tuple(place.shape)
        ],
        unknown=found.keys() - places.keys(),
    )
    with torch.no_grad():
        for name, place in places.items():
            place.copy_(found[name].read())
