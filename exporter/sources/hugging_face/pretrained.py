"""Building a model of transformers from a folder that was read and found harmless."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from linexport import patches
from linexport.errors import UnsupportedModelError
from linexport.sources.files import first_line, refuse
from linexport.sources.hugging_face.architecture import (
    CAUSAL,
    builder,
    check_class,
    classes,
)
from linexport.sources.hugging_face.folder import (
    CONFIG,
    check_version,
    check_weights,
    missing_package,
    of_another_release,
)
from linexport.sources.hugging_face.named_class import named_class
from linexport.sources.hugging_face.size_limits import limit_size
from linexport.sources.memory_map import mapped_parameters
from linexport.sources.packed import StoredWeights
from linexport.system.json_object import JsonObject
from linexport.system.untyped import LibraryObject


def build_causal(
    folder: Path,
    config: dict[str, object],
    weights: StoredWeights,
    auto: str,
    trust_remote_code: bool,
) -> LibraryObject:
    """Build a causal model, with attention whose steps can be traced one by one.

    Args:
        folder: of the model.
        config: its configuration.
        weights: of it.
        auto: the class of transformers that chooses the model's class, such as
            AutoModelForCausalLM.
        trust_remote_code: see ``load_hugging_face``.

    Raises:
        EnvironmentProblemError: transformers is not installed.
        UnsupportedModelError: it is none, or the folder does not hold what its config says.
    """
    return _pretrained(folder, config, weights, auto, "eager", trust_remote_code)


def as_published(folder: Path, config: JsonObject, weights: StoredWeights) -> LibraryObject:
    """Build the class that the config names, with ``F.scaled_dot_product_attention``.

    Raises:
        EnvironmentProblemError: transformers is not installed.
        UnsupportedModelError: transformers does not know it, or the folder does not hold what its
            config says.
    """
    named = named_class(config) or "AutoModel"
    return _pretrained(folder, config, weights, named, "sdpa", False)


def without_weights(folder: Path, config: JsonObject) -> LibraryObject:
    """Build the causal model of a configuration on the device "meta": shapes, and no values.

    Args:
        folder: of the model; its weights are not read and may be missing.
        config: its configuration, see ``read_config``.

    Raises:
        EnvironmentProblemError: transformers is not installed.
        UnsupportedModelError: transformers does not know it, or cannot build it.
    """
    check_version()
    import torch
    import transformers

    name = builder(config["model_type"], CAUSAL)
    with quiet():
        parsed = _parsed(folder, config, name, False)
        try:
            with torch.device("meta"):
                return getattr(transformers, name).from_config(
                    parsed,
                    dtype=torch.float32,
                    attn_implementation="eager",
                    experts_implementation="batched_mm",  # the others look at values
                )
        except ImportError as error:
            raise missing_package(config["model_type"], error) from error
        except Exception as error:  # any value of its configuration may be wrong
            if "Unrecognized configuration class" in str(error):
                raise _unknown(folder, config["model_type"], name) from error
            raise refuse(
                folder / CONFIG,
                f"a model that transformers cannot build ({first_line(error)})",
                "compare the configuration with that of a published model of the same type",
            ) from error


def supported() -> list[str]:
    """Model types that were converted and checked."""
    from linexport.models import flash_linear_attention as fla

    patched = {family for patch in patches.patches() for family in patch.families}
    return sorted(patched | fla.layouts().keys())


def _pretrained(
    folder: Path,
    config: JsonObject,
    weights: StoredWeights,
    name: str,
    attention: str,
    trust_remote_code: bool,
) -> object:
    check_version()
    import torch
    import transformers

    kind = config["model_type"]
    with quiet():
        parsed: Any = _parsed(folder, config, name, trust_remote_code)
        name = builder(kind, name)
        loader: Any = _class(folder, name)
        if not issubclass(loader, transformers.PreTrainedModel):
            check_class(folder / CONFIG, config, name, trust_remote_code)
        elif getattr(loader.config_class, "__module__", None) != type(parsed).__module__:
            raise refuse(
                folder / CONFIG,
                f"an architecture {name}, which is not a class for model_type {kind!r}",
                "take the folder as its author published it",
            )
        given: Path | None = folder
        own: dict[str, object] = {"trust_remote_code": True} if trust_remote_code else {}
        if weights.title:
            loader, parsed = _of_floats(folder, config, parsed, name)
            given, own = None, {"state_dict": dict(weights.tensors)}
        try:
            with limit_size(folder, weights), mapped_parameters(weights.float32_bytes):
                model, report = loader.from_pretrained(
                    given,
                    config=parsed,
                    dtype=torch.float32,
                    attn_implementation=attention,
                    use_safetensors=True,
                    local_files_only=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are in the report, by name
                    **own,
                )
        except UnsupportedModelError:
            raise
        except ImportError as error:
            raise missing_package(kind, error) from error
        except Exception as error:
            if "Unrecognized configuration class" in str(error):
                raise _unknown(folder, kind, name) from error
            if isinstance(error, KeyError) and (place := _place_of(error.args[0], config)):
                raise refuse(
                    folder / CONFIG,
                    f"{place} is {error.args[0]!r}, which transformers "
                    f"{transformers.__version__} does not know",
                    "write the name that it has there, or install the version that the checkpoint "
                    "was made with",
                ) from error
            raise refuse(
                folder,
                f"a model that transformers cannot load ({first_line(error)})",
                f"compare the configuration with the weights{of_another_release()}",
            ) from error
    check_weights(
        folder, report["missing_keys"], report["mismatched_keys"], report["unexpected_keys"]
    )
    return model.eval()


def _parsed(folder: Path, config: JsonObject, name: str, trust_remote_code: bool) -> LibraryObject:
    """Return the configuration of a folder as transformers reads it.

    Raises:
        UnsupportedModelError: transformers does not know the model type, or refuses a value.
    """
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        if isinstance(error, ValueError | KeyError) and config["model_type"] in str(error):
            raise _unknown(folder, config["model_type"], name) from error
        raise refuse(
            folder / CONFIG,
            f"a configuration that transformers does not accept ({first_line(error)})",
            "compare it with that of a published model of the same type",
        ) from error


def _of_floats(
    folder: Path, config: JsonObject, parsed: LibraryObject, name: str
) -> tuple[Any, LibraryObject]:
    """Return the class and the configuration of the float model whose weights are given.

    They are chosen as ``from_pretrained`` of an auto class does, which takes no weights alone.

    Raises:
        UnsupportedModelError: the class of that model is code in the folder.
    """
    import transformers

    if config.get("auto_map"):
        raise refuse(
            folder,
            "quantised weights of a model whose code is in the folder; they are read for classes "
            "of transformers",
            f"delete auto_map from {CONFIG} where transformers has the class, or take the "
            "checkpoint it was quantised from",
        )
    built = classes(config["model_type"], name)
    named = named_class(config)
    loader = getattr(transformers, (named if named in built else built[0]) if built else name)
    text = parsed.sub_configs.get("text_config")
    if text is not None and loader.config_class is text:
        parsed = parsed.get_text_config()
    for part in (parsed, *(getattr(parsed, inner, None) for inner in parsed.sub_configs)):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return loader, parsed


def _place_of(value: object, config: Mapping[str, object]) -> str | None:
    """Return where a configuration has a value: "rope_parameters.rope_type"."""
    for name, found in config.items():
        if isinstance(value, str) and found == value:
            return name
        if isinstance(found, dict) and (inner := _place_of(value, found)):
            return f"{name}.{inner}"
    return None


def _class(folder: Path, name: object) -> object:
    """A class of transformers that loads models: nothing else that has a name there."""
    import transformers

    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if isinstance(found, type) and callable(getattr(found, "from_pretrained", None)):
        kinds = (transformers.PreTrainedModel, transformers.AutoModel.__mro__[1])
        if issubclass(found, kinds):
            return found
    raise refuse(
        folder / CONFIG,
        f"an architecture {name!r}, which is no model of transformers {transformers.__version__}",
        "update transformers, or build the model in a factory, package.module:callable",
    )


def _unknown(folder: Path, kind: str, auto: str) -> UnsupportedModelError:
    known = "a causal language model" if auto == CAUSAL else auto
    return refuse(
        folder,
        f"model_type {kind!r}, which transformers does not know as {known}",
        f"these are converted and checked: {', '.join(supported())}",
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and remarks of transformers: what matters becomes an error."""
    from transformers.utils import logging as verbosity

    level = verbosity.get_verbosity()
    bars = verbosity.is_progress_bar_enabled()
    verbosity.set_verbosity(logging.CRITICAL)
    verbosity.disable_progress_bar()
    try:
        yield
    finally:
        verbosity.set_verbosity(level)
        if bars:
            verbosity.enable_progress_bar()
