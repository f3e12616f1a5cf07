"""A Hugging Face model folder (config.json and safetensors) becomes a LoadedModel.

The model is built by transformers, or from linexport's own modules for checkpoints of
flash-linear-attention, in float32 and without anything being downloaded. Code in the folder is not
run unless that was asked for.
"""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import linexport
from linexport.errors import EnvironmentProblemError, LinexportError, UnsupportedModelError
from linexport.manifest.records import POOLING_MASK, HeadName
from linexport.sources.detect import Kind, recognise
from linexport.sources.files import first_line, refuse
from linexport.sources.hugging_face.architecture import WITH_TOWER, check_class
from linexport.sources.hugging_face.folder import (
    CONFIG,
    check_version,
    copied_files,
    digest,
    missing_package,
    model_of,
    of_another_release,
    processor_files,
    read_config,
    read_json,
    weights_of,
)
from linexport.sources.hugging_face.pretrained import build_causal, supported
from linexport.sources.loaded_model import DecodeModule, LanguageFacts, LoadedModel, Source
from linexport.sources.packed import StoredWeights
from linexport.sources.weights import check_finite, named_tensors, parameter_summary
from linexport.system.json_object import JsonObject
from linexport.system.untyped import LibraryObject
from linexport.system.versions import TRANSFORMERS

if TYPE_CHECKING:
    from linexport.sources.hugging_face.heads import Head
    from linexport.sources.hugging_face.lora import Adapter

MTP = re.compile(r"(model\.)?mtp\.")
"""Names of weights of heads for multi-token prediction."""

TRACED_AS_A_WHOLE = (
    "The model is traced without its library's cache instead, attention is found by its structure, "
    "and a head for multi-token prediction is left out."
)
"""Sentence of the warning where states cannot be read."""

__all__ = [
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
    vision: bool = True,
    mtp: bool = True,
    weights: StoredWeights | None = None,
) -> LoadedModel:
    """Load the causal model of a folder, with the head that its configuration names.

    Args:
        folder: with config.json and safetensors files.
        location: what the user called it, where that is not the folder.
        trust_remote_code: run Python code of the folder, if its configuration asks for that.
        pooling: of a base model's hidden states: "mean", "last" or "cls"; None for all of them.
        adapter: merged into the weights.
        vision: take the vision tower of a model that has one, where it is one of
            ``vision.TOWERS``; else its language model alone.
        mtp: take the head for multi-token prediction of a causal model that has one.
        weights: those of the model; None: those in the folder.

    Returns:
        The model in eval mode, and with it what is traced in its place.

    Raises:
        EnvironmentProblemError: transformers is not installed.
        UsageError: a file cannot be read, or a pooling that the model cannot have.
        UnsupportedModelError: a head that is not converted, a model that transformers does not
            know, quantised weights, weights that are missing or do not fit, custom code, or layers
            no patch stands in for.
    """
    saved, folder = folder, model_of(folder)
    config = read_config(folder, trust_remote_code)
    from linexport.models import flash_linear_attention as fla
    from linexport.sources.hugging_face import bidirectional, flash_linear_attention
    from linexport.sources.hugging_face.choose_head import head_of, modules_left_out
    from linexport.sources.hugging_face.heads import CAUSAL, check_padding
    from linexport.sources.hugging_face.vision import has_tower

    head = head_of(folder / CONFIG, config, pooling, saved)
    if adapter is not None:
        adapter.check_head(head.name, folder)
    weights = weights or weights_of(folder, config)
    copied = tuple(
        {path.name: path for path in (*copied_files(saved), *copied_files(folder))}.values()
    )
    if config["model_type"] in {*fla.layouts(), *fla.OTHERS}:
        _check_own_modules(folder, config, head, adapter)
        return flash_linear_attention.load(folder, config, weights, location or str(saved))
    if bidirectional.is_encoder(config) and not trust_remote_code:
        if adapter is not None:
            raise refuse(
                folder, "an adapter of an encoder", "merge it with peft, and save the model"
            )
        loaded = bidirectional.load(folder, config, weights, head, location or str(saved))
        return replace(loaded, warnings=modules_left_out(saved, pooling), files=copied)
    towers = vision and head is CAUSAL and adapter is None and has_tower(config)
    auto = WITH_TOWER if towers else head.auto
    model = build_causal(folder, config, weights, auto, trust_remote_code)
    files = [*weights.files, *getattr(head.pool, "files", ())]
    check_padding(folder, head, model)
    about = f"{config['model_type']}: {parameter_summary(type(model).__name__, model)}"
    if weights.title:
        about = f"{about}, read from weights in {weights.title}"
    if adapter is not None:
        adapter.merge(model)
        files, about = [*files, *adapter.files], f"{about}, with an adapter merged into them"
        copied = tuple({p.name: p for p in (*copied, *adapter.copied)}.values())
    source = Source(
        kind="hugging_face",
        location=location or str(saved),
        sha256=digest([folder / CONFIG, *files]),
        description=about,
    )
    with _faults_of_its_code(folder, config):
        predictor, left_out = _predictor(folder, weights, model, source, mtp and head is CAUSAL)
        imported = import_model(model, source, head, towers, predictor)
    return replace(
        imported,
        warnings=(
            *(() if towers else _left_out(config, model)),
            *modules_left_out(saved, pooling),
            *left_out,
            *imported.warnings,
        ),
        files=(*copied, *(processor_files(folder) if towers else ())),
    )


