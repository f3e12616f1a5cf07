"""A Hugging Face model folder (config.json and safetensors) becomes a LoadedModel.

The model is built by transformers, or from linexport's own modules for checkpoints of
flash-linear-attention, in float32 and without anything being downloaded. Code in the folder is not
run unless that was asked for.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linexport.errors import LinexportError
from linexport.loaders.files import first_line, refuse
from linexport.loaders.hugging_face.folder import (
    CONFIG,
    cached_folder,
    copied_files,
    digest,
    read_config,
    read_json,
    weight_files,
)
from linexport.loaders.hugging_face.pretrained import build_causal, supported
from linexport.loaders.loaded_model import LanguageFacts, LoadedModel, Source
from linexport.loaders.weights import named_tensors, non_finite_warnings, parameter_summary
from linexport.manifest.records import HeadName

if TYPE_CHECKING:
    from linexport.loaders.hugging_face.heads import Head
    from linexport.loaders.hugging_face.lora import Adapter

__all__ = [
    "cached_folder",
    "declared_head",
    "import_model",
    "is_language_model",
    "is_of_transformers",
    "load_adapter",
    "load_hugging_face",
    "supported",
]


def load_hugging_face(
    folder: Path,
    *,
    location: str | None = None,
    trust_remote_code: bool = False,
    pooling: str | None = None,
    adapter: Adapter | None = None,
) -> LoadedModel:
    """Load the causal model of a folder, with the head that its configuration names.

    Args:
        folder: with config.json and safetensors files.
        location: what the user called it, where that is not the folder.
        trust_remote_code: run Python code of the folder, if its configuration asks for that.
        pooling: of a base model's hidden states: "mean", "last" or "cls"; None for all of them.
        adapter: merged into the weights.

    Returns:
        The model in eval mode, and with it what is traced in its place.

    Raises:
        EnvironmentProblemError: transformers is not installed.
        UsageError: a file cannot be read, or a pooling that the model cannot have.
        UnsupportedModelError: a head that is not converted, a model that transformers does not
            know, quantised weights, weights that are missing or do not fit, custom code, or layers
            no patch stands in for.
    """
    config = read_config(folder, trust_remote_code)
    from linexport.loaders.hugging_face.heads import CAUSAL, check_padding, head_of
    from linexport.models import flash_linear_attention as fla

    head = head_of(folder / CONFIG, config, pooling)
    if adapter is not None:
        adapter.check_head(head.name, folder)
    files, copied = weight_files(folder), copied_files(folder)
    if config["model_type"] in fla.layouts():
        from linexport.loaders.hugging_face.flash_linear_attention import load

        if head is not CAUSAL or adapter is not None:
            raise refuse(
                folder / CONFIG,
                f"a checkpoint of flash-linear-attention, {config.get('architectures')}; only "
                "causal language models of it are converted, without adapters",
                "build the model in a factory, package.module:callable",
            )
        return load(folder, config, files, location or str(folder))
    model = build_causal(folder, config, files, head.auto, trust_remote_code)
    check_padding(folder, head, model)
    about = f"{config['model_type']}: {parameter_summary(type(model).__name__, model)}"
    if adapter is not None:
        adapter.merge(model)
        files, about = [*files, *adapter.files], f"{about}, with an adapter merged into them"
        copied = tuple({p.name: p for p in (*copied, *adapter.copied)}.values())
    source = Source(
        kind="hugging_face",
        location=location or str(folder),
        sha256=digest([folder / CONFIG, *files]),
        description=about,
    )
    try:
        imported = import_model(model, source, head)
    except LinexportError:
        raise
    except Exception as error:  # the model is run, and any value of its configuration may be wrong
        raise refuse(
            folder,
            f"a model that cannot be run ({first_line(error)})",
            "compare the configuration with that of a published model of the same type",
        ) from error
    return replace(
        imported,
        warnings=(*_left_out(config, model), *imported.warnings),
        files=copied,
    )


def load_adapter(folder: Path, *, location: str | None = None, **options: Any) -> LoadedModel:
    """Load the model that an adapter of peft's changes, with the adapter merged.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        location: what the user called it, where that is not the folder.
        **options: of ``load_hugging_face``.

    Raises:
        UsageError: a file cannot be read, or the model is not there.
        UnsupportedModelError: an adapter of another kind than LoRA, with settings that cannot be
            merged, or one of another model; and as ``load_hugging_face``.
    """
    from linexport.loaders.hugging_face.lora import base_folder, read_adapter

    adapter, base = read_adapter(folder), base_folder(folder)
    location = location or str(folder)
    return load_hugging_face(base, location=location, adapter=adapter, **options)


def import_model(model: Any, source: Source, head: Head | None = None) -> LoadedModel:
    """Import a causal model of transformers that is in memory already.

    Args:
        model: of transformers.
        source: where it came from.
        head: the part of it that gives the output; None for that of a causal language model.

    Raises:
        UnsupportedModelError: layers no patch stands in for.
    """
    from linexport.loaders.hugging_face.causal_model import OriginalCausalModel
    from linexport.loaders.hugging_face.heads import CAUSAL
    from linexport.loaders.hugging_face.streaming_model import decode_module

    head = head or CAUSAL
    model.set_attn_implementation("eager")
    # Buffers may be in another precision than the weights were asked for.
    original = OriginalCausalModel(model.eval().float(), head).eval()
    step = decode_module(model, head)
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
            head=head.name,
        ),
        defaults={"attention_mask": 1},
    )


def declared_head(source: str | Path | LoadedModel, pooling: str | None) -> HeadName | None:
    """Return the head that a model has, before it is loaded; None where no configuration says so.

    Args:
        source: of a conversion.
        pooling: see ``load_hugging_face``.

    Raises:
        UsageError, UnsupportedModelError: see ``heads.head_of``.
    """
    if isinstance(source, LoadedModel):
        return source.language.head if source.language else None
    from linexport.loaders.hugging_face.lora import model_folder

    path = model_folder(source) / CONFIG
    if not path.is_file():
        return None
    from linexport.loaders.hugging_face.heads import head_of

    return head_of(path, read_json(path), pooling).name


def is_of_transformers(module: Any) -> bool:
    """``module`` is a model of transformers, if that was imported at all."""
    library = sys.modules.get("transformers")
    return library is not None and isinstance(module, library.PreTrainedModel)


def is_language_model(module: Any) -> bool:
    """``module`` is a causal language model of transformers."""
    return is_of_transformers(module) and isinstance(
        module, sys.modules["transformers"].GenerationMixin
    )


def _left_out(config: dict[str, Any], model: Any) -> tuple[str, ...]:
    """Warn of the parts of a model that are not converted: all but the language model."""
    whole, taken = config.get("architectures") or [], type(model).__name__
    if whole and taken not in whole:
        part = f"the language model, {taken},"
    elif hasattr(model.config, "vision_config"):
        whole, part = [taken], "the language model"
    else:
        return ()
    return (f"Of {whole[0]} only {part} is converted: it takes text alone.",)


def _layers(module: Any, count: int) -> tuple[str, ...]:
    """Names of the submodules that are the model's layers, in order."""
    from torch import nn

    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return tuple(f"{name}.{index}" for index in range(count))
    return ()
