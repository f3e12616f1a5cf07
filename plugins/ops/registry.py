"""All ops of the domain, their schemas in onnx, and their functions put into a model.

To add an op is to add one file. It defines ``OP``, an ``Op``, whose attributes are documented in
``plugins.ops.op``; the smallest op to copy from is ``causal_conv``:

1.  Write the definition into the module's docstring, and as ``oracle`` in float64.
2.  Write the shape rule ``infer``, of the comparisons in ``plugins.ops.shapes``; then the ONNX
    schema and the PyTorch schema, which use the same names.
3.  Write it in PyTorch (``eager``) and in standard ONNX operators (``portable``).
4.  Say where tokens are (``token_axis``, ``causal``) and which inputs continue which outputs
    (``states``), and the op streams.

Inside linexport the file lies in ``plugins/ops``. Any other package declares it as an entry point:

    [project.entry-points."linexport.ops"]
    leaky_sum = "my_package.leaky_sum:OP"

Models call it by ``linexport.models.torch_ops.call(OP, ...)``. Nothing else names it: tracing,
passes, targets and reports read the declaration.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import onnx
from onnx import defs, helper

from linexport.errors import OpError
from linexport.plugins import ops
from linexport.plugins.ops.body import OPSET
from linexport.plugins.ops.op import (
    ACTIVATION,
    DOMAIN,
    VERSION,
    Lowering,
    Node,
    Op,
    attribute_value,
    function_for,
    read_node,
)
from linexport.plugins.ops.shapes import Dim
from linexport.system.extensions import find_entry_points, load_entry_point, unusable

GROUP = "linexport.ops"
"""Entry points by which other packages add ops."""


@cache
def own_ops() -> Mapping[str, Op]:
    """Return the ops of linexport by name: ``OP`` of the modules of this package."""
    found = {}
    for module in pkgutil.iter_modules(ops.__path__):
        op = getattr(importlib.import_module(f"{ops.__name__}.{module.name}"), "OP", None)
        if isinstance(op, Op):
            found[op.name] = op
    return found


@cache
def all_ops() -> Mapping[str, Op]:
    """Return every op by name: those of linexport, then those of other packages.

    Raises:
        EnvironmentProblemError: another package's op cannot be loaded, or has a name, in ONNX or in
            PyTorch, that is taken.
    """
    found = dict(own_ops())
    for point in find_entry_points(GROUP):
        op = load_entry_point(point, Op)
        if found.setdefault(op.name, op) is not op:
            raise unusable(point, f"declares the op {op.name}, which there is already")
        if any(other.torch_name == op.torch_name for other in found.values() if other is not op):
            reason = f"declares the PyTorch operator {op.torch_name}, which there is already"
            raise unusable(point, reason)
    return found


def register_schemas() -> None:
    """Tell onnx about the ops, so that its checker and its exporters accept nodes of them."""
    # Its import tabulates all schemas and refuses one name in two domains: let it come first.
    importlib.import_module("onnx.reference")
    for op in all_ops().values():
        if not defs.has(op.name, DOMAIN):
            register_schema(op, op.schema)


def register_schema(op: Op, schema: defs.OpSchema) -> None:
    """Register ``schema`` with onnx, shape inference being the shape rule of the op."""
    schema.set_type_and_shape_inference_function(partial(_infer, op))
    defs.register_schema(schema)


def _infer(op: Op, context: Any) -> None:
    """Set types and shapes of the outputs, where all inputs have a shape.

    Raises:
        onnx.shape_inference.InferenceError: the node contradicts the definition of the op.
    """
    given = {
        name: context.get_input_type(i)
        for i, name in enumerate(op.input_names[: context.get_num_inputs()])
        if context.has_input(i)
    }
    if not all(t is not None and t.tensor_type.HasField("shape") for t in given.values()):
        return
    found = ((name, context.get_attribute(name)) for name in op.schema.attributes)
    attributes = {name: attribute_value(value) for name, value in found if value is not None}
    shapes = {n: tuple(map(dim_of, t.tensor_type.shape.dim)) for n, t in given.items()}
    present = tuple(name if name in given else "" for name in op.input_names)
    try:
        outputs = op.shapes(Node(op.name, attributes, present, shapes))
    except OpError as error:
        raise onnx.shape_inference.InferenceError(str(error)) from error
    activation = next(iter(given.values())).tensor_type.elem_type
    for i, (name, shape) in enumerate(zip(op.output_names, outputs, strict=True)):
        if i < context.get_num_outputs():
            element = op.element_type(name, attributes)
            fixed = activation
            if element != ACTIVATION:
                fixed = helper.np_dtype_to_tensor_dtype(np.dtype(element))
            context.set_output_type(i, helper.make_tensor_type_proto(fixed, shape))


def linexport_nodes(
    model: onnx.ModelProto, checked: bool = True
) -> Iterator[tuple[onnx.NodeProto, Op, Node]]:
    """Every linexport node of the main graph with its op and its view.

    Args:
        model: with shapes of its values.
        checked: by the shape rule of the op, which needs PyTorch where a node names a map.

    Raises:
        OpError: an unknown op, or one whose attributes or shapes are wrong.
    """
    shapes, types = known_shapes(model), known_types(model)
    for node in model.graph.node:
        if node.domain == DOMAIN and node.op_type in all_ops():
            op = all_ops()[node.op_type]
            view = read_node(node, op, shapes, types)
            if checked:
                op.shapes(view)
            yield node, op, view


def attach_functions(
    model: onnx.ModelProto,
    choose: Callable[[onnx.NodeProto, Op, Node], Lowering] = lambda node, op, view: op.portable,
) -> None:
    """Give every linexport node a model-local function body, in place.

    ``choose`` picks the lowering of each node; the default is the portable one. Functions of the
    domain that were there before are replaced.

    Raises:
        OpError: see ``linexport_nodes``; or the model's opset is too low.
    """
    standard = next((o.version for o in model.opset_import if not o.domain), OPSET)
    if standard < OPSET:
        raise OpError(f"The model has opset {standard}; linexport ops need at least {OPSET}.")
    functions = {}
    for node in model.graph.node:
        while node.domain == DOMAIN and node.input and not node.input[-1]:
            node.input.pop()
    for node, op, view in linexport_nodes(model):
        function = function_for(view, op, choose(node, op, view))
        function.opset_import[0].version = standard
        node.overload = function.overload
        # ONNX Runtime wants the outputs a node does not use spelled out.
        node.output.extend([""] * (len(op.schema.outputs) - len(node.output)))
        functions[op.name, function.overload] = function
    kept = [f for f in model.functions if f.domain != DOMAIN]
    del model.functions[:]
    model.functions.extend([*kept, *functions.values()])
    imports = {o.domain: o.version for o in model.opset_import}
    needed = {o.domain: o.version for f in functions.values() for o in f.opset_import if o.domain}
    for domain, version in {**needed, **({DOMAIN: VERSION} if functions else {})}.items():
        if domain not in imports:
            model.opset_import.append(helper.make_opsetid(domain, version))
    # Overloads of model-local functions came with IR version 10.
    model.ir_version = max(model.ir_version, 10)


def known_shapes(model: onnx.ModelProto) -> dict[str, tuple[Dim, ...]]:
    """Shapes by value name, as far as the file states them: inputs, values and initializers."""
    graph = model.graph
    shapes: dict[str, tuple[Dim, ...]] = {t.name: tuple(t.dims) for t in graph.initializer}
    for info in [*graph.input, *graph.value_info, *graph.output]:
        if info.type.tensor_type.HasField("shape"):
            shapes[info.name] = tuple(map(dim_of, info.type.tensor_type.shape.dim))
    return shapes


def known_types(model: onnx.ModelProto) -> dict[str, int]:
    """Element types by value name, as far as the file states them."""
    graph = model.graph
    types = {t.name: t.data_type for t in graph.initializer}
    for info in [*graph.input, *graph.value_info, *graph.output]:
        if info.type.tensor_type.elem_type:
            types[info.name] = info.type.tensor_type.elem_type
    return types


def dim_of(size: onnx.TensorShapeProto.Dimension) -> Dim:
    """A size of a tensor type: an int, a symbol, or None."""
    if size.HasField("dim_value"):
        return int(size.dim_value)
    return size.dim_param or None
