"""Complex tensors of an exported program -> pairs of real ones, for which ONNX has operators.

    z = x * torch.exp(a + b i)       ->       re = x e^a cos b,   im = x e^a sin b

Every complex node becomes two real ones, or one where the other part is zero; complex weights
become two. What a real graph has of it is then the graph of the same model written in pairs, which
passes know. Transforms that torch.onnx translates stay as they are, see ``transforms``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch.export import ExportedProgram
from torch.export.graph_signature import TensorArgument
from torch.fx import Node

from linexport.errors import LinexportError, UnsupportedModelError
from linexport.system.torch_internals.exports import (
    decompositions,
    translations_read_once,
    work_left_out,
)
from linexport.trace.decompositions.complex_pairs import arithmetic, layout, products, transforms
from linexport.trace.decompositions.complex_pairs.weights import Weights
from linexport.trace.decompositions.complex_pairs.writer import (
    ComplexPair,
    PairWriter,
    Rules,
    is_complex,
    opname,
    value_of,
)
from linexport.trace.exporter_state import exporting
from linexport.trace.messages import COMPLEX, error_summary
from linexport.trace.metadata import last_frame

__all__ = ["with_pairs"]

RULES: Rules = {**arithmetic.RULES, **layout.RULES, **products.RULES, **transforms.RULES}

CHECKS = ("_assert_tensor_metadata",)
"""Checks of torch while it traces."""

TAKEN = (
    "ONNX Runtime takes no complex numbers: let the model take torch.view_as_real(x), with an axis "
    "of 2 at the end, and begin with torch.view_as_complex."
)

GIVEN = (
    "ONNX Runtime gives no complex numbers: return torch.view_as_real(y), with an axis of 2 at the "
    "end, or y.real and y.imag."
)


def with_pairs(
    program: ExportedProgram, opset: int, translated: Collection[object]
) -> ExportedProgram:
    """Return a program without complex numbers besides those that torch.onnx translates.

    Args:
        program: of any numbers.
        opset: it is to be translated to.
        translated: operators that are translated besides those of torch.onnx.

    Raises:
        UnsupportedModelError: an input or an output is complex, or an operator of complex numbers
            has no rule.
    """
    if not any(map(_is_written, program.graph.nodes)):
        return program
    _check_ends(program)
    decomposed = _decomposed(program, opset, translated)
    kept = transforms.left_to_torch(decomposed.graph)
    nodes = [node for node in decomposed.graph.nodes if _is_written(node) and node not in kept]
    return _rewritten(decomposed, nodes) if nodes else program


def _check_ends(program: ExportedProgram) -> None:
    """Check that inputs and outputs are real."""
    taken = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in taken and is_complex(node):
            raise _refused(f"The input {node.name} is complex", node, TAKEN)
        if node.op == "output" and _is_written(node):
            raise _refused("The model gives complex numbers", node, GIVEN)


def _is_written(node: Node) -> bool:
    return is_complex(node) or any(map(is_complex, node.all_input_nodes))


def _decomposed(
    program: ExportedProgram, opset: int, translated: Collection[object]
) -> ExportedProgram:
    """Return a program in the operators that torch.onnx translates, as far as it has them."""
    with exporting(), translations_read_once(), work_left_out():
        return program.run_decompositions(decompositions(opset, translated))


def _rewritten(program: ExportedProgram, nodes: Sequence[Node]) -> ExportedProgram:
    """Return a program with pairs in the place of some nodes."""
    graph, w, weights = program.graph, PairWriter(program.graph), Weights(program)
    chosen = set(nodes)
    for node in list(graph.nodes):
        if node not in chosen:
            w.note(node)
        elif node.op == "placeholder":
            weights.split(w, node)
        else:
            _write(w, node)
    for node in reversed(nodes):
        graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    outputs = next(node for node in graph.nodes if node.op == "output").args[0]
    return weights.program_of(
        [
            replace(spec, arg=TensorArgument(x.name)) if isinstance(x, Node) else spec
            for spec, x in zip(program.graph_signature.output_specs, outputs, strict=True)
        ]
    )


def _write(w: PairWriter, node: Node) -> None:
    """Write a node in real numbers."""
    name = opname(node)
    if name in CHECKS:
        return
    rule = RULES.get(name)
    if rule is None:
        raise _refused(f"{node.target} of complex numbers has no translation", node, COMPLEX)
    w.begin(node)
    try:
        found, value = rule(w, node), value_of(node)
    except LinexportError:
        raise
    except Exception as error:
        what = f"{node.target} of complex numbers is not written in pairs: {error_summary(error)}"
        raise _refused(what, node, COMPLEX) from error
    several = isinstance(value, list | tuple)
    if is_complex(node):
        assert isinstance(found, ComplexPair)
        w.pairs[node] = found if several else w.fitted(found, value.shape)
        return
    part = found.re if isinstance(found, ComplexPair) else found
    node.replace_all_uses_with(w.whole(part, value.shape) if isinstance(part, float) else part)


def _refused(what: str, node: Node, advice: str) -> UnsupportedModelError:
    frame = last_frame(node.meta.get("stack_trace") or "")
    line = f"\nAt {frame['path']}:{frame['line']}: {frame['code'].strip()}" if frame else ""
    return UnsupportedModelError(f"{what}.\n{advice}{line}")
