from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx_graphsurgeon.ir.node import Node

class Tensor:
    """A value of a graph; ``inputs`` are the nodes that compute it, ``outputs`` those that read it.

    ``dtype`` is NumPy's, ONNX's number where NumPy has none, or None. A size without a number has a
    name; an importer leaves it "" or None where the file has none.
    """

    name: str
    inputs: list[Node]
    outputs: list[Node]
    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> Sequence[int | str] | None: ...
    def is_empty(self) -> bool: ...

class Variable(Tensor):
    dtype: Any
    shape: Sequence[int | str] | None
    type: str
    def __init__(
        self,
        name: str,
        dtype: Any = ...,
        shape: Sequence[int | str] | None = ...,
        type: str = ...,
    ) -> None: ...
    @staticmethod
    def empty() -> Variable: ...
    def copy(self) -> Variable: ...

class LazyValues:
    """Values of an initializer that are read when they are needed."""

    tensor: onnx.TensorProto
    shape: Sequence[int]
    dtype: Any
    nbytes: int
    def __init__(self, tensor: onnx.TensorProto) -> None: ...
    def load(self) -> np.ndarray: ...

class Constant(Tensor):
    """A tensor of known values. NumPy has no dtype for some: ``dtype`` is then ONNX's number."""

    data_location: int | None
    export_dtype: Any
    _values: np.ndarray | LazyValues
    def __init__(
        self,
        name: str,
        values: np.ndarray | LazyValues,
        data_location: int | None = ...,
        export_dtype: Any = ...,
    ) -> None: ...
    @property
    def values(self) -> np.ndarray: ...
    @values.setter
    def values(self, values: np.ndarray | LazyValues) -> None: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def copy(self) -> Constant: ...
