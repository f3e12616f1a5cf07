"""Reading a Hugging Face model folder: what it says it is, and what of it cannot be converted.

Everything here is read as data: JSON, and the headers of safetensors files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from linexport.errors import EnvironmentProblemError, UnsupportedModelError, UsageError
from linexport.manifest import LANGUAGE_FILES
from linexport.manifest.file_names import PROCESSOR_FILES
from linexport.sources.files import check_link, first_line, refuse, sha256, unreadable
from linexport.sources.hugging_face.named_class import check_architectures, named_class
from linexport.sources.hugging_face.size_limits import check_layers
from linexport.sources.packed import StoredWeights, packing, read_weights
from linexport.system.environment import version
from linexport.system.install import pip_install_here
from linexport.system.json_object import JsonObject
from linexport.system.versions import TRANSFORMERS, numbers

CONFIG, MODULES = "config.json", "modules.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
ENCODERS = {"Lfm2BidirectionalModel": "Lfm2Model"}
"""Encoders that ``bidirectional`` builds, with the causal classes that they are made of."""
REDIRECTION = "transformers_weights"
"""Setting by which a configuration names another file of weights."""

PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "diffusion_pytorch_model.bin")
_LISTED = 4
_NESTED = 50


def read_config(folder: Path, trust_remote_code: bool) -> JsonObject:
    """The folder's config.json.

    Raises:
        UsageError: it cannot be read.
        UnsupportedModelError: it is no model configuration, one of weights quantised in a format
            that is not read, or one whose model is code in the folder, which was not allowed to
            run.
    """
    config = read_json(folder / CONFIG)
    if "_class_name" in config and "model_type" not in config:
        raise refuse(
            folder,
            f"a configuration of diffusers ({config['_class_name']!r}) without weights; expected "
            "diffusion_pytorch_model.safetensors, or its index and shards",
            "download them",
        )
    if not isinstance(config.get("model_type"), str):
        raise refuse(
            folder / CONFIG,
            "no model_type in it, so nothing says which model this is",
            "take the folder as its author published it",
        )
    if _holds(config, REDIRECTION):
        raise refuse(
            folder / CONFIG,
            f"a setting {REDIRECTION}, which names another file of weights; expected {WEIGHTS}, or "
            f"{INDEX} and its shards",
            f"give the file one of these names and delete {REDIRECTION}",
        )
    check_layers(folder / CONFIG, config)
    check_architectures(folder / CONFIG, config)
    packing(folder, config)
    if config.get("auto_map") and not trust_remote_code and named_class(config) not in ENCODERS:
        raise _code(folder, config)
    return config


def _code(folder: Path, config: JsonObject) -> UnsupportedModelError:
    """Return the refusal of a folder with code of its own, and what can be done without it."""
    named = named_class(config) or "no class"
    otherwise = (
        f"delete auto_map from {CONFIG}: without it, the {named} of the library is built"
        if _is_native(folder, config)
        else f"build the model in a factory, package.module:callable: {CONFIG} names {named}, and "
        f"without that code another class is built for model_type {config['model_type']}, or none"
    )
    return refuse(
        folder,
        f"a model whose code is in the folder ({_classes(config['auto_map'])}); it would be run",
        f"read that code and pass --trust-remote-code if you trust its author, or {otherwise}",
    )


def _is_native(folder: Path, config: dict[str, object]) -> bool:
    """Return whether transformers is installed and has the class of a configuration."""
    try:
        check_version()
        from linexport.sources.hugging_face.architecture import is_native
        from linexport.sources.hugging_face.heads import named_head

        return is_native(config, named_head(folder / CONFIG, config).auto)
    except (EnvironmentProblemError, UnsupportedModelError):
        return False


def _holds(value: object, key: str) -> bool:
    """Return whether a JSON value has an object with this key at any depth."""
    if isinstance(value, dict):
        return key in value or any(_holds(inner, key) for inner in value.values())
    return isinstance(value, list) and any(_holds(inner, key) for inner in value)


def _classes(auto_map: object) -> str:
    """Names of the classes of an auto_map, whose values are names or, of tokenizers, lists."""
    values = list(auto_map.values()) if isinstance(auto_map, dict) else [auto_map]
    names = (name for v in values for name in (v if isinstance(v, list) else [v]) if name)
    return ", ".join(sorted({str(name) for name in names}))


def weights_of(folder: Path, config: JsonObject) -> StoredWeights:
    """Return the weights of a folder, none of which is read yet.

    Raises:
        UnsupportedModelError: see ``weight_files``; or they are in a format that is not read.
    """
    return read_weights(folder, weight_files(folder), config)


def weight_files(folder: Path, single: str = WEIGHTS, index: str = INDEX) -> list[Path]:
    """Return the safetensors files that transformers loads, all of which are there.

    One file takes precedence over an index, as in transformers; ``read_config`` and the refusal of
    adapters here exclude every other place that transformers would load weights from.

    Args:
        folder: of the model.
        single: name of the file that has all weights.
        index: name of the file that lists shards.

    Raises:
        UnsupportedModelError: there are none, some are missing or damaged, or an adapter would
            change them.
    """
    if (folder / ADAPTER).exists():
        raise refuse(
            folder,
            f"an adapter ({ADAPTER}) beside the weights, which it would change",
            "put the adapter into a folder of its own whose base_model_name_or_path names this "
            "one, and convert that; or merge it with peft's merge_and_unload; or delete it",
        )
    if (folder / single).is_file():
        names = [single]
    elif (folder / index).is_file():
        shards = read_json(folder / index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(v, str) for v in shards.values()):
            raise refuse(folder / index, "no weight_map in it", "download it again")
        names = sorted(set(shards.values()))
        if any(Path(name).name != name for name in names):
            raise refuse(folder / index, "shards outside the folder", "download it again")
    else:
        raise _no_weights(folder, single, index)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        raise refuse(
            folder,
            f"{len(missing)} of {len(names)} weight files are missing: "
            f"{', '.join(missing[:_LISTED])}{more}",
            "download them again",
        )
    for name in names:
        _check_header(folder / name)
    return [folder / name for name in names]


def model_of(folder: Path) -> Path:
    """Return the folder of the model in a folder of sentence-transformers; others as they are.

    Before release 3 the library saved the model in a folder of its own, ``0_Transformer``.

    Raises:
        UsageError: the list of modules cannot be read.
        UnsupportedModelError: its first module is not in the folder.
    """
    path = folder / MODULES
    if not path.is_file():
        return folder
    listed = read_json_value(path)
    first = listed[0] if isinstance(listed, list) and listed else None
    inner = first.get("path", "") if isinstance(first, dict) else None
    if not isinstance(inner, str) or Path(inner).is_absolute() or ".." in Path(inner).parts:
        raise refuse(path, "no list of modules in the folder", "save the model again")
    check_link(path)
    if inner:
        check_link(folder / inner)
    if not (folder / inner / CONFIG).is_file():
        raise refuse(path, f"a first module in {inner!r} without {CONFIG}", "download it again")
    return folder / inner


def copied_files(folder: Path) -> tuple[Path, ...]:
    """Return the files of the folder that an artifact keeps.

    Raises:
        UsageError: one is a symbolic link that leads out of the folder.
    """
    files = tuple(folder / name for name in LANGUAGE_FILES if (folder / name).is_file())
    for path in files:
        check_link(path)
    return files


def processor_files(folder: Path) -> tuple[Path, ...]:
    """Return the files of an image processor that an artifact with a vision tower keeps.

    Raises:
        UsageError: one is a symbolic link that leads out of the folder.
    """
    files = tuple(folder / name for name in PROCESSOR_FILES if (folder / name).is_file())
    for path in files:
        check_link(path)
    return files


def check_weights(
    folder: Path,
    absent: Iterable[str],
    misshapen: Iterable[tuple[str, Iterable[int], Iterable[int]]],
    unknown: Iterable[str],
) -> None:
    """Refuse weights that are not those of the model.

    Args:
        folder: they come from.
        absent: names of weights the model has and the files have not.
        misshapen: names with the shape found and the one expected.
        unknown: names the files have and the model has not.

    Raises:
        UnsupportedModelError: any of these is not empty.
    """
    problems = [
        *(f"{name} is missing" for name in sorted(absent)),
        *(
            f"{name} has shape {tuple(found)}, expected {tuple(expected)}"
            for name, found, expected in sorted(misshapen)
        ),
        *(f"{name} is not in the model" for name in sorted(unknown)),
    ]
    if problems:
        more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise refuse(
            folder,
            "weights that do not fit the model its configuration describes: "
            f"{'; '.join(problems[:_LISTED])}{more}",
            "take configuration and weights of the same model",
        )


def digest(files: Iterable[Path]) -> str:
    """SHA-256 over the names and the SHA-256 of files."""
    text = "".join(f"{sha256(path)}  {path.name}\n" for path in files)
    return hashlib.sha256(text.encode()).hexdigest()


def missing(error: ImportError) -> EnvironmentProblemError:
    """The error to raise where a library of the extra is not installed."""
    return EnvironmentProblemError(
        f"Reading a Hugging Face model needs {error.name}: {pip_install_here('hf')}."
    )


def missing_package(model_type: str, error: ImportError) -> EnvironmentProblemError:
    """Return the error for a package that the code of a model type imports and that is missing."""
    package = (error.name or "").partition(".")[0]
    if package and package != TRANSFORMERS.package:
        return EnvironmentProblemError(
            f"A model of type {model_type!r} needs the package {package} for its own code in "
            f"{TRANSFORMERS.package}: pip install {package}."
        )
    return EnvironmentProblemError(
        f"The code of {TRANSFORMERS.package} for a model of type {model_type!r} cannot be imported "
        f"({first_line(error)}). {TRANSFORMERS.advice()}"
    )


def of_another_release() -> str:
    """Return a sentence for errors that names an untested release of transformers, or ""."""
    if TRANSFORMERS.holds(version(TRANSFORMERS.package) or ""):
        return ""
    return f". {TRANSFORMERS.advice().removesuffix('.')}"


def check_version() -> None:
    """Check that the transformers that is installed has what its models are converted with.

    Raises:
        EnvironmentProblemError: it is missing, or too old.
    """
    try:
        import transformers
    except ImportError as error:
        raise missing(error) from None
    found = transformers.__version__
    if numbers(found) < numbers(TRANSFORMERS.oldest):
        raise EnvironmentProblemError(
            f"transformers {found} is installed; models of it are converted with "
            f"{TRANSFORMERS.oldest} or newer: {pip_install_here('hf', '--upgrade')}."
        )


def _no_weights(folder: Path, single: str, index: str) -> UnsupportedModelError:
    expected = f"expected {single}, or {index} and its shards"
    pickled = next((name for name in PICKLED if (folder / name).is_file()), None)
    if pickled is not None:
        return refuse(
            folder,
            f"weights as pickles ({pickled}), which can run any code when opened",
            "convert them to safetensors with save_pretrained of their library, where you trust "
            "them",
        )
    if any(folder.glob("*.gguf")):
        return refuse(
            folder,
            f"weights as GGUF; {expected}",
            "give the GGUF file itself: its settings are read from it",
        )
    return refuse(folder, f"a configuration without weights; {expected}", "download them")


def _check_header(path: Path) -> None:
    """The header of a safetensors file is all there, and what it describes is."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise missing(error) from None
    try:
        with safe_open(path, framework="pt"):
            pass
    except OSError as error:
        raise unreadable(path, error) from error
    except SafetensorError as error:
        raise refuse(path, f"a damaged safetensors file ({error})", "download it again") from error


def read_json(path: Path) -> JsonObject:
    """Return the JSON object that a file holds.

    Raises:
        UsageError: it cannot be read, or holds something else.
    """
    content = read_json_value(path)
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a JSON object. Download it again.")
    return content


def read_json_value(path: Path) -> object:
    """Return what a file holds as JSON.

    Raises:
        UsageError: it cannot be read, or is not JSON.
    """
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}. Download it again.") from None
    if _deeper(content, _NESTED):
        raise UsageError(f"{path} has values nested more than {_NESTED} deep. Download it again.")
    return content


def _deeper(value: object, limit: int) -> bool:
    """Return whether a JSON value is nested deeper than ``limit``, where readers would recurse."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)
