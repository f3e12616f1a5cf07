import onnx
from onnx_graphsurgeon.ir.graph import Graph
from onnx_graphsurgeon.ir.node import Node

class OnnxExporter:
    @staticmethod
    def export_node(node: Node) -> onnx.NodeProto: ...
    @staticmethod
    def export_graph(graph: Graph, do_type_check: bool = ...) -> onnx.GraphProto: ...

def export_onnx(graph: Graph, do_type_check: bool = ...) -> onnx.ModelProto: ...
