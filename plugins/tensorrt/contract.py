"""From a node of an op to what its plugin is declared with: tensors, plans, binaries.

Element types are those of the op's schema: T is the type of the activations, S float32, and a mask
is bool. Shapes are written here once, in terms of batch and length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from linexport.errors import OpError, UnsupportedModelError
from linexport.plugins.kernels.compile import compile_kernels
from linexport.plugins.kernels.launch import TYPES, Plan
from linexport.plugins.kernels.plan import ARCHITECTURES, plan
from linexport.plugins.ops.linear_attention import view
from linexport.plugins.ops.op import Node, Op
from linexport.plugins.ops.shapes import static_width
from linexport.plugins.tensorrt.description import Binary, Description, Tensor, compatible

NAMESPACE, VERSION = "linexport", "1"

Shape = tuple[int | str, ...]
B, T = "batch", "length"


def _linear_attention(node: Node) -> dict[str, Shape]:
    spec, sizes = view(node)
    tokens = {
        name: (B, T, static_width(name, node.shapes[name]))
        for name in ("query", "key", "value", "decay", "beta")
        if name in node.shapes
    }
    state = (B, spec.kv_num_heads, sizes.d_k, sizes.d_v)
    return {
        **tokens,
        "key_mask": (B, T),
        "past_state": state,
        "past_normalizer": state[:-1],
        "output": (B, T, spec.output_heads * sizes.d_v),
        "present_state": state,
        "present_normalizer": state[:-1],
    }


def _causal_conv(node: Node) -> dict[str, Shape]:
    channels, _, size = node.shapes["weight"]
    if not isinstance(channels, int) or not isinstance(size, int):
        raise OpError(f"weight has shape {tuple(node.shapes['weight'])}; a plugin needs it fixed.")
    state = (B, channels, size - 1)
    return {
        "input": (B, channels, T),
        "weight": (channels, 1, size),
        "bias": (channels,),
        "past_state": state,
        "output": (B, channels, T),
        "present_state": state,
    }


SHAPES: Mapping[str, Callable[[Node], Mapping[str, Shape]]] = {
    "LinearAttention": _linear_attention,
    "CausalConvWithState": _causal_conv,
}
"""Of every tensor, by op. FeatureMap is not among them: where a map is elementwise, TensorRT fuses
it with what is around it, which a plugin would prevent."""


def unsupported(node: Node, dtype: str, sms: Sequence[int]) -> str | None:
    """Why no plugin can run the node, or None where one can."""
    if node.op_type not in SHAPES:
        return "standard operators, which TensorRT fuses"
    if any(name.startswith("parameter_") for name in node.inputs):
        return "its feature map takes parameters, which plugins are not given"
    try:
        SHAPES[node.op_type](node)
        for sm in architectures(sms):
            plan(node, dtype, sm)
    except (UnsupportedModelError, OpError) as error:
        return str(error)
    return None


def architectures(sms: Sequence[int]) -> list[int]:
    """Those to make kernels for, so that GPUs of the given compute capabilities run them.

    Raises:
        UsageError: there are none for one of them.
    """
    return sorted({compatible(sm, ARCHITECTURES) for sm in sms})


def describe(op: Op, node: Node, dtype: str, sms: Sequence[int]) -> Description:
    """What the node's plugin is made of; compiles its kernels.

    Args:
        op: its op.
        node: checked, with its widths known.
        dtype: of the activations, as NumPy calls it.
        sms: compute capabilities to run on.

    Raises:
        UnsupportedModelError, OpError, UsageError: see ``unsupported``.
        EnvironmentProblemError: kernels cannot be compiled here.
    """
    shapes = SHAPES[node.op_type](node)
    element = {"T": TYPES[dtype], "S": "fp32", "tensor(bool)": "i8"}
    given = len(node.inputs)
    while given and not node.inputs[given - 1]:
        given -= 1
    plans = {sm: plan(node, dtype, sm) for sm in architectures(sms)}
    return Description(
        node.op_type,
        tuple(
            Tensor(p.name, element[p.type_str], tuple(shapes[p.name])) if name else None
            for p, name in zip(op.schema.inputs[:given], node.inputs, strict=False)
        ),
        tuple(
            Tensor(p.name, element[p.type_str], tuple(shapes[p.name])) for p in op.schema.outputs
        ),
        plans,
        {sm: _binaries(p, sm) for sm, p in plans.items()},
    )


def _binaries(plan: Plan, sm: int) -> dict[str, Binary]:
    compiled = compile_kernels(plan.kernels(), sm)
    return {name: Binary(made.cubin, made.entry, made.shared) for name, made in compiled.items()}
