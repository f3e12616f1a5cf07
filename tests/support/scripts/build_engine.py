"""Build an engine of MODEL with the plugins of LIBRARY, or of Python; print what it holds."""

import sys
from pathlib import Path

import onnx

from linexport.graph.dims import DimRange
from linexport.plugins.tensorrt.flavour import RTX
from linexport.targets.trt import build as module
from linexport.targets.trt import parser_form
from linexport.targets.trt.profiles import profiles

if sys.argv[2] != "python":
    registry = RTX.load().get_plugin_registry()
    module.register = lambda flavour: registry.load_library(sys.argv[2]) and ()
model = parser_form.only(parser_form.parsable(onnx.load_model(sys.argv[1])), 89)
dims = {"batch": DimRange(1, 1, 3, batch=True), "seq": DimRange(1, 64, 4096)}
made = module.build_engine(RTX, model, Path(sys.argv[1]), profiles(dims, True), 89)
print(made.plugins, made.scratch, made.activations, sorted(made.layer_scratch.items()))
