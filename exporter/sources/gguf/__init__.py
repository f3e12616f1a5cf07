"""A GGUF file, read as the folder that transformers would load: a configuration and weights.

The settings come from the file. The files of a tokenizer are taken from the folder that the GGUF
file is in, or made of the file's own.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linexport.errors import UnsupportedModelError, UsageError
from linexport.manifest import LANGUAGE_FILES
from linexport.sources.files import check_link, refuse
from linexport.sources.gguf.file import GgufFile
from linexport.sources.gguf.tokenizer import tokenizer_files
from linexport.sources.loaded_model import LoadedModel
from linexport.system.json_object import JsonObject

if TYPE_CHECKING:
    from linexport.sources.gguf.recipes import ModelType
    from linexport.sources.packed import StoredWeights

_NAMED = 5
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
_PLACES: list[tempfile.TemporaryDirectory[str]] = []
"""Folders with the files of models that were loaded, kept until the process ends."""

_SCALING = {"linear": ("factor",), "yarn": ("factor", "original_max_position_embeddings")}
_SCALED = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}


def load_gguf(path: Path, *, location: str | None = None, **options: Any) -> LoadedModel:
    """Load the model of a GGUF file.

    Args:
        path: of the file.
        location: what the user called it, where that is not the file.
        **options: of ``load_hugging_face``.

    Raises:
        EnvironmentProblemError: the package ``gguf`` or transformers is not installed.
        UnsupportedModelError: it is damaged, or of a model type that is not read from GGUF.
    """
    from linexport.sources.gguf.recipes import weights_of
    from linexport.sources.hugging_face import load_hugging_face

    file = GgufFile(path)
    kind = _kind(file)
    config = _common(file)
    rope, own = config["rope_parameters"], kind.configuration(file)
    config |= {**own, "rope_parameters": rope | own.get("rope_parameters", {})}
    folder = _unfolded(file, config)
    try:
        loaded = load_hugging_face(
            folder, location=location or str(path), weights=weights_of(file, kind), **options
        )
    except UnsupportedModelError as error:
        said = str(error).replace(str(folder / CONFIG), str(path)).replace(str(folder), str(path))
        raise UnsupportedModelError(said) from error
    if (folder / TOKENIZER).is_file():
        return loaded
    lacking = (
        f"There is no {TOKENIZER} in the folder of {path.name}, whose own tokenizer is of a kind "
        "that is not read: the artifact takes token ids. Put that of the model there to write text."
    )
    return replace(loaded, warnings=(*loaded.warnings, lacking))


def gguf_weights(path: Path) -> StoredWeights:
    """Return the weights of a GGUF file, none of which is read yet.

    Raises:
        EnvironmentProblemError: the package ``gguf`` is not installed.
        UnsupportedModelError: it is damaged, or of a model type that is not read from GGUF.
    """
    from linexport.sources.gguf.recipes import weights_of

    file = GgufFile(path)
    return weights_of(file, _kind(file))


def _kind(file: GgufFile) -> ModelType:
    """Return the layout of a file.

    Raises:
        UnsupportedModelError: there is none for its model type.
    """
    from linexport.sources.gguf.recipes import registered

    if file.architecture not in registered():
        raise refuse(
            file.path,
            f"a GGUF file of a model of type {file.architecture!r}; read are "
            f"{', '.join(sorted(registered()))}",
            "give the folder of the model that the file was made of",
        )
    return registered()[file.architecture]


def gguf_in(path: Path) -> Path:
    """Return a GGUF file, or the only one of a folder.

    Raises:
        UsageError: the folder has several.
    """
    if path.is_file():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(place.name for place in found[:_NAMED])
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise UsageError(f"{path} has {len(found)} GGUF files: {names}{more}. Give one of them.")
    return found[0]


def _common(file: GgufFile) -> JsonObject:
    """Return the settings that all model types have.

    Raises:
        UnsupportedModelError: positions are scaled in a way that is not read.
    """
    rope: JsonObject = {"rope_type": "default", "rope_theta": file.get("rope.freq_base", 10_000.0)}
    scaling = file.get("rope.scaling.type", "none")
    if scaling in _SCALING:
        rope |= {"rope_type": scaling, **{k: file.need(_SCALED[k]) for k in _SCALING[scaling]}}
    elif scaling != "none":
        raise refuse(
            file.path,
            f"positions scaled by {scaling!r}; read are {', '.join(_SCALING)}",
            "give the folder of the model that the file was made of",
        )
    tokens = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {
        "vocab_size": file.vocabulary,
        "max_position_embeddings": file.get("context_length", 2**20),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **{f"{ours}_token_id": file.token(theirs) for ours, theirs in tokens.items()},
    }


def _unfolded(file: GgufFile, config: JsonObject) -> Path:
    """Return a folder with a configuration, and the files of a tokenizer."""
    path = file.path
    place = tempfile.TemporaryDirectory(prefix="linexport-gguf-")
    _PLACES.append(place)
    folder = Path(place.name)
    for name in LANGUAGE_FILES:
        if (path.parent / name).is_file():
            check_link(path.parent / name)
            shutil.copyfile(path.parent / name, folder / name)
    if not (folder / TOKENIZER).is_file():
        for name, text in tokenizer_files(file).items():
            if not (folder / name).is_file():
                (folder / name).write_text(text, encoding="utf-8")
    (folder / CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True), encoding="utf-8")
    return folder
