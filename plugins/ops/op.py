"""The declaration of a linexport op, one occurrence of it, and how that gets a function body.

An ``Op`` is everything linexport knows of an operator; ``registry`` says how to add one. A
*lowering* is a function that writes a body of other operators for one node: standard ones here, a
runtime's own in a target. Since a body is attached to the model as a model-local function, the node
itself is kept, whatever it is lowered to, and a runtime that knows nothing of linexport
runs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import defs

from linexport.errors import OpError
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.shapes import PartialShape

DOMAIN = "linexport"
VERSION = 1

ABSENT = "absent_inputs"
"""Attribute any node may have: positions of inputs to disregard. Runtimes that take no empty input
get some tensor there."""

ACTIVATION = "activation"
"""The element type of a tensor that has that of the node's first input; see ``Op.element_type``."""

Attributes = Mapping[str, Any]

Inputs = Mapping[str, Any]
"""Arrays by the names of inputs, for an oracle; absent ones are missing."""

Lowering = Callable[["Node"], tuple[Body, list[str]]]
"""Writes the body of a node; returns it with the values of the op's outputs, in order."""

ShapeRule = Callable[["Node"], Sequence[PartialShape]]
"""Shapes of the outputs, in order; raises OpError where attributes or input shapes are wrong."""

Oracle = Callable[[Attributes, Inputs], tuple[Any, ...]]
"""``oracle(attributes, inputs)``: outputs in float64, in order, of NumPy arrays by formal name."""


@dataclass(frozen=True)
class StatePort:
    """A recurrent state of a node: an optional input, and the output that continues it.

    Attributes:
        past: position of the input.
        present: position of the output.
        name: what the pair is called in a graph, ``past_<name>_<i>`` and ``present_<name>_<i>``.
        sizes: its dimensions after the batch.
        initial_value: value of every element before the first token.
    """

    past: int
    present: int
    name: str
    sizes: tuple[int, ...]
    initial_value: float = 0.0


def _stateless(node: Node) -> Sequence[StatePort]:
    return ()


def _always(attributes: Attributes) -> bool:
    return True


def _no_types(attributes: Attributes) -> Collection[str]:
    return ()


def reads_causal(attributes: Attributes) -> bool:
    """Return whether the attribute ``causal``, 1 by default, is set: an ``Op.causal``."""
    return bool(attributes.get("causal", 1))


@dataclass(frozen=True, eq=False)
class Op:
    """One operator of the domain, declared once; tables may be keyed by it.

    Attributes:
        schema: its ONNX schema; formal names, types and attributes are read from here.
        infer: the shape rule. Checks, the fake of the PyTorch operator, ONNX shape inference and
            TensorRT's output shapes are this rule; call it by ``shapes``.
        portable: the lowering to standard operators.
        torch_schema: the PyTorch operator, "name(Tensor x, ...) -> ...". Its tensors and attributes
            are named as in ``schema``; a ``Tensor[]`` takes the formal inputs it does not name.
        eager: the same in differentiable PyTorch, with the signature of ``torch_schema``. It
            imports torch when it is called: who opens an artifact does not need it.
        oracle: the definition in float64, which every other form is tested against.
        token_axis: place of the token axis in inputs and outputs, by formal name.
        axis_attribute: name of the attribute that says where it is in all of these, "" where it is
            the same for all nodes; see ``tokens``.
        causal: with these attributes, an output token depends on no later tokens, and on earlier
            ones through the states only; a sequence may then be given in pieces.
        states: the recurrent states of a node.
        float32: type parameters that stay in float32 with these attributes, although the schema
            allows half precision.
        kernels: name of the module whose ``plan`` launches its GPU kernels, "" without any.
            It is imported when a target asks for kernels.
        sizes: what inspection adds to the attributes of a node.
        describe: one line about a node for people.
        summary: one sentence for people that says what the op does.
    """

    schema: defs.OpSchema
    infer: ShapeRule
    portable: Lowering
    torch_schema: str
    eager: Callable[..., Any]
    oracle: Oracle
    token_axis: Mapping[str, int]
    axis_attribute: str = ""
    causal: Callable[[Attributes], bool] = _always
    states: Callable[[Node], Sequence[StatePort]] = _stateless
    float32: Callable[[Attributes], Collection[str]] = _no_types
    kernels: str = ""
    sizes: Callable[[Node], Mapping[str, int]] = lambda node: {}
    describe: Callable[[Node], str] = lambda node: ""
    summary: str = ""

    def __post_init__(self) -> None:
        """Check what is known of an op by itself.

        Raises:
            OpError: token_axis names what is not there, or not the input that states follow.
        """
        formal = {*self.input_names, *self.output_names}
        if not formal.issuperset(self.token_axis):
            unknown = ", ".join(sorted(set(self.token_axis) - formal))
            raise OpError(f"{self.name}: token_axis names {unknown}, neither input nor output.")
        if self.has_state and self.input_names[0] not in self.token_axis:
            raise OpError(
                f"{self.name} has states, and its token_axis lacks {self.input_names[0]!r}: the "
                "first input of such an op must have a token axis."
            )

    @property
    def name(self) -> str:
        """Operator type."""
        return str(self.schema.name)

    @property
    def torch_name(self) -> str:
        """Name of the PyTorch operator."""
        return self.torch_schema.partition("(")[0].strip()

    @property
    def input_names(self) -> list[str]:
        """Formal names of the inputs, in order."""
        return [parameter.name for parameter in self.schema.inputs]

    @property
    def output_names(self) -> list[str]:
        """Formal names of the outputs, in order."""
        return [parameter.name for parameter in self.schema.outputs]

    @property
    def has_state(self) -> bool:
        """Nodes of it may carry a state."""
        return self.states is not _stateless

    def tokens(self, attributes: Attributes) -> Mapping[str, int]:
        """Return the place of the token axis in inputs and outputs of a node, by formal name."""
        if self.axis_attribute not in attributes:
            return self.token_axis
        return dict.fromkeys(self.token_axis, int(attributes[self.axis_attribute]))

    def shapes(self, node: Node) -> Sequence[PartialShape]:
        """Return the shapes of the outputs of a node, in order.

        Raises:
            OpError: an input is missing, or the node contradicts the definition of the op.
        """
        for formal in self.schema.inputs:
            required = formal.option == defs.OpSchema.FormalParameterOption.Single
            if required and formal.name not in node.shapes:
                raise OpError(f"{self.name} lacks the input {formal.name}.")
        return self.infer(node)

    def element_type(self, formal: str, attributes: Attributes) -> str:
        """Return ``ACTIVATION``, or NumPy's name of the fixed type of an input or output.

        Args:
            formal: its formal name.
            attributes: of the node.
        """
        kind = next(
            p.type_str for p in (*self.schema.inputs, *self.schema.outputs) if p.name == formal
        )
        constraints = {c.type_param_str: c for c in self.schema.type_constraints}
        allowed = constraints[kind].allowed_type_strs if kind in constraints else [kind]
        if kind in self.float32(attributes):
            return "float32"
        if "tensor(float16)" in allowed:
            return ACTIVATION
        name = str(allowed[0]).removeprefix("tensor(").removesuffix(")")
        return "float32" if name == "float" else name


