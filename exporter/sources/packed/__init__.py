"""Checkpoints whose weights are stored in few bits, read as the float32 numbers they stand for.

A file of ``formats`` for each way to store them, which gives ``METHODS``, the values of
``quant_method`` that it reads, ``TITLE``, ``IGNORED``, endings of tensors that no weight needs, and
``weights``, which finds the weights among the stored tensors.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from linexport.errors import LinexportError
from linexport.sources.files import first_line, refuse
from linexport.sources.packed import formats
from linexport.sources.sizes import FLOAT32_BYTES
from linexport.system.json_object import JsonObject

if TYPE_CHECKING:
    from linexport.sources.packed.record import StoredTensor
    from linexport.sources.packed.stored import StoredTensors

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights that are not quantised, as safetensors names them."""

SETTINGS = ("quantization_config", "compression_config", "quantization")
"""Keys of a configuration that say how its weights are stored."""

ADVICE = "take the checkpoint it was quantised from"


class Format(Protocol):
    """A way to store weights in few bits: a module of ``formats``."""

    TITLE: str
    METHODS: tuple[str, ...]
    IGNORED: tuple[str, ...]

    def weights(
        self, stored: StoredTensors, settings: JsonObject, config: JsonObject
    ) -> Iterator[StoredTensor]:
        """Return the weights that are stored in few bits, or otherwise than the model has them."""


@dataclass(frozen=True)
class Packing:
    """The format of a checkpoint, with the settings that its configuration gives."""

    format: Format
    settings: JsonObject


@dataclass(frozen=True)
class StoredWeights:
    """The weights of a folder.

    Attributes:
        files: they are in.
        tensors: by the names that the model has for them.
        title: of the format that they are in; None where they are floats.
    """

    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    title: str | None = None

    @cached_property
    def size(self) -> int:
        """Number of values, or an upper bound of it."""
        held = sum(tensor.size for tensor in self.tensors.values())
        return max(held, sum(path.stat().st_size for path in self.files) // 2)

    @property
    def float32_bytes(self) -> int:
        """Bytes of all values in float32."""
        return FLOAT32_BYTES * sum(tensor.size for tensor in self.tensors.values())

    def under(self, prefix: str) -> Iterable[StoredTensor]:
        """Return the weights whose names begin so."""
        return (t for name, t in self.tensors.items() if name.startswith(prefix))


@cache
def registered() -> dict[str, Format]:
    """Return every format by the methods that it reads."""
    found: dict[str, Format] = {}
    for module in pkgutil.iter_modules(formats.__path__):
        format: Format = importlib.import_module(f"{formats.__name__}.{module.name}")
        found |= dict.fromkeys(format.METHODS, format)
    return found


def packing(folder: Path, config: JsonObject) -> Packing | None:
    """Return how a configuration says that its weights are stored; None: as floats.

    Raises:
        UnsupportedModelError: in a format that is not read.
    """
    inner = config.get("text_config")
    parts = [config, *([inner] if isinstance(inner, dict) else [])]
    found = next((p[key] for p in parts for key in SETTINGS if p.get(key)), None)
    if found is None:
        return None
    settings = found if isinstance(found, dict) else {}
    method = str(settings.get("quant_method") or ("mlx" if "group_size" in settings else ""))
    if method not in registered():
        raise refuse(
            folder,
            f"weights quantised by {method or 'an unknown method'}; those by "
            f"{', '.join(sorted(registered()))} are read, and float ones",
            ADVICE,
        )
    return Packing(registered()[method], settings)


def _found(how: Packing, stored: StoredTensors, config: JsonObject) -> list[StoredTensor]:
    """Return the weights in few bits.

    Raises:
        UnsupportedModelError: parts are missing, or any setting or size is of the wrong kind.
    """
    try:
        return list(how.format.weights(stored, how.settings, config))
    except LinexportError:
        raise
    except Exception as error:
        raise refuse(
            stored.folder,
            f"weights in {how.format.TITLE} with settings or sizes that are not understood "
            f"({first_line(error)})",
            "download it again, or take the checkpoint it was quantised from",
        ) from error


def read_weights(folder: Path, files: Iterable[Path], config: JsonObject) -> StoredWeights:
    """Return the weights of a folder, none of which is read yet.

    Raises:
        UnsupportedModelError: in a format that is not read, or with parts that are missing.
    """
    from linexport.sources.packed.record import StoredTensor
    from linexport.sources.packed.stored import StoredTensors

    how, stored = packing(folder, config), StoredTensors(folder, tuple(files))
    found = _found(how, stored, config) if how else []
    used = {part for tensor in found for part in tensor.parts}
    ignored = how.format.IGNORED if how else ()
    tensors = {tensor.name: tensor for tensor in found}
    for name, header in stored.items():
        if name in used or name.endswith(ignored):
            continue
        if name.endswith("weight") and header.dtype not in FLOATS:
            kind = f"{how.format.TITLE} has no such weights" if how else "so it is quantised"
            raise refuse(folder, f"{name} of dtype {header.dtype}, {kind}", ADVICE)
        tensors[name] = StoredTensor(
            name, header.shape, partial(stored.read, name), frozenset({name})
        )
    return StoredWeights(stored.files, tensors, how.format.TITLE if how else None)
