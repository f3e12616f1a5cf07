"""Plans and plugins of the cases, where kernels are compiled: no part of a pack."""

from __future__ import annotations

from collections.abc import Mapping

from gpu.case import Case
from gpu.layer import Layer
from linexport.plugins.kernels import contract
from linexport.plugins.kernels.description import Description, TensorDescription
from linexport.plugins.kernels.launch import LaunchPlan
from linexport.plugins.kernels.plan import plan_launches
from linexport.plugins.kernels.plans import attention_layer
from linexport.plugins.kernels.plans.parameters import GIVEN
from linexport.plugins.ops.registry import all_ops

SIZES = {"B": "batch", "T": "length"}


def plan(case: Case, sm: int, precision: str = "tf32x3") -> LaunchPlan:
    """Return the plan of a case.

    Raises:
        UnsupportedModelError: no kernel computes it.
    """
    if isinstance(case, Layer):
        return attention_layer.plan(case.layer(), case.dtype, sm, precision)
    return plan_launches(case.node(), case.dtype, sm, precision)


def described(case: Case, plans: Mapping[int, LaunchPlan]) -> Description:
    """Return the plugin of a case; compiles its kernels.

    Raises:
        BuildError: one does not compile.
    """
    node = case.node()
    inputs, outputs = contract.tensors(all_ops()[node.op_type], node, case.dtype)
    if not isinstance(case, Layer):
        return contract.described(node.op_type, inputs, outputs, plans)
    own = {x.name: x for x in (*inputs, *outputs) if x is not None}
    tensors, types = case.tensors(), dict(zip(GIVEN, case.layer().types, strict=False))
    for name, type in types.items():
        shape = (SIZES.get(str(size), size) for size in tensors[name])
        own[name] = TensorDescription(name, type, tuple(shape))
    state = TensorDescription("present_conv_0", "fp32", own["x3"].shape)
    results = (own["output"], own["present_state"], state)
    return contract.described(contract.LAYER, [own[name] for name in tensors], results, plans)