@dataclass(frozen=True)
class Node:
    """One occurrence of an op: its attributes and the shapes of its inputs.

    Attributes:
        op_type: operator type in the linexport domain.
        attributes: those of the op's schema, as Python values.
        inputs: formal input names in order, "" where the node leaves one out.
        shapes: by formal input name; absent inputs are absent here.
        annotations: attributes beyond the schema, by which a target tells a runtime how to run the
            node; they mean nothing for what it computes.
        given: number of inputs it has, those left out in between counted; None for all of the op's.
        types: element types as ONNX numbers them, by formal input name, as far as they are known.
    """

    op_type: str
    attributes: Attributes
    inputs: tuple[str, ...]
    shapes: Mapping[str, PartialShape]
    annotations: Attributes = field(default_factory=dict)
    given: int | None = None
    types: Mapping[str, int] = field(default_factory=dict)


def read_node(
    node: onnx.NodeProto,
    op: Op,
    shapes: Mapping[str, PartialShape],
    types: Mapping[str, int] | None = None,
) -> Node:
    """View a NodeProto through its schema.

    Args:
        node: of the graph.
        op: its declaration.
        shapes: by value name in the graph.
        types: element types by value name, as far as they are known.

    Raises:
        OpError: an input has no known shape, or there are more inputs than the op has.
    """
    formal, actual = op.input_names, list(node.input)
    if len(actual) > len(formal):
        raise OpError(f"{op.name} {node.name!r} has {len(actual)} inputs; expected {len(formal)}.")
    actual += [""] * (len(formal) - len(actual))
    values = {a.name: attribute_value(a) for a in node.attribute}
    for position in values.get(ABSENT, ()):
        actual[position] = ""
    known: dict[str, PartialShape] = {}
    for name, value in zip(formal, actual, strict=True):
        if value and value not in shapes:
            raise OpError(f"{op.name} {node.name!r}: the shape of its input {name} is unknown.")
        if value:
            known[name] = shapes[value]
    own = {name: value for name, value in values.items() if name in op.schema.attributes}
    present = tuple(n if v else "" for n, v in zip(formal, actual, strict=True))
    beyond = {name: value for name, value in values.items() if name not in own}
    kinds = {n: types[v] for n, v in zip(formal, actual, strict=True) if types and v in types}
    return Node(op.name, own, present, known, beyond, len(node.input), kinds)


def function_for(node: Node, op: Op, lowering: Lowering) -> onnx.FunctionProto:
    """Return the model-local function for a node. Equal bodies get equal overload names.

    Raises:
        OpError: from the op's own checks.
    """
    op.shapes(node)
    body, values = lowering(node)
    outputs = dict(zip(op.output_names, values, strict=True))
    # No more than the node gives: some runtimes want every input that a function declares.
    declared = node.inputs[: node.given]
    formal = [name or f"absent_{i}" for i, name in enumerate(declared)]
    attributes = [*node.attributes, *node.annotations]
    function = body.function(DOMAIN, op.name, formal, outputs, attributes=attributes)
    name_overload(function)
    return function


def name_overload(function: onnx.FunctionProto) -> None:
    """Name the overload of a function by its content, in place."""
    function.ClearField("overload")
    content = function.SerializeToString(deterministic=True)
    function.overload = hashlib.sha256(content).hexdigest()[:8]


def parameter(
    name: str, types: str, description: str, kind: str = "Single"
) -> defs.OpSchema.FormalParameter:
    """Return a formal input or output; ``kind`` is Single or Optional."""
    option = getattr(defs.OpSchema.FormalParameterOption, kind)
    return defs.OpSchema.FormalParameter(name, types, description, param_option=option)


def attribute_value(attribute: onnx.AttributeProto) -> Any:
    """Return an attribute as a Python value; text as str."""
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value


FLOATING = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
"""Types of activations."""


def activations(*names: str) -> list[tuple[str, Sequence[str], str]]:
    """Return type constraints for activations (T) and, if named, float32 states (S)."""
    both = {
        "T": ("T", FLOATING, "Activations."),
        "S": ("S", ["tensor(float)"], "States are kept in float32."),
    }
    return [both[name] for name in names]
