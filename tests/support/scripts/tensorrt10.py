"""The Python module of TensorRT 10: registers linexport's plugins, and has a creator make one."""

from __future__ import annotations

import os
import sys

sys.setdlopenflags(os.RTLD_LAZY)
import tensorrt_bindings as trt  # noqa: E402

sys.setdlopenflags(os.RTLD_NOW)
sys.modules["tensorrt"] = trt  # as the package of that name does

from linexport.errors import EnvironmentProblemError  # noqa: E402
from linexport.plugins.kernels import contract  # noqa: E402
from linexport.plugins.ops.linear_attention import OP  # noqa: E402
from linexport.plugins.tensorrt import fields, quick_plugin  # noqa: E402
from linexport.plugins.tensorrt.flavour import TENSORRT  # noqa: E402
from linexport.plugins.tensorrt.plugin import register  # noqa: E402
from linexport.targets.trt import target  # noqa: E402
from tests.support import kernels  # noqa: E402

module = TENSORRT.load()
assert module is trt, module
print(f"loaded {TENSORRT.version()}")
creators = register(TENSORRT)
names = {creator.name for creator in creators}
print(f"registered {len(names)} plugins")
description = contract.describe_plugin(OP, kernels.node("gated_delta", 64), "float16", [87])
encoded = fields.encode(module, description.attributes())
creator = next(creator for creator in creators if creator.name == OP.name)
made = creator.create_plugin("node", encoded.collection, module.TensorRTPhase.BUILD)
assert creator.failure is None, creator.failure
print(f"made {made.plugin_name}, {made.num_outputs} outputs")
clone = made.clone()
assert clone.description == description
print("outputs", [str(kind) for kind in made.get_output_data_types([trt.DataType.HALF])])
try:
    quick_plugin.register(TENSORRT)
    print("registered quick plugins")
except EnvironmentProblemError as error:
    print(error)
here, problems = target.look_here(TENSORRT)
assert here is None and not any("libnvinfer" in text for text in problems), problems
