"""Build an engine of MODEL with the preview of aliased plugin I/O; print what came of it.

    aliased_io.py MODEL plain|preview|aliased

``preview`` sets the flag alone; with ``aliased`` a plugin's states are written over their pasts.
"""

import sys
from pathlib import Path
from typing import Any

import onnx

from linexport.graph.dims import DimRange
from linexport.plugins.tensorrt import plugin
from linexport.plugins.tensorrt.flavour import RTX
from linexport.targets.trt import build, parser_form
from linexport.targets.trt.profiles import profiles

trt: Any = RTX.load()
place, mode = Path(sys.argv[1]), sys.argv[2]
plain = build._config


def with_preview(*arguments: Any) -> Any:
    config = plain(*arguments)
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    return config


def aliased_input(self: Any, output: int) -> int:
    past = self.description.outputs[output].name.replace("present", "past")
    names = [tensor.name if tensor else "" for tensor in self.description.inputs]
    return names.index(past) if past in names else -1


if mode != "plain":
    build._config = with_preview
if mode == "aliased":
    trt.IPluginV3OneBuild = trt.IPluginV3OneBuildV2
    plugin.plugin_class(trt).get_aliased_input = aliased_input
model = onnx.load_model(str(place), load_external_data=False)
model = parser_form.only(parser_form.parsable(model), 89)
dims = {"batch": DimRange(1, 1, 3, batch=True), "seq": DimRange(1, 16, 64)}
made = build.build_engine(RTX, model, place, profiles(dims, True), 89)
print("built", len(made.plugins))
