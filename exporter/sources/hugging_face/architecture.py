"""The class that config.json names, compared with the class that is built from it.

    config.architectures[0]     the class that the weights were saved from
    AUTO[config]                the class that transformers builds for the head

Weights by the same names fit classes that compute something else, such as one with attention to
later tokens. The mappings of transformers say which class is built; a multimodal class stands for
its language model, which is built without the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from linexport.errors import UnsupportedModelError
from linexport.patches.library import attribute
from linexport.sources.files import refuse
from linexport.sources.hugging_face.named_class import named_class
from linexport.system.json_object import JsonObject

CAUSAL = "AutoModelForCausalLM"
WITH_TOWER = "AutoModelForImageTextToText"
"""Class of transformers that builds a language model with its vision tower."""

MULTIMODAL = "AutoModelForMultimodalLM"
"""Class of transformers that builds a language model with whatever goes with it."""


def classes(kind: str, auto: str) -> tuple[str, ...]:
    """Return the classes that are built for a model type, first the one of most configurations.

    Args:
        kind: the model type, of transformers or of flash-linear-attention.
        auto: name of the class of transformers that chooses, such as AutoModelForCausalLM.
    """
    import transformers

    from linexport.models.flash_linear_attention import layouts

    if kind in layouts():
        return (layouts()[kind].causal,) if auto == CAUSAL else ()
    mapping = attribute(getattr(transformers, auto), "_model_mapping")
    try:
        found = mapping[transformers.CONFIG_MAPPING[kind]]
    except KeyError:
        return ()
    several = found if isinstance(found, list | tuple) else (found,)
    return tuple(c.__name__ for c in several)


def builder(kind: str, auto: str) -> str:
    """Return the class of transformers that builds a model type.

    It is the one given, or that of models with towers where a language model is built with its
    towers only.

    Args:
        kind: the model type.
        auto: the class for the head.
    """
    alone = auto != CAUSAL or classes(kind, CAUSAL) or not classes(kind, MULTIMODAL)
    return auto if alone else MULTIMODAL


def check_class(path: Path, config: JsonObject, auto: str, code: bool) -> None:
    """Check that a configuration names the class that is built from it.

    Args:
        path: of the configuration.
        config: its content.
        auto: the class of transformers that chooses the one to build.
        code: a class in the folder is built where the configuration has one.

    Raises:
        UnsupportedModelError: it names another one.
    """
    named, kind = named_class(config), config["model_type"]
    own = code and _in_folder(config, auto)
    built = (own,) if own else classes(kind, auto)
    if named is None or not built or named in built:
        return
    if auto == CAUSAL and named in _multimodal(config, bool(own)):
        return
    raise refuse_class(path, named, built[0])


def is_native(config: JsonObject, auto: str) -> bool:
    """Return whether transformers itself has the class of a configuration with code in its folder.

    Args:
        config: a configuration.
        auto: the class of transformers for the head.
    """
    auto = builder(config["model_type"], auto)
    built, own = classes(config["model_type"], auto), _in_folder(config, auto)
    named = {named_class(config), own} - {None}
    known = {*built, *(_multimodal(config, False) if auto == CAUSAL else ())}
    return bool(built and named) and named <= known and own in (None, *built)


def refuse_class(path: Path, named: str, built: str) -> UnsupportedModelError:
    """Return the refusal of a configuration that names another class than the one to be built."""
    return refuse(
        path,
        f"architectures names {named}, and the class that would be built is {built}, which may "
        "compute something else from the same weights",
        f"build {named} in a factory, package.module:callable, and convert that; or write {built} "
        "into architectures where you know that the weights are meant for it",
    )


def _multimodal(config: JsonObject, code: bool) -> set[str]:
    """Return the classes with towers that a configuration may name."""
    if code:
        return {own for auto in (WITH_TOWER, MULTIMODAL) if (own := _in_folder(config, auto))}
    return {n for auto in (WITH_TOWER, MULTIMODAL) for n in classes(config["model_type"], auto)}


def _in_folder(config: Mapping[str, object], auto: str) -> str | None:
    """Return the class in the folder that a configuration gives for one of transformers' own."""
    names = config.get("auto_map")
    found = names.get(auto) if isinstance(names, dict) else None
    return found.rpartition(".")[2] if isinstance(found, str) else None
