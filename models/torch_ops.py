"""The linexport ops as PyTorch operators: what a traced graph records.

    torch.ops.linexport.<name of torch_schema>(...)  computes what  op.eager(...)  computes

They exist to be traced and exported; ``call`` is what models use. Importing this module registers
the ops of linexport; those of other packages, which may import it, are registered when they are
first called while a model is traced, or by ``register_all``. Each is read from its declaration
(``linexport.plugins.ops``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from linexport.errors import OpError
from linexport.plugins.ops.op import ACTIVATION, DOMAIN, Node, Op
from linexport.plugins.ops.registry import all_ops, own_ops
from linexport.system.torch_internals.operators import Overload, arguments, schema

library = torch.library.Library(DOMAIN, "DEF")


def call(op: Op, *args: object, **kwargs: object) -> Any:
    """Run an op on the arguments of its ``torch_schema``.

    While ``torch.export`` traces, the call is recorded whole; anywhere else it is ``op.eager``.

    Raises:
        OpError: attributes or shapes that contradict the op.
    """
    return (overload(op) if torch.compiler.is_exporting() else op.eager)(*args, **kwargs)


@cache
def overload(op: Op) -> Overload:
    """Return the PyTorch operator of an op, registered on first use.

    Raises:
        OpError: PyTorch cannot read its torch_schema, or that names what its ONNX schema does not
            have.
    """
    try:
        name = library.define(op.torch_schema)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise OpError(f"{op.name}: PyTorch cannot read its torch_schema: {reason}") from error
    found: Overload = getattr(torch.ops.linexport, name).default
    known = {*op.input_names, *op.schema.attributes}
    for argument in schema(found).arguments:
        if argument.name not in known and str(argument.type) != "List[Tensor]":
            raise OpError(
                f"{op.name}: torch_schema has the argument {argument.name!r}, which is neither an "
                "input nor an attribute of its ONNX schema."
            )
    library.impl(name, partial(_run, op), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{DOMAIN}::{name}", partial(_fake, op), lib=library)
    return found


def register_all() -> None:
    """Register the operators of all ops, those of other packages included.

    Raises:
        EnvironmentProblemError: see ``all_ops``.
    """
    for op in all_ops().values():
        overload(op)


def by_name(
    op: Op, args: Iterable[object], kwargs: Mapping[str, object]
) -> tuple[dict[str, Any], ...]:
    """Split the arguments of a call into inputs and attributes, each by its ONNX name.

    A list of tensors takes the formal inputs that ``torch_schema`` does not name, in order. Inputs
    that are None are left out.
    """
    given = arguments(overload(op), tuple(args), kwargs)
    inputs, attributes = {}, {}
    unnamed = (name for name in op.input_names if name not in given)
    for name, value in given.items():
        if name in op.input_names:
            inputs[name] = value
        elif isinstance(value, list | tuple):
            inputs |= dict(zip(unnamed, value, strict=False))
        else:
            attributes[name] = int(value) if isinstance(value, bool) else value
    return {name: value for name, value in inputs.items() if value is not None}, attributes


def _run(op: Op, *args: object, **kwargs: object) -> Any:
    """``op.eager``, with contiguous outputs none of which is a view: operators return no views."""
    found = op.eager(*args, **kwargs)
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    taken = {x.untyped_storage().data_ptr() for x in tensors}
    outputs = []
    for output in (found,) if isinstance(found, Tensor) else found:
        own = output.contiguous()
        place = own.untyped_storage().data_ptr()
        outputs.append(own.clone() if place in taken else own)
        taken.add(place)
    return outputs[0] if isinstance(found, Tensor) else tuple(outputs)


def _fake(op: Op, *args: object, **kwargs: object) -> Any:
    """Outputs without values, of the shapes and types that the declaration gives."""
    inputs, attributes = by_name(op, args, kwargs)
    shapes = {name: tuple(value.shape) for name, value in inputs.items()}
    present = tuple(name if name in inputs else "" for name in op.input_names)
    found = op.shapes(Node(op.name, attributes, present, shapes))
    first = next(iter(inputs.values()))
    outputs = tuple(
        first.new_empty(shape, dtype=_dtype(op.element_type(name, attributes), first.dtype))
        for name, shape in zip(op.output_names, found, strict=True)
    )
    return outputs if len(outputs) > 1 else outputs[0]


def _dtype(element: str, activation: torch.dtype) -> torch.dtype:
    """Return the PyTorch dtype of an ONNX element type: at least float32 for "float32"."""
    if element == ACTIVATION:
        return activation
    if element == "float32":
        return torch.promote_types(activation, torch.float32)
    found: torch.dtype = getattr(torch, element)
    return found


for _op in own_ops().values():
    overload(_op)
