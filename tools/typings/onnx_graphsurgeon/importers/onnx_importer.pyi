import onnx
from onnx_graphsurgeon.ir.graph import Graph

def import_onnx(onnx_model: onnx.ModelProto) -> Graph: ...
