"""All ops of the domain, found by scanning this package, and their functions put into a model."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache

import onnx
from onnx import defs, helper

from linexport.errors import OpError
from linexport.plugins import ops
from linexport.plugins.ops.body import OPSET
from linexport.plugins.ops.op import DOMAIN, VERSION, Lowering, Node, Op, describe, function_for
from linexport.plugins.ops.shapes import Dim


@cache
def all_ops() -> Mapping[str, Op]:
    """Every op by name: each module of this package that defines ``OP`` is one."""
    found = {}
    for module in pkgutil.iter_modules(ops.__path__):
        op = getattr(importlib.import_module(f"{ops.__name__}.{module.name}"), "OP", None)
        if isinstance(op, Op):
            found[op.name] = op
    return found


def register_schemas() -> None:
    """Tell onnx about the ops, so that its checker and its exporters accept nodes of them."""
    # Its import tabulates all schemas and refuses one name in two domains: let it come first.
    importlib.import_module("onnx.reference")
    for op in all_ops().values():
        if not defs.has(op.name, DOMAIN):
            defs.register_schema(op.schema)


def linexport_nodes(model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, Op, Node]]:
    """Every linexport node of the main graph with its op and its checked view.

    Raises:
        OpError: an unknown op, or one whose attributes or shapes are wrong.
    """
    shapes = known_shapes(model)
    for node in model.graph.node:
        if node.domain == DOMAIN and node.op_type in all_ops():
            op = all_ops()[node.op_type]
            view = describe(node, op, shapes)
            op.check(view)
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
            shapes[info.name] = tuple(map(dim, info.type.tensor_type.shape.dim))
    return shapes


def dim(size: onnx.TensorShapeProto.Dimension) -> Dim:
    """A size of a tensor type: an int, a symbol, or None."""
    if size.HasField("dim_value"):
        return int(size.dim_value)
    return size.dim_param or None
