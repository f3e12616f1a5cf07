"""Write ONNX function bodies as Python expressions.

    b = Body()
    y = b.Add(x, b.const([1.0]))          # one output: a name
    a, c = b.Split(x, outputs=2, axis=-1)  # several: a tuple of names
    function = b.function("linexport", "Twice", ["x"], {"y": y})

Every call appends one node; every value is its name. Nothing is evaluated here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

OPSET = 18
"""Lowest standard operator set that function bodies need. They use operators in ways that later
sets did not change, so a body may be declared at the set of the model it is attached to."""

MICROSOFT = "com.microsoft"
"""Domain of ONNX Runtime's own operators, always at version 1."""


def import_microsoft(model: onnx.ModelProto) -> None:
    """Let a model have ONNX Runtime's own operators."""
    if all(opset.domain != MICROSOFT for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))


class Body:
    """Nodes of one function body, or of one subgraph inside it.

    Args:
        parent: the body this one is nested in (a Scan's), so that names stay unique.
    """

    def __init__(self, parent: Body | None = None) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._names: list[int] = parent._names if parent else [0]

    def fresh(self, hint: str) -> str:
        """A value name not used before in this body or the ones around it."""
        self._names[0] += 1
        return f"{hint}_{self._names[0]}"

    def node(
        self, op_type: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any
    ) -> Any:
        """Append a node; returns its output name, or a tuple of names if there are several."""
        names = [self.fresh(op_type.lower()) for _ in range(outputs)]
        self.nodes.append(
            helper.make_node(op_type, list(inputs), names, domain=domain, **attributes)
        )
        return names[0] if outputs == 1 else tuple(names)

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)
        return lambda *inputs, **kwargs: self.node(op_type, *inputs, **kwargs)

    def const(self, value: Any, dtype: Any = None) -> str:
        """A Constant: floats become float32 and integers int64 unless ``dtype`` says otherwise."""
        array = np.asarray(value)
        if dtype is None:
            dtype = np.float32 if array.dtype.kind == "f" else array.dtype
        return str(self.Constant(value=numpy_helper.from_array(array.astype(dtype))))

    def subgraph(
        self, name: str, inputs: Sequence[str | onnx.ValueInfoProto], outputs: Sequence[str]
    ) -> onnx.GraphProto:
        """This body as that of a Scan, Loop or If; inputs given by name are untyped."""
        empty = onnx.TypeProto()
        return helper.make_graph(
            self.nodes,
            name,
            [helper.make_value_info(n, empty) if isinstance(n, str) else n for n in inputs],
            [helper.make_value_info(n, empty) for n in outputs],
        )

    def function(
        self,
        domain: str,
        name: str,
        inputs: Sequence[str],
        outputs: Mapping[str, str],
        overload: str = "",
        attributes: Sequence[str] = (),
    ) -> onnx.FunctionProto:
        """This body as a model-local function; ``outputs`` maps formal names to values.

        A value that is an output gets its formal name where it is made: where more of the body
        reads it, an Identity behind it would be a copy of all of it.
        """
        made = {name for node in self.nodes for name in node.output}
        renamed: dict[str, str] = {}
        for formal, value in outputs.items():
            if value in made and value not in renamed:
                renamed[value] = formal
            else:
                same = renamed.get(value, value)
                self.nodes.append(helper.make_node("Identity", [same], [formal]))
        _rename(self.nodes, renamed)
        opsets = [helper.make_opsetid("", OPSET)]
        if _uses(self.nodes, MICROSOFT):
            opsets.append(helper.make_opsetid(MICROSOFT, 1))
        return helper.make_function(
            domain,
            name,
            list(inputs),
            list(outputs),
            self.nodes,
            opsets,
            list(attributes),
            overload=overload,
        )


def ceil_div(b: Body, numerator: str, denominator: str | int) -> str:
    """Append the least integer not below a quotient of integers, the numerator 0 or more."""
    by = b.const([denominator]) if isinstance(denominator, int) else denominator
    return str(b.Div(b.Sub(b.Add(numerator, by), b.const([1])), by))


def _rename(nodes: Iterable[onnx.NodeProto], renamed: Mapping[str, str]) -> None:
    """Give values other names, in place, where nodes and subgraphs make or read them."""
    for node in nodes:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(attribute.g.node, renamed)


def _uses(nodes: Iterable[onnx.NodeProto], domain: str) -> bool:
    """A node, or one in a subgraph of it, is of the domain."""
    return any(
        n.domain == domain or any(_uses(a.g.node, domain) for a in n.attribute if a.HasField("g"))
        for n in nodes
    )
