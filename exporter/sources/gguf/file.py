"""A GGUF file: settings and tensors, read through the package ``gguf``, a tensor at a time."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linexport.errors import EnvironmentProblemError, UnsupportedModelError
from linexport.sources.files import first_line, refuse
from linexport.sources.gguf import integers
from linexport.sources.packed.record import PackedTensor
from linexport.system.install import pip_install_here

AGAIN = "download it again"


class GgufFile:
    """A file whose header was read.

    Raises:
        EnvironmentProblemError: the package ``gguf`` is not installed.
        UnsupportedModelError: it is damaged, or of a later version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            import gguf
        except ImportError as error:
            raise EnvironmentProblemError(
                f"Reading a GGUF file needs {error.name}: {pip_install_here('gguf')}."
            ) from None
        try:
            self._reader: Any = gguf.GGUFReader(path)
        except Exception as error:  # of every kind, as sizes in the file are taken as they are
            raise refuse(path, f"a damaged GGUF file ({first_line(error)})", AGAIN) from error
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in self._reader.tensors}
        if (count := self._field("split.count")) is not None and int(count) > 1:
            raise refuse(
                path,
                f"one of {count} parts of a model",
                "merge them with llama.cpp's `llama-gguf-split --merge`",
            )

    @cached_property
    def architecture(self) -> str:
        """Name of the layout."""
        return str(self._field("general.architecture"))

    @cached_property
    def layers(self) -> int:
        """Number of layers, without those that predict further tokens."""
        return int(self.need("block_count")) - int(self.get("nextn_predict_layers", 0))

    @cached_property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return self.shape("token_embd.weight")[0]

    @cached_property
    def size(self) -> int:
        """Number of values of all tensors."""
        return sum(int(tensor.n_elements) for tensor in self.tensors.values())

    def _field(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    def token(self, role: str) -> int | None:
        """Return the id of a special token: "bos", "eos" or "padding"."""
        found = self._field(f"tokenizer.ggml.{role}_token_id")
        return None if found is None else int(found)

    def of_tokenizer(self, key: str, room: str = "tokenizer.ggml") -> Any:
        """Return a setting of the tokenizer; None where it is missing."""
        return self._field(f"{room}.{key}")

    def get(self, key: str, default: Any = None) -> Any:
        """Return a setting of the architecture; decimal numbers as they were before float32."""
        value = self._field(f"{self.architecture}.{key}")
        if value is None:
            return default
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        """Return a setting of the architecture.

        Raises:
            UnsupportedModelError: it is missing.
        """
        value = self.get(key)
        if value is None:
            raise refuse(self.path, f"no setting {self.architecture}.{key} in it", AGAIN)
        return value

    def each(self, key: str) -> list[Any]:
        """Return a setting of each layer, which a file may give once for all."""
        value = self.need(key)
        found = value if isinstance(value, list) else [value] * self.layers
        if len(found) < self.layers:
            raise refuse(self.path, f"{key} of {len(found)} layers of {self.layers}", AGAIN)
        return found[: self.layers]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the sizes of a tensor, the last one being that of values side by side.

        Raises:
            UnsupportedModelError: the tensor is missing.
        """
        if name not in self.tensors:
            raise refuse(self.path, f"no tensor {name} in it", AGAIN)
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def packed(self, name: str, row: int | None = None) -> PackedTensor | None:
        """Return the integers and scales of a tensor, or of one entry of its first size.

        Returns:
            None where its type is not one of ``integers.LAYOUTS``.
        """
        tensor = self.tensors[name]
        return integers.packed(tensor.data if row is None else tensor.data[row], tensor.tensor_type)

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Return the float32 values of a tensor, or of one entry of its first size."""
        import gguf

        tensor = self.tensors[name]
        data = tensor.data if row is None else tensor.data[row]
        try:
            values = gguf.dequantize(data, tensor.tensor_type)
        except Exception as error:
            kind = getattr(tensor.tensor_type, "name", tensor.tensor_type)
            raise self._unread(f"{name} of type {kind} ({first_line(error)})") from error
        shape = self.shape(name)[0 if row is None else 1 :]
        return torch.from_numpy(np.array(values, np.float32)).reshape(shape)

    def _unread(self, found: str) -> UnsupportedModelError:
        return refuse(self.path, found, "update the package gguf, or take a file of another type")
