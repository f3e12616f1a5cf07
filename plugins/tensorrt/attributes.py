"""Attributes of a node by which TensorRT finds its plugin, and what the plugin is made of.

The schemas of the ops are portable and know nothing of them; ``allow`` gives onnx schemas that do,
so that its checker accepts a marked model. Other runtimes do not read them.
"""

from __future__ import annotations

from functools import cache

from onnx import defs

from linexport.plugins.kernels.description import BINARIES, LAUNCH
from linexport.plugins.ops.op import ABSENT, DOMAIN, VERSION, Op
from linexport.plugins.ops.registry import all_ops, register_schema, register_schemas

PLUGIN_NAMESPACE, PLUGIN_VERSION = "plugin_namespace", "plugin_version"
"""Which plugin runs the node; TensorRT's parser reads them."""

AHEAD_OF_TIME = "aot"
"""1 lets TensorRT keep the kernel in the engine; see ``plugins.tensorrt.quick``."""


@cache
def allow() -> None:
    """Register schemas with these attributes for the ops that have kernels, once."""
    register_schemas()
    for op in all_ops().values():
        if op.kernels:
            defs.deregister_schema(op.name, VERSION, DOMAIN)
            register_schema(op, _extended(op))


def _extended(op: Op) -> defs.OpSchema:
    kinds, schema = defs.OpSchema.AttrType, op.schema
    texts = (PLUGIN_NAMESPACE, PLUGIN_VERSION, LAUNCH, BINARIES)
    return defs.OpSchema(
        op.name,
        DOMAIN,
        VERSION,
        doc=schema.doc or "",
        inputs=schema.inputs,
        outputs=schema.outputs,
        type_constraints=[
            (c.type_param_str, c.allowed_type_strs, c.description) for c in schema.type_constraints
        ],
        attributes=[
            *schema.attributes.values(),
            defs.OpSchema.Attribute(ABSENT, kinds.INTS, "Inputs to disregard.", required=False),
            defs.OpSchema.Attribute(AHEAD_OF_TIME, kinds.INT, "1: in the engine.", required=False),
            *(
                defs.OpSchema.Attribute(name, kinds.STRING, "For the plugin.", required=False)
                for name in texts
            ),
        ],
    )
