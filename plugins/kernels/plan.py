"""Which kernels a node is run with: ``plan(node, dtype, sm)``.

A node is described as the ops describe it (``plugins.ops.op.Node``). Beyond the attributes of the
op, ``feature_map`` names a map fused into LinearAttention: its query and key are then the arguments
of the map. An op names the module of its plans (``Op.kernels``); ours are in ``plans/``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from linexport.errors import UnsupportedModelError
from linexport.plugins.kernels.architectures import ARCHITECTURES
from linexport.plugins.kernels.launch import TYPES, LaunchPlan
from linexport.plugins.ops.op import Node
from linexport.plugins.ops.registry import all_ops

PRECISIONS = ("tf32x3", "ieee")
"""How float32 products are computed: three in TensorFloat-32, or none."""

Planner = Callable[[Node, str, int, str], LaunchPlan]


def plan_launches(node: Node, dtype: str, sm: int, precision: str = "tf32x3") -> LaunchPlan:
    """The launches for a node.

    Args:
        node: checked, with all widths known; batch and length need not be.
        dtype: of the activations, "float32", "float16" or "bfloat16".
        sm: compute capability times ten, one of ARCHITECTURES.
        precision: of float32 products, one of PRECISIONS; without meaning for the other dtypes.

    Raises:
        UnsupportedModelError: the node has no kernel; says why.
        OpError: the node contradicts the definition of its op.
    """
    modules = {name: op.kernels for name, op in all_ops().items() if op.kernels}
    if node.op_type not in modules:
        raise UnsupportedModelError(
            f"No kernel computes {node.op_type}; there are kernels for "
            f"{', '.join(sorted(modules))}."
        )
    for what, given, known in (
        ("dtype", dtype, tuple(TYPES)),
        ("compute capability", sm, tuple(ARCHITECTURES)),
        ("precision", precision, PRECISIONS),
    ):
        if given not in known:
            expected = ", ".join(map(str, known))
            raise UnsupportedModelError(
                f"There are no kernels for {what} {given}; only {expected}."
            )
    planner: Planner = importlib.import_module(modules[node.op_type]).plan
    return planner(node, dtype, sm, precision)
