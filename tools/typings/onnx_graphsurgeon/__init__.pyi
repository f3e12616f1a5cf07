"""Types of the part of onnx-graphsurgeon that linexport uses; the package itself has none."""

from onnx_graphsurgeon.exporters.onnx_exporter import export_onnx as export_onnx
from onnx_graphsurgeon.importers.onnx_importer import import_onnx as import_onnx
from onnx_graphsurgeon.ir.function import Function as Function
from onnx_graphsurgeon.ir.graph import Graph as Graph
from onnx_graphsurgeon.ir.node import Node as Node
from onnx_graphsurgeon.ir.tensor import Constant as Constant
from onnx_graphsurgeon.ir.tensor import Tensor as Tensor
from onnx_graphsurgeon.ir.tensor import Variable as Variable
