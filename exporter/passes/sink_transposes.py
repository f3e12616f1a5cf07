"""f(Transpose(x)) -> Transpose(f(x)), where that leaves fewer: Mamba's channels before tokens.

    Split(Transpose(x), axis)                Transpose(Split(x, perm[axis])), of each output
    Sigmoid(Transpose(x))                    Transpose(Sigmoid(x))
    Mul(Transpose(x), Transpose(y))          Transpose(Mul(x, y))
    MatMul(W, Transpose(x))                  Transpose(MatMul(x, W^T))

A region is what such nodes compute from Transposes of one permutation. Those that it begins with
go, and so do those behind it that undo them; what others read of it gets one of its own. A product
whose weights become its second factor is one that runtimes prepare and quantise, as every other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.contract import Pass, PassResult
from linexport.graph.edit import is_output, replace_all_uses_with
from linexport.graph.operators import ELEMENTWISE
from linexport.graph.tensors import computed_value, constant_values

log = logging.getLogger(__name__)

LAST_TWO = [0, 2, 1]
"""Permutation that a product can take the place of."""


@dataclass
class TransposedRegion:
    """Nodes that compute the same from what Transposes of one permutation read.

    Attributes:
        perm: the permutation.
        order: places of the graph's own nodes, by identity: those of bodies are not among them.
        sources: the Transposes, by the identity of what they compute.
        nodes: the others, in the order of evaluation.
    """

    perm: list[int]
    order: Mapping[int, int]
    sources: dict[int, gs.Node] = field(default_factory=dict)
    nodes: list[gs.Node] = field(default_factory=list)

    def tensors(self) -> Iterator[gs.Tensor]:
        """Yield all that is computed here."""
        for node in (*self.sources.values(), *self.nodes):
            yield from node.outputs

    def undoes(self, graph: gs.Graph, node: gs.Node) -> bool:
        """Return whether a node is the inverse Transpose, and no output of the graph."""
        perm = node.attrs.get("perm") if node.op == "Transpose" else None
        if perm is None or id(node) not in self.order or is_output(graph, node.outputs[0]):
            return False
        return [self.perm[axis] for axis in perm] == sorted(perm)

    def leaves(self, graph: gs.Graph, tensor: gs.Tensor) -> bool:
        """Return whether a tensor is read in this layout outside of the region."""
        inside = {id(node) for node in self.nodes}
        others = (n for n in tensor.outputs if id(n) not in inside and not self.undoes(graph, n))
        return is_output(graph, tensor) or next(others, None) is not None


def run(graph: gs.Graph) -> PassResult:
    """Sink the Transposes of one region after another, until none is worth it."""
    modified = False
    graph.toposort()
    tried: set[int] = set()
    for node in list(graph.nodes):
        if (
            node.op != "Transpose"
            or not node.inputs
            or id(node) in tried
            or "perm" not in node.attrs
        ):
            continue
        region = _region(graph, node)
        tried |= {id(source) for source in region.sources.values()}
        before, after = _transposes(graph, region)
        if after < before and not _reads_itself(region):
            log.info(
                "sinking %r through %d nodes: %d Transposes to %d",
                node.name,
                len(region.nodes),
                before,
                after,
            )
            _sink(graph, region)
            modified = True
    if modified:
        graph.cleanup().toposort()
    return PassResult(modified)


def _region(graph: gs.Graph, first: gs.Node) -> TransposedRegion:
    """Return all that the nodes around a Transpose compute in its layout."""
    order = {id(node): place for place, node in enumerate(graph.nodes)}
    region = TransposedRegion(list(first.attrs["perm"]), order, {id(first.outputs[0]): first})
    while grown := [n for n in _next(region) if _follows(region, n)]:
        for node in grown:
            for tensor in node.inputs:
                source = tensor.inputs[0] if tensor.inputs else None
                if source is not None and source.op == "Transpose":
                    region.sources[id(tensor)] = source
        region.nodes += grown
    region.nodes.sort(key=lambda node: order[id(node)])
    return region


def _next(region: TransposedRegion) -> list[gs.Node]:
    """Return the nodes that read a region and are not part of it."""
    inside = {id(node) for node in region.nodes}
    readers = {id(n): n for tensor in region.tensors() for n in tensor.outputs}
    return [n for key, n in readers.items() if key not in inside]


def _follows(region: TransposedRegion, node: gs.Node) -> bool:
    """Return whether a node computes the same in another layout of its inputs."""
    if node.domain or id(node) not in region.order:
        return False
    if node.op == "Split":
        return _inside(region, node.inputs[0])
    if node.op == "MatMul":
        return _is_product(region, node)
    return node.op in ELEMENTWISE and all(
        _is_number(t) or _inside(region, t) or _starts(region, t) for t in node.inputs
    )


def _is_product(region: TransposedRegion, node: gs.Node) -> bool:
    weights, x = node.inputs
    own = isinstance(weights, gs.Constant) and len(weights.shape) == 2 and len(weights.outputs) == 1
    return own and region.perm == LAST_TWO and _inside(region, x)


def _inside(region: TransposedRegion, tensor: gs.Tensor) -> bool:
    return any(tensor is own for own in region.tensors())


def _starts(region: TransposedRegion, tensor: gs.Tensor) -> bool:
    """Return whether a tensor is another Transpose by the permutation of a region."""
    node = tensor.inputs[0] if tensor.inputs else None
    return node is not None and node.op == "Transpose" and node.attrs.get("perm") == region.perm


def _is_number(tensor: gs.Tensor) -> bool:
    return isinstance(tensor, gs.Constant) and list(tensor.shape) in ([], [1])


def _reads_itself(region: TransposedRegion) -> bool:
    """Return whether a Transpose that a region begins with turns what the region computes."""
    return any(_inside(region, source.inputs[0]) for source in region.sources.values())


def _transposes(graph: gs.Graph, region: TransposedRegion) -> tuple[int, int]:
    """Return how many Transposes there are around a region, and would be."""
    kept = sum(region.leaves(graph, tensor) for tensor in region.tensors())
    undone = {id(n) for t in region.tensors() for n in t.outputs if region.undoes(graph, n)}
    return len(region.sources) + len(undone), kept


def _sink(graph: gs.Graph, region: TransposedRegion) -> None:
    """Compute a region in the layout of its sources, and transpose what leaves it."""
    moved = {key: source.inputs[0] for key, source in region.sources.items()}
    for node in region.nodes:
        made = _moved(region, node, moved)
        graph.nodes.append(made)
        moved |= {id(old): new for old, new in zip(node.outputs, made.outputs, strict=True)}
    for tensor in list(region.tensors()):
        for reader in [n for n in tensor.outputs if region.undoes(graph, n)]:
            replace_all_uses_with(reader, [moved[id(tensor)]])
        if id(tensor) not in region.sources and region.leaves(graph, tensor):
            _transpose(graph, region, computed_value(tensor), moved[id(tensor)])
    for node in region.nodes:
        node.inputs.clear()


def _moved(region: TransposedRegion, node: gs.Node, moved: dict[int, gs.Tensor]) -> gs.Node:
    """Return a node of a region on what its inputs were transposed from."""
    inputs = [moved.get(id(tensor), tensor) for tensor in node.inputs]
    attrs = dict(node.attrs)
    if node.op == "Split":
        attrs["axis"] = region.perm[attrs.get("axis", 0)]
    if node.op == "MatMul":
        weights, values = node.inputs[0], constant_values(node.inputs[0])
        assert values is not None  # the region has products with weights alone
        turned = np.ascontiguousarray(values.T)
        inputs = [inputs[1], gs.Constant(f"{weights.name}/{node.name}/transposed", turned)]
    outputs = [
        gs.Variable(f"{t.name}/sunk", t.dtype, _shape(region, t.shape)) for t in node.outputs
    ]
    return gs.Node(node.op, node.name or outputs[0].name, attrs, inputs, outputs)


def _shape(region: TransposedRegion, shape: Sequence[int | str] | None) -> list[int | str] | None:
    """Return the shape of what a tensor is the Transpose of."""
    return None if shape is None else [shape[region.perm.index(axis)] for axis in range(len(shape))]


def _transpose(
    graph: gs.Graph, region: TransposedRegion, tensor: gs.Variable, source: gs.Tensor
) -> None:
    """Compute a tensor of a region as the Transpose of its counterpart."""
    tensor.inputs.clear()
    graph.nodes.append(
        gs.Node("Transpose", f"{tensor.name}/turned", {"perm": region.perm}, [source], [tensor])
    )


PASS = Pass(
    name="sink_transposes",
    stage="absorb",
    ensures="no Transposes become fewer if those before a region of Splits, elementwise nodes and "
    "products with weights are moved behind it",
    run=run,
)
