"""Operators that act on each entry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from linexport.token_flow.axes import fixed
from linexport.token_flow.broadcasting import elementwise
from linexport.token_flow.interpreter import Interpreter, rule
from linexport.token_flow.values import MixingError, TokenValue

UNARY = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cast", "Ceil", "Celu", "Cos"),
    *("Cosh", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity"),
    *("IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round"),
    *("Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Swish"),
    *("Tan", "Tanh", "ThresholdedRelu", "BitwiseNot", "com.microsoft:Gelu"),
    *("com.microsoft:FastGelu", "com.microsoft:QuickGelu"),
)

SEVERAL = (
    *("Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal"),
    *("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or"),
    *("Pow", "PRelu", "Sub", "Sum", "Where", "Xor", "CastLike", "com.microsoft:BiasGelu"),
)


@rule(*UNARY, *SEVERAL)
def entrywise(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow what is computed of entries that meet."""
    return [elementwise(a, node.op, a.inputs(node))]


@rule("Dropout")
def dropout(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow what inference leaves as it is."""
    given = a.value(node.inputs[0])
    return [elementwise(a, "Identity", [given]), replace(given.without_numbers(), tokens=False)]


@rule("Clip")
def clip(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow entries between two ends, of which either may be left out."""
    ends = []
    for place, name, default in ((1, "min", -math.inf), (2, "max", math.inf)):
        end = a.optional(node, place)
        number = np.full((), node.attrs.get(name, default), object)
        ends.append(TokenValue((), numbers=number) if end is None else end)
    return [elementwise(a, "Clip", [a.value(node.inputs[0]), *ends])]


@rule("OneHot")
def one_hot(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow an entry as a vector of zeros with a one."""
    indices, depth = a.value(node.inputs[0]), a.value(node.inputs[1]).uniform
    place = node.attrs.get("axis", -1) % (indices.rank + 1)
    found = elementwise(a, "OneHot", [indices])
    size = fixed(a.axis_size(depth, node.outputs[0], place))
    axes = (*found.known_axes[:place], size, *found.known_axes[place:])
    return [replace(found.without_numbers(), axes=axes)]


@rule("QuantizeLinear", "DequantizeLinear")
def scaled(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow entries with a scale for all, or for each place along one axis."""
    given, *scales = a.inputs(node)
    along = [s for s in scales if s.rank == 1 and any(s.known_axes)]
    if any(s.spans for s in scales) or any(s.rank > 1 for s in scales):
        raise MixingError("quantises by scales that cannot be followed")
    if along:
        place = node.attrs.get("axis", 1) % given.rank
        shape = [() for _ in range(given.rank)]
        shape[place] = along[0].known_axes[0]
        scales = [TokenValue(tuple(shape))]
    return [elementwise(a, node.op, [given, *scales])]


@rule("RandomNormalLike", "RandomUniformLike", "Bernoulli")
def random(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Refuse what is another number in every call."""
    raise MixingError("draws random numbers, which are others in every call")
