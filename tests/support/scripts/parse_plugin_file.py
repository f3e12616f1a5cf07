"""Parse the ONNX file MODEL with the plugins of Python; print the names of the plugin layers."""

import json
import sys

from linexport.plugins.tensorrt.flavour import RTX
from linexport.plugins.tensorrt.plugin import register

module = RTX.load()
creators = register(RTX)
logger = module.Logger(module.Logger.ERROR)
builder = module.Builder(logger)
network = builder.create_network(1 << int(module.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
parser = module.OnnxParser(network, logger)
if not parser.parse_from_file(sys.argv[1]):
    sys.exit("; ".join(parser.get_error(i).desc() for i in range(parser.num_errors)))
layers = (network.get_layer(i) for i in range(network.num_layers))
print(json.dumps(sorted(x.name for x in layers if x.type.name.startswith("PLUGIN"))))
