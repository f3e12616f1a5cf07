from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onnx_graphsurgeon.ir.graph import Graph
from onnx_graphsurgeon.ir.tensor import Tensor, Variable

class Node:
    op: str
    name: str
    attrs: dict[str, Any]
    domain: str | None
    def __init__(
        self,
        op: str,
        name: str | None = ...,
        attrs: Mapping[str, Any] | None = ...,
        inputs: Sequence[Tensor] | None = ...,
        outputs: Sequence[Variable] | None = ...,
        domain: str | None = ...,
    ) -> None: ...
    # Whatever is assigned becomes the content of the list of neighbours.
    @property
    def inputs(self) -> list[Tensor]: ...
    @inputs.setter
    def inputs(self, tensors: Sequence[Tensor]) -> None: ...
    @property
    def outputs(self) -> list[Variable]: ...
    @outputs.setter
    def outputs(self, tensors: Sequence[Variable]) -> None: ...
    def subgraphs(self, recursive: bool = ...) -> Iterator[Graph]: ...
    def copy(
        self,
        inputs: Sequence[Tensor] | None = ...,
        outputs: Sequence[Variable] | None = ...,
        tensor_map: Mapping[str, Tensor] | None = ...,
    ) -> Node: ...
