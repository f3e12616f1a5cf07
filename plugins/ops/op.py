"""What every linexport op is made of, and how a node of it gets a function body.

An ``Op`` holds the schema and the portable lowering. A *lowering* is a function that writes a body
of other operators for one node: standard ones here, a runtime's own in a target. Since a body is
attached to the model as a model-local function, the node itself stays in the graph, whatever it is
lowered to, and a runtime that knows nothing of linexport runs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import defs

from linexport.errors import OpError
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.shapes import Shape

DOMAIN = "linexport"
VERSION = 1

ABSENT = "absent_inputs"
"""Attribute of any node: positions of inputs that mean nothing. Runtimes that take no empty input
get some tensor there."""

AHEAD_OF_TIME = "aot"
"""Attribute of any node: 1 lets TensorRT keep its kernel in the engine; see
``plugins.tensorrt.quick``."""

Lowering = Callable[["Node"], tuple[Body, list[str]]]
"""Writes the body of a node; returns it with the values of the op's outputs, in order."""


@dataclass(frozen=True)
class StatePort:
    """A recurrent state of a node: an optional input, and the output that continues it.

    Attributes:
        past: position of the input.
        present: position of the output.
        name: what the pair is called in a graph, ``past_<name>_<i>`` and ``present_<name>_<i>``.
        sizes: its dimensions after the batch.
        initial: what begins a sequence, everywhere.
    """

    past: int
    present: int
    name: str
    sizes: tuple[int, ...]
    initial: float = 0.0


def _stateless(node: Node) -> Sequence[StatePort]:
    return ()


@dataclass(frozen=True)
class Op:
    """One operator of the domain.

    Attributes:
        schema: its ONNX schema; formal names, types and attributes are read from here.
        check: raises OpError where a node's attributes or input shapes are wrong.
        portable: the lowering to standard operators.
        states: the recurrent states of a node.
        slow: why every lowering there is of it is slow; whoever converts a model is told.
    """

    schema: defs.OpSchema
    check: Callable[[Node], None]
    portable: Lowering
    states: Callable[[Node], Sequence[StatePort]] = _stateless
    slow: str = ""

    @property
    def name(self) -> str:
        """Operator type."""
        return str(self.schema.name)


@dataclass(frozen=True)
class Node:
    """One occurrence of an op: its attributes and the shapes of its inputs.

    Attributes:
        op_type: operator type in the linexport domain.
        attributes: as Python values.
        inputs: formal input names in order, "" where the node leaves one out.
        shapes: by formal input name; absent inputs are absent here.
    """

    op_type: str
    attributes: Mapping[str, Any]
    inputs: tuple[str, ...]
    shapes: Mapping[str, Shape]


def describe(node: onnx.NodeProto, op: Op, shapes: Mapping[str, Shape]) -> Node:
    """View a NodeProto through its schema; ``shapes`` are by value name in the graph.

    Raises:
        OpError: an input has no known shape, or there are more inputs than the op has.
    """
    formal = [parameter.name for parameter in op.schema.inputs]
    actual = list(node.input)
    if len(actual) > len(formal):
        raise OpError(f"{op.name} {node.name!r} has {len(actual)} inputs; expected {len(formal)}.")
    actual += [""] * (len(formal) - len(actual))
    known: dict[str, Shape] = {}
    for name, value in zip(formal, actual, strict=True):
        if value and value not in shapes:
            raise OpError(f"{op.name} {node.name!r}: the shape of its input {name} is unknown.")
        if value:
            known[name] = shapes[value]
    attributes = {a.name: _value(a) for a in node.attribute}
    for position in attributes.get(ABSENT, ()):
        known.pop(formal[position], None)
        actual[position] = ""
    present = tuple(n if v else "" for n, v in zip(formal, actual, strict=True))
    return Node(op.name, attributes, present, known)


def function_for(node: Node, op: Op, lowering: Lowering) -> onnx.FunctionProto:
    """The model-local function for a node. Equal bodies get equal overload names.

    Raises:
        OpError: from the op's own checks.
    """
    op.check(node)
    body, values = lowering(node)
    outputs = dict(zip((p.name for p in op.schema.outputs), values, strict=True))
    formal = [name or f"absent_{i}" for i, name in enumerate(node.inputs)]
    function = body.function(DOMAIN, op.name, formal, outputs, attributes=list(node.attributes))
    digest = hashlib.sha256(function.SerializeToString(deterministic=True)).hexdigest()
    function.overload = digest[:8]
    return function


def parameter(
    name: str, types: str, description: str, kind: str = "Single"
) -> defs.OpSchema.FormalParameter:
    """A formal input or output; ``kind`` is Single or Optional."""
    option = getattr(defs.OpSchema.FormalParameterOption, kind)
    return defs.OpSchema.FormalParameter(name, types, description, param_option=option)


def _value(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value


def for_runtimes() -> list[defs.OpSchema.Attribute]:
    """Attributes any node may have, which mean nothing for what it computes: they tell a runtime
    how to run it (``linexport.plugins.tensorrt``)."""
    kinds = defs.OpSchema.AttrType
    texts = ("plugin_namespace", "plugin_version", "launch", "binaries")
    return [
        defs.OpSchema.Attribute(ABSENT, kinds.INTS, "Inputs to disregard.", required=False),
        defs.OpSchema.Attribute(AHEAD_OF_TIME, kinds.INT, "For TensorRT.", required=False),
        *(
            defs.OpSchema.Attribute(name, kinds.STRING, "For TensorRT.", required=False)
            for name in texts
        ),
    ]


def activations(*names: str) -> list[tuple[str, Sequence[str], str]]:
    """Type constraints for activations (T) and, if named, float32 states (S)."""
    floating = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
    both = {
        "T": ("T", floating, "Activations."),
        "S": ("S", ["tensor(float)"], "States are kept in float32."),
    }
    return [both[name] for name in names]
