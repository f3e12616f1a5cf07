"""Parse MODEL with TensorRT-RTX's library name provided, or RAW."""

import sys
from pathlib import Path

from linexport.plugins.tensorrt import flavour

if sys.argv[2] == "raw":
    flavour.provide = lambda name, library: None
from linexport.plugins.tensorrt.plugin import register

creators = register(flavour.RTX)
trt = flavour.RTX.load()
log = trt.Logger(trt.Logger.ERROR)
network = trt.Builder(log).create_network(0)
parser = trt.OnnxParser(network, log)
print("parsed", parser.parse(Path(sys.argv[1]).read_bytes()))
