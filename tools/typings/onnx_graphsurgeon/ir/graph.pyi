from collections.abc import Iterator, Mapping, Sequence

import onnx
from onnx_graphsurgeon.ir.function import Function
from onnx_graphsurgeon.ir.node import Node
from onnx_graphsurgeon.ir.tensor import Tensor, Variable

class Graph:
    nodes: list[Node]
    name: str
    doc_string: str
    opset: int
    ir_version: int | None
    producer_name: str
    producer_version: str
    import_domains: Sequence[onnx.OperatorSetIdProto] | None
    functions: list[Function]
    def __init__(
        self,
        nodes: list[Node] | None = ...,
        inputs: Sequence[Tensor] | None = ...,
        outputs: Sequence[Tensor] | None = ...,
        name: str | None = ...,
        doc_string: str | None = ...,
        opset: int | None = ...,
        import_domains: Sequence[onnx.OperatorSetIdProto] | None = ...,
        producer_name: str | None = ...,
        producer_version: str | None = ...,
        functions: Sequence[Function] | None = ...,
        ir_version: int | None = ...,
    ) -> None: ...
    # Whatever is assigned becomes a list.
    @property
    def inputs(self) -> list[Variable]: ...
    @inputs.setter
    def inputs(self, tensors: Sequence[Tensor]) -> None: ...
    @property
    def outputs(self) -> list[Tensor]: ...
    @outputs.setter
    def outputs(self, tensors: Sequence[Tensor]) -> None: ...
    def subgraphs(self, recursive: bool = ...) -> Iterator[Graph]: ...
    def cleanup(
        self,
        remove_unused_node_outputs: bool = ...,
        recurse_subgraphs: bool = ...,
        remove_unused_graph_inputs: bool = ...,
        recurse_functions: bool = ...,
    ) -> Graph: ...
    def toposort(
        self, recurse_subgraphs: bool = ..., recurse_functions: bool = ..., mode: str = ...
    ) -> Graph: ...
    def fold_constants(self, size_threshold: int | None = ...) -> Graph: ...
    def tensors(self, check_duplicates: bool = ...) -> dict[str, Tensor]: ...
    def copy(self, tensor_map: Mapping[str, Tensor] | None = ...) -> Graph: ...
