"""From a node of an op to what its plugin is declared with: tensors, plans, binaries.

Element types are those of the op's schema: T is the type of the activations, and of features (Y); S
and the parameters of feature maps (P0 ...) are float32, and a mask is bool. Shapes are written here
once, in terms of batch and length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from onnx import defs

from linexport.errors import OpError, UnsupportedModelError
from linexport.plugins.kernels.compile import compile_kernels
from linexport.plugins.kernels.launch import TYPES, LaunchPlan
from linexport.plugins.kernels.plan import ARCHITECTURES, plan
from linexport.plugins.ops import feature_map
from linexport.plugins.ops.linear_attention import view
from linexport.plugins.ops.op import Node, Op
from linexport.plugins.ops.shapes import static_width, width_per_head
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
        **_parameters(node),
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


def _feature_map(node: Node) -> dict[str, Shape]:
    heads, parameters = int(node.attributes["num_heads"]), _parameters(node)
    formulas = feature_map.formulas(node.attributes["kind"])
    features = formulas.features(width_per_head("x", node.shapes["x"], heads), *parameters.values())
    width = static_width("x", node.shapes["x"])
    return {"x": (B, T, width), **parameters, "y": (B, T, heads * features)}


def _parameters(node: Node) -> dict[str, tuple[int, ...]]:
    return {p.name: p.shape for p in feature_map.parameters_of(node, feature_map.NAMES)}


SHAPES: Mapping[str, Callable[[Node], Mapping[str, Shape]]] = {
    "LinearAttention": _linear_attention,
    "CausalConvWithState": _causal_conv,
    "FeatureMap": _feature_map,
}
"""Of every tensor, by op."""

TIME = {"LinearAttention": 1, "CausalConvWithState": 2, "FeatureMap": 1}
"""Axis of the first input that counts tokens, by op."""

ELEMENTS = {
    "S": "fp32",
    "tensor(bool)": "i8",
    **{f"P{i}": "fp32" for i in range(feature_map.PARAMETERS)},
}
"""Element types by the name the schemas give them; all others are that of the activations."""


def unsupported(node: Node, dtype: str, sms: Sequence[int]) -> str | None:
    """Why no plugin can run the node, or None where one can."""
    if node.op_type not in SHAPES:
        return "standard operators: there is no kernel for it"
    if node.op_type == "FeatureMap" and feature_map.formulas(node.attributes["kind"]).elementwise:
        return "standard operators, which TensorRT fuses with what is around them"
    try:
        SHAPES[node.op_type](node)
        for sm in architectures(sms):
            plan(node, dtype, sm)
    except (UnsupportedModelError, OpError) as error:
        return str(error)
    return None


def architectures(sms: Sequence[int]) -> list[int]:
    """Compute capabilities to compile for, so that GPUs of the given ones run the kernels.

    Raises:
        UsageError: there are none for one of them.
    """
    return sorted({compatible(sm, ARCHITECTURES) for sm in sms})


def describe(op: Op, node: Node, dtype: str, sms: Sequence[int]) -> Description:
    """Describe the node's plugin; compiles its kernels.

    Args:
        op: its op.
        node: checked, with its widths known.
        dtype: of the activations, as NumPy calls it.
        sms: compute capabilities to run on.

    Raises:
        UnsupportedModelError, OpError, UsageError: see ``unsupported``.
        EnvironmentProblemError: kernels cannot be compiled here.
    """
    plans = {sm: plan(node, dtype, sm) for sm in architectures(sms)}
    return Description(
        node.op_type,
        *tensors(op, node, dtype),
        plans,
        {sm: _binaries(p, sm) for sm, p in plans.items()},
    )


def tensors(op: Op, node: Node, dtype: str) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]:
    """Inputs by position up to the last there is, None where there is none, and outputs."""
    shapes = SHAPES[node.op_type](node)

    def tensor(formal: defs.OpSchema.FormalParameter) -> Tensor:
        element = ELEMENTS.get(formal.type_str, TYPES[dtype])
        return Tensor(formal.name, element, tuple(shapes[formal.name]))

    given = len(node.inputs)
    while given and not node.inputs[given - 1]:
        given -= 1
    formal = zip(op.schema.inputs[:given], node.inputs, strict=False)
    inputs = tuple(tensor(parameter) if name else None for parameter, name in formal)
    return inputs, tuple(tensor(parameter) for parameter in op.schema.outputs)


def _binaries(plan: LaunchPlan, sm: int) -> dict[str, Binary]:
    compiled = compile_kernels(plan.kernels(), sm)
    return {name: Binary(made.cubin, made.entry, made.shared) for name, made in compiled.items()}
