"""From a node of an op to what its plugin is declared with: tensors, plans, binaries.

Element types and shapes are those that the op declares, shapes in terms of batch and length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from linexport.errors import OpError, UnsupportedModelError
from linexport.plugins.kernels.architectures import ARCHITECTURES
from linexport.plugins.kernels.compile import compile_kernels
from linexport.plugins.kernels.description import (
    Binary,
    Description,
    TensorDescription,
    compatible,
)
from linexport.plugins.kernels.fit import fit
from linexport.plugins.kernels.launch import TYPES, LaunchPlan
from linexport.plugins.kernels.plan import plan_launches
from linexport.plugins.kernels.plans import attention_layer
from linexport.plugins.kernels.plans.attention_layer import AttentionLayer
from linexport.plugins.ops import feature_map
from linexport.plugins.ops.op import Node, Op

NAMESPACE, VERSION = "linexport", "1"

LAYER = "LinearAttentionLayer"
"""Node of LinearAttention with what its operands are computed from; a plugin, and no op."""

B, T = "batch", "length"


ELEMENTS = {"float32": "fp32", "bool": "i8"}
"""Element types that an op fixes, by NumPy's names; all others are that of the activations."""


def unsupported(op: Op, node: Node, dtype: str, sms: Sequence[int]) -> str | None:
    """Return why no plugin can run the node, or None where one can."""
    if not op.kernels:
        return "standard operators: the op has no kernel"
    if op is feature_map.OP and feature_map.formulas(node.attributes["kind"]).elementwise:
        return "standard operators, which TensorRT fuses with what is around them"
    try:
        _shapes(op, node)
        for sm in architectures(sms):
            plan_launches(node, dtype, sm)
    except (UnsupportedModelError, OpError) as error:
        return str(error)
    return None


def architectures(sms: Sequence[int]) -> list[int]:
    """Compute capabilities to compile for, so that GPUs of the given ones run the kernels.

    Raises:
        UsageError: there are none for one of them.
    """
    return sorted({compatible(sm, tuple(ARCHITECTURES)) for sm in sms})


def describe_plugin(op: Op, node: Node, dtype: str, sms: Sequence[int]) -> Description:
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
    plans = {sm: plan_launches(node, dtype, sm) for sm in architectures(sms)}
    return described(node.op_type, *tensors(op, node, dtype), plans)


def describe_layer(
    layer: AttentionLayer,
    inputs: Sequence[TensorDescription],
    outputs: Sequence[TensorDescription],
    dtype: str,
    sms: Sequence[int],
) -> Description:
    """Describe the plugin of a ``LAYER`` with these tensors; compiles its kernels.

    Raises:
        UnsupportedModelError, UsageError, EnvironmentProblemError: see ``describe_plugin``.
    """
    plans = {sm: attention_layer.plan(layer, dtype, sm) for sm in architectures(sms)}
    return described(LAYER, inputs, outputs, plans)


def described(
    op_type: str,
    inputs: Sequence[TensorDescription | None],
    outputs: Sequence[TensorDescription],
    plans: Mapping[int, LaunchPlan],
) -> Description:
    """Describe the plugin of a node with these tensors and plans, whose kernels are made to fit.

    Raises:
        EnvironmentProblemError, BuildError: see ``fit``.
    """
    fitted = {sm: fit(plan, sm) for sm, plan in plans.items()}
    binaries = {sm: _binaries(plan, sm) for sm, plan in fitted.items()}
    return Description(op_type, tuple(inputs), tuple(outputs), fitted, binaries)


def tensors(
    op: Op, node: Node, dtype: str
) -> tuple[tuple[TensorDescription | None, ...], tuple[TensorDescription, ...]]:
    """Inputs by position up to the last there is, None where there is none, and outputs."""
    shapes = _shapes(op, node)

    def tensor(name: str) -> TensorDescription:
        element = ELEMENTS.get(op.element_type(name, node.attributes), TYPES[dtype])
        return TensorDescription(name, element, shapes[name])

    given = len(node.inputs)
    while given and not node.inputs[given - 1]:
        given -= 1
    inputs = tuple(tensor(name) if name else None for name in node.inputs[:given])
    return inputs, tuple(tensor(name) for name in op.output_names)


def _shapes(op: Op, node: Node) -> dict[str, tuple[int | str, ...]]:
    """Return the shapes of inputs and outputs in terms of batch and length, by formal name.

    Raises:
        OpError: a size is not fixed that is neither of these.
    """
    pasts = {op.input_names[port.past] for port in op.states(node)}
    inputs, tokens = {}, op.tokens(node.attributes)
    for name, shape in node.shapes.items():
        sizes = list(shape)
        if name in tokens or name in pasts:
            sizes[0] = B
        if name in tokens:
            sizes[tokens[name]] = T
        if any(size is None or (isinstance(size, str) and size not in (B, T)) for size in sizes):
            raise OpError(f"{name} has shape {tuple(shape)}; a plugin needs it fixed.")
        inputs[name] = sizes
    outputs = op.shapes(replace(node, shapes=inputs))
    found = {**inputs, **dict(zip(op.output_names, outputs, strict=True))}
    return {name: tuple(shape) for name, shape in found.items()}  # type: ignore[arg-type]


def _binaries(plan: LaunchPlan, sm: int) -> dict[str, Binary]:
    compiled = compile_kernels(plan.kernels(), sm)
    return {name: Binary(made.cubin, made.entry, made.shared) for name, made in compiled.items()}
