"""Parts of a graph run on their own, and the sizes of their inputs as numbers."""

from __future__ import annotations

import ast
import logging
from collections.abc import Mapping, Sequence

import onnx
import onnx_graphsurgeon as gs
import onnxruntime

from linexport.graph.log_sums import with_scans
from linexport.graph.monomials import Size
from linexport.graph.retyped import BFLOAT16, HALF, retyped
from linexport.plugins.ops.registry import attach_functions

log = logging.getLogger(__name__)


class NotRunnableError(Exception):
    """Nodes cannot be run on their own; the text says why."""


def session(
    inputs: Sequence[gs.Tensor],
    nodes: Sequence[gs.Node],
    result: gs.Tensor,
    imports: Mapping[str, int],
    wide: bool = False,
) -> onnxruntime.InferenceSession:
    """Nodes in ONNX Runtime without optimisations; linexport's have portable bodies.

    Logarithms of sums of exponentials are computed as an artifact computes them, without overflow.

    Args:
        inputs: of the nodes.
        nodes: in order.
        result: what they compute.
        imports: operator sets.
        wide: compute what is in half precision in float32; so are inputs, then.

    Raises:
        NotRunnableError: ONNX Runtime does not open them.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    graph = gs.Graph(
        list(nodes),
        list(inputs),
        [result],
        name="part",
        opset=imports[""],
        import_domains=[onnx.helper.make_opsetid(d, v) for d, v in imports.items()],
        ir_version=10,
    )
    try:
        model = gs.export_onnx(graph, do_type_check=False)
        if wide:
            model = retyped(model, {**HALF, **BFLOAT16})
        if any(node.op == "Log" for node in nodes):
            model = with_scans(model)
        _rename_given(model.graph)
        attach_functions(model)
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        log.info("nodes that ONNX Runtime does not open on their own: %s", error)
        kinds = ", ".join(sorted({node.op for node in nodes}))
        raise NotRunnableError(
            f"its nodes ({kinds}) are not a model by themselves, so that nothing can be compared: "
            "a type or a shape around them is unknown, or an operator is"
        ) from None


def _rename_given(graph: onnx.GraphProto) -> None:
    """Rename outputs that are inputs of the graph too: their nodes have other outputs to run."""
    given = {i.name for i in graph.input}
    for node in graph.node:
        node.output[:] = [f"{name}/computed" if name in given else name for name in node.output]


def symbols_in(size: Size) -> set[str]:
    """The symbols in a size."""
    found: set[str] = set()
    for atom in size.atoms:
        try:
            tree = ast.parse(atom, mode="eval")
        except SyntaxError:
            found.add(atom)
            continue
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        found |= (
            {atom}
            if any(isinstance(n, ast.Subscript | ast.Call | ast.Attribute) for n in ast.walk(tree))
            else names
        )
    return found


def size_value(size: Size, symbols: Mapping[str, int]) -> int:
    """The number a size is, for these values of the symbols."""
    result = size.coefficient
    for atom in size.atoms:
        result *= (
            symbols[atom]
            if atom in symbols
            else _number(ast.parse(atom, mode="eval").body, symbols)
        )
    return result


def _number(node: ast.AST, symbols: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return symbols[name]
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _number(left, symbols), _number(right, symbols)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.FloorDiv() if b:
                    return a // b
                case ast.Mod() if b:
                    return a % b
    raise NotRunnableError("the size of an input is not known")