def _check_own_modules(
    folder: Path, config: JsonObject, head: Head, adapter: Adapter | None
) -> None:
    """Check that linexport has modules for a checkpoint of flash-linear-attention.

    Raises:
        UnsupportedModelError: its layers, or its head, are others, or an adapter changes them.
    """
    from linexport.models import flash_linear_attention as fla
    from linexport.sources.hugging_face.heads import CAUSAL

    if config["model_type"] in fla.OTHERS:
        raise refuse(
            folder / CONFIG,
            f"model_type {config['model_type']!r} of flash-linear-attention, whose layers are not "
            f"among linexport's modules; converted are {', '.join(fla.layouts())}",
            "build the model in plain PyTorch in a factory, package.module:callable",
        )
    if head is not CAUSAL or adapter is not None:
        raise refuse(
            folder / CONFIG,
            f"a checkpoint of flash-linear-attention, {config.get('architectures')}; only "
            "causal language models of it are converted, without adapters",
            "build the model in a factory, package.module:callable",
        )
    check_class(folder / CONFIG, config, head.auto, code=False)


@contextlib.contextmanager
def _faults_of_its_code(folder: Path, config: JsonObject) -> Iterator[None]:
    """Say whose fault it is where the code of a model fails on an example.

    Raises:
        EnvironmentProblemError: a package that it imports is not installed, or linexport's code
            does not fit the installed transformers.
        UnsupportedModelError: any other failure: its configuration may have any value.
    """
    try:
        yield
    except LinexportError:
        raise
    except ImportError as error:
        raise missing_package(config["model_type"], error) from error
    except Exception as error:
        if _is_of_linexport(error):
            raise EnvironmentProblemError(
                f"The code of linexport for models of type {config['model_type']!r} does not fit "
                f"that of {TRANSFORMERS.package} ({first_line(error)}). {TRANSFORMERS.advice()}"
            ) from error
        raise refuse(
            folder,
            "a model whose own code cannot be run on an example, whole and then in pieces with a "
            f"cache ({first_line(error)})",
            "compare the configuration with that of a published model of the same type"
            f"{of_another_release()}",
        ) from error


