from onnx_graphsurgeon.ir.graph import Graph

class Function(Graph):
    domain: str
