"""Reading a folder of diffusers: the class that it names, its settings and its weights.

Everything here is read as data: JSON, and the headers of safetensors files.

    diffusion_pytorch_model.safetensors                     one file
    diffusion_pytorch_model.safetensors.index.json          shards
    diffusion_pytorch_model.fp16.safetensors, .safetensors.index.fp16.json
                                                            a variant, where there is nothing else
"""

from __future__ import annotations

import re
from pathlib import Path

from linexport.sources.diffusers.models import CALLS
from linexport.sources.files import FACTORY_ADVICE, refuse
from linexport.sources.hugging_face.folder import CONFIG, read_json, weight_files
from linexport.sources.hugging_face.size_limits import check_layers
from linexport.sources.packed import StoredWeights, packing, read_weights
from linexport.system.json_object import JsonObject

NAME, VERSION = "_class_name", "_diffusers_version"
"""Settings with the class, and the release of diffusers that wrote them."""

STEM = "diffusion_pytorch_model"
WEIGHTS, INDEX = f"{STEM}.safetensors", f"{STEM}.safetensors.index.json"

_VARIANT = re.compile(rf"{STEM}\.(\w+)\.safetensors|{STEM}\.safetensors\.index\.(\w+)\.json")


def read_config(folder: Path) -> JsonObject:
    """Return the folder's config.json, of a class that is converted.

    Raises:
        UsageError: it cannot be read.
        UnsupportedModelError: a class that is not converted, or quantised weights in a format that
            is not read.
    """
    config = read_json(folder / CONFIG)
    name = config.get(NAME)
    if not isinstance(name, str) or name not in CALLS:
        raise refuse(
            folder / CONFIG,
            f"{NAME} is {name!r}; converted from folders of diffusers are "
            f"{', '.join(sorted(CALLS))}",
            f"for another class, {FACTORY_ADVICE}",
        )
    check_layers(folder / CONFIG, config)
    packing(folder, config)
    return config


def weights_of(folder: Path, config: JsonObject) -> StoredWeights:
    """Return the weights of a folder, none of which is read yet.

    Raises:
        UnsupportedModelError: there are none, some are missing or damaged, or there are several
            variants of them.
    """
    single, index = _names(folder)
    return read_weights(folder, weight_files(folder, single, index), config)


def _names(folder: Path) -> tuple[str, str]:
    """Return the names of the file of weights and of the index of shards.

    Raises:
        UnsupportedModelError: two variants, and none without a name.
    """
    if (folder / WEIGHTS).is_file() or (folder / INDEX).is_file():
        return WEIGHTS, INDEX
    found = (_VARIANT.fullmatch(path.name) for path in folder.iterdir())
    variants = sorted({match[1] or match[2] for match in found if match})
    if len(variants) > 1:
        raise refuse(
            folder,
            f"weights in {len(variants)} variants, {', '.join(variants)}; expected {WEIGHTS}, or "
            "one of them",
            "delete the others",
        )
    if not variants:
        return WEIGHTS, INDEX
    return f"{STEM}.{variants[0]}.safetensors", f"{STEM}.safetensors.index.{variants[0]}.json"
