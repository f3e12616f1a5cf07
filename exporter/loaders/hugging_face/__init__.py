"""A Hugging Face model folder (config.json and safetensors) becomes a LoadedModel.

The model is built by transformers, or from linexport's own modules for checkpoints of
flash-linear-attention, in float32 and without anything being downloaded. Code in the folder is not
run unless that was asked for.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from linexport.errors import LinexportError, UsageError
from linexport.loaders.files import first_line, refuse
from linexport.loaders.hugging_face.folder import (
    CONFIG,
    copied_files,
    digest,
    read_config,
    weight_files,
)
from linexport.loaders.hugging_face.pretrained import causal_language_model, supported
from linexport.loaders.loaded_model import LanguageFacts, LoadedModel, Source
from linexport.loaders.weights import named_tensors, non_finite_warnings, parameter_summary

__all__ = [
    "adopt",
    "cached_folder",
    "is_language_model",
    "is_of_transformers",
    "load_hugging_face",
    "supported",
]


def load_hugging_face(
    folder: Path, *, location: str | None = None, trust_remote_code: bool = False
) -> LoadedModel:
    """Load the causal language model of a folder.

    Args:
        folder: with config.json and safetensors files.
        location: what the user called it, where that is not the folder.
        trust_remote_code: run Python code of the folder, if its configuration asks for that.

    Returns:
        The model in eval mode, and with it what is traced in its place.

    Raises:
        EnvironmentProblemError: transformers is not installed.
        UsageError: a file cannot be read.
        UnsupportedModelError: a model that transformers does not know, quantised weights, weights
            that are missing or do not fit, custom code, or layers no patch stands in for.
    """
    config = read_config(folder, trust_remote_code)
    files, copied = weight_files(folder), copied_files(folder)
    from linexport.models import flash_linear_attention as fla

    if config["model_type"] in fla.layouts():
        from linexport.loaders.hugging_face.flash_linear_attention import load

        return load(folder, config, files, location or str(folder))
    model = causal_language_model(folder, config, files, trust_remote_code)
    source = Source(
        kind="hugging_face",
        location=location or str(folder),
        sha256=digest([folder / CONFIG, *files]),
        description=f"{config['model_type']}: {parameter_summary(type(model).__name__, model)}",
    )
    try:
        adopted = adopt(model, source)
    except LinexportError:
        raise
    except Exception as error:  # the model is run, and any value of its configuration may be wrong
        raise refuse(
            folder,
            f"a model that cannot be run ({first_line(error)})",
            "compare the configuration with that of a published model of the same type",
        ) from error
    return replace(
        adopted,
        warnings=(*_left_out(config, model), *adopted.warnings),
        files=copied,
    )


def adopt(model: Any, source: Source) -> LoadedModel:
    """Import a causal language model of transformers that is in memory already.

    Raises:
        UnsupportedModelError: layers no patch stands in for.
    """
    from linexport.loaders.hugging_face.causal_model import OriginalCausalModel, decode_module

    model.set_attn_implementation("eager")
    # Buffers may be in another precision than the weights were asked for.
    original = OriginalCausalModel(model.eval().float()).eval()
    step = decode_module(model)
    text = model.config.get_text_config(decoder=True)
    vocabulary = int(text.vocab_size)
    return LoadedModel(
        module=original,
        args=step.args[:2],
        kwargs={},
        dynamic_shapes=step.dynamic_shapes[:2],
        source=source,
        integer_ranges={0: (0, vocabulary), 1: (1, 2)},
        warnings=non_finite_warnings(named_tensors(model)),
        decode_module=step,
        language=LanguageFacts(
            vocabulary=vocabulary,
            context=getattr(text, "max_position_embeddings", None),
            layers=_layers(original, int(text.num_hidden_layers)),
        ),
        defaults={"attention_mask": 1},
    )


def is_of_transformers(module: Any) -> bool:
    """``module`` is a model of transformers, if that was imported at all."""
    library = sys.modules.get("transformers")
    return library is not None and isinstance(module, library.PreTrainedModel)


def is_language_model(module: Any) -> bool:
    """``module`` is a causal language model of transformers."""
    return is_of_transformers(module) and isinstance(
        module, sys.modules["transformers"].GenerationMixin
    )


def cached_folder(name: str) -> Path:
    """The folder in which an earlier download put a model of the hub.

    Raises:
        UsageError: the model was not downloaded; nothing is downloaded here.
    """
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, local_files_only=True))
    except (ImportError, ValueError, OSError):
        raise UsageError(
            f"There is no file or folder {name}, and no model of that name in the Hugging Face "
            f"cache. linexport downloads nothing: run `hf download {name}` first if you want it."
        ) from None


def _left_out(config: dict[str, Any], model: Any) -> tuple[str, ...]:
    """Warn of the parts of a model that are not converted: all but the language model."""
    whole, taken = config.get("architectures") or [], type(model).__name__
    if not whole or taken in whole:
        return ()
    return (f"Of {whole[0]} only the language model, {taken}, is converted: it takes text alone.",)


def _layers(module: Any, count: int) -> tuple[str, ...]:
    """Names of the submodules that are the model's layers, in order."""
    from torch import nn

    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return tuple(f"{name}.{index}" for index in range(count))
    return ()