def _is_of_linexport(error: Exception) -> bool:
    """Return whether linexport's own code read an attribute that the library does not have."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f.filename for f in frames if f.name != "__getattr__"]  # that of torch.nn.Module
    return isinstance(error, AttributeError) and own[-1].startswith(tuple(linexport.__path__))


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
    from linexport.sources.hugging_face.lora import base_folder, read_adapter

    adapter, base = read_adapter(folder), base_folder(folder)
    location = location or str(folder)
    return load_hugging_face(base, location=location, adapter=adapter, **options)


def import_model(
    model: LibraryObject,
    source: Source,
    head: Head | None = None,
    vision: bool = False,
    predictor: LoadedModel | None = None,
) -> LoadedModel:
    """Import a causal model of transformers that is in memory already.

    Args:
        model: of transformers.
        source: where it came from.
        head: the part of it that gives the output; None for that of a causal language model.
        vision: its vision tower is taken, too.
        predictor: its head for multi-token prediction.

    Raises:
        EnvironmentProblemError: transformers is too old.
        UnsupportedModelError: layers no patch stands in for.
    """
    check_version()
    from linexport import patches
    from linexport.patches.state_cache import UnknownCodeError
    from linexport.sources.hugging_face.causal_model import OriginalCausalModel
    from linexport.sources.hugging_face.heads import CAUSAL
    from linexport.sources.hugging_face.streaming_model import decode_module
    from linexport.sources.hugging_face.vision import TOWERS
    from linexport.sources.hugging_face.vision.original import OriginalWithImages

    check_finite(named_tensors(model), source.location)
    head = head or CAUSAL
    model.set_attn_implementation("eager")
    # Buffers may be in another precision than the weights were asked for.
    model = model.eval().float()
    tower = TOWERS[model.config.model_type](model) if vision else None
    original = OriginalCausalModel(model, head).eval()
    if tower is not None:
        original = OriginalWithImages(model, head, tower).eval()
    lacking = patches.missing(patches.modeling_files(model))
    step, unread = None, ""
    try:
        step = decode_module(model, head, tower, hidden=predictor is not None)
    except UnknownCodeError as error:
        if tower is not None:
            raise
        unread = f"{lacking or error} {TRACED_AS_A_WHOLE}"
    except Exception as error:
        if not lacking:
            raise
        if tower is not None:
            raise UnsupportedModelError(f"{lacking} ({first_line(error)})") from error
        unread = f"{lacking} {TRACED_AS_A_WHOLE}"
    loaded = _imported(original, source, head, tower, predictor, step, unread or lacking)
    if step is None or tower is not None or not lacking:
        return loaded
    whole = _imported(original, source, head, None, None, None, f"{lacking} {TRACED_AS_A_WHOLE}")
    return replace(loaded, whole=whole)


def _imported(
    original: LibraryObject,
    source: Source,
    head: Head,
    tower: LibraryObject,
    predictor: LoadedModel | None,
    step: DecodeModule | None,
    unread: str,
) -> LoadedModel:
    """Return the model to convert, with its states where it has a step."""
    from linexport.patches import rotary
    from linexport.sources.hugging_face.heads import KEPT
    from linexport.sources.hugging_face.streaming_model import swapped, whole_inputs
    from linexport.sources.hugging_face.vision.positions import DEFAULTS, RANGES

    model = original.model
    inputs, shapes = (step.args, step.dynamic_shapes) if step else whole_inputs(head)
    text = model.config.get_text_config(decoder=True)
    context, same = getattr(text, "max_position_embeddings", None), rotary.limit(model)
    if same is not None and head.by_token:
        context = same if context is None else min(context, same)
    vocabulary = int(text.vocab_size)
    given = (2 if head.takes_prompt else 3) if tower is None else len(inputs) - 1
    decoder = model if tower is None else model.get_decoder()
    return LoadedModel(
        module=original,
        args=inputs[:given],
        kwargs={},
        dynamic_shapes=shapes[:given],
        source=source,
        integer_ranges={0: (0, vocabulary), 1: (1, 2), **(RANGES if head.takes_prompt else KEPT)},
        warnings=(
            *(step.warnings if step else ()),
            *filter(None, (unread,)),
            *_changing(same, head),
        ),
        decode_module=step,
        language=LanguageFacts(
            vocabulary=vocabulary,
            context=context,
            layers=_layers(original, decoder, int(text.num_hidden_layers)),
            head=head.name,
        ),
        defaults={"attention_mask": 1, POOLING_MASK: 1, **DEFAULTS},
        outputs=None if step else (head.output,),
        vision=tower,
        predictor=predictor if step else None,
        patched=None if step else lambda: swapped(model),
        unread=unread,
    )


def _changing(same: int | None, head: Head) -> tuple[str, ...]:
    """Warn that rotary embeddings change with the length, where sequences are fed in pieces."""
    if same is None or not head.by_token:
        return ()
    return (
        f"The frequencies of the rotary embedding change beyond {same:,} tokens: a longer sequence "
        "is computed as transformers does, in one call with the new ones, and in pieces with those "
        f"of each piece, which differs. Texts are written up to {same:,} tokens.",
    )


def declared_head(source: str | Path | LoadedModel, pooling: str | None) -> HeadName | None:
    """Return the head that a model has, before it is loaded; None where no configuration says so.

    Args:
        source: of a conversion.
        pooling: see ``load_hugging_face``.

    Raises:
        UsageError, UnsupportedModelError: see ``choose_head.head_of``.
    """
    if isinstance(source, LoadedModel):
        return source.language.head if source.language else None
    from linexport.sources.hugging_face.lora import model_folder

    saved = model_folder(source)
    folder = model_of(saved)
    path = folder / CONFIG
    if not path.is_file() or recognise(folder) is Kind.DIFFUSERS_FOLDER:
        return None
    from linexport.sources.hugging_face.choose_head import head_of

    return head_of(path, read_json(path), pooling, saved).name


def is_of_transformers(module: object) -> bool:
    """``module`` is a model of transformers, if that was imported at all."""
    library = sys.modules.get("transformers")
    return library is not None and isinstance(module, library.PreTrainedModel)


def is_language_model(module: object) -> bool:
    """``module`` is a causal language model of transformers."""
    return is_of_transformers(module) and isinstance(
        module, sys.modules["transformers"].GenerationMixin
    )


def _left_out(config: JsonObject, model: LibraryObject) -> tuple[str, ...]:
    """Warn of the parts of a model that are not converted: all but the language model."""
    whole, taken = config.get("architectures") or [], type(model).__name__
    if whole and taken not in whole:
        part = f"the language model, {taken},"
    elif {"vision_config", "audio_config"} & model.config.sub_configs.keys():
        whole, part = [taken], "the language model"
    else:
        return ()
    return (f"Of {whole[0]} only {part} is converted: it takes text alone.",)


def _predictor(
    folder: Path, weights: StoredWeights, model: LibraryObject, source: Source, taken: bool
) -> tuple[LoadedModel | None, tuple[str, ...]]:
    """Return the head that predicts several tokens ahead, or the warning that it is left out."""
    found = sorted(name for name in weights.tensors if MTP.match(name))
    if not found or any(MTP.match(name) for name, _ in model.named_parameters()):
        return None, ()
    from linexport.sources.hugging_face.multi_token import load_predictor

    reason = "--no-mtp, engines and --proof layers leave it out"
    if taken:
        try:
            predictor = load_predictor(folder, weights, model, source)
            return predictor, predictor.warnings
        except UnsupportedModelError as error:
            reason = str(error)
    return None, (
        f"The head for multi-token prediction, {len(found)} weights ({found[0]}, ...), is left "
        f"out: {reason.removesuffix('.')}. It proposes tokens, and no output depends on it.",
    )


def _layers(module: LibraryObject, decoder: LibraryObject, count: int) -> tuple[str, ...]:
    """Names of the submodules that are the layers of the model's decoder, in order."""
    from torch import nn

    inside = {id(part) for part in decoder.modules()}
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) == count and id(part) in inside:
            return tuple(f"{name}.{index}" for index in range(count))
    return ()
