"""The nodes around a loop that may be one attention with a state, and the tensors they read.

    q, k, beta, ...  ->  chunks, decays, triangular systems, Scan or Loop  ->  output (.., T, ..)

Behind a loop, the first value that all of its results pass through with a dim of tokens is what the
nodes compute. In front of it, values whose tokens have not been mixed yet are what they read. Only
operators that make polynomials and exponentials of them may be between: such functions are known
from few values, others, with bounds somewhere, are not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from linexport.graph.edit import index_of, is_read, producer
from linexport.graph.monomials import ONE, Size, parse
from linexport.graph.operators import AXES_ONLY, INDEXING, LOOPS, MOVES, PRODUCTS, SUMS, groups
from linexport.graph.run_subgraph import symbols_in
from linexport.graph.scan_body import starts_of
from linexport.match.emit.whole_chunks import is_whole
from linexport.match.forms.evaluate import Evaluator
from linexport.match.roles.subgraph import reads

ANALYTIC = PRODUCTS | SUMS | {"Add", "Sub", "Neg", "Div", "Exp"} | LOOPS
MOVING = MOVES | INDEXING | {"Concat", "Pad", "Trilu", "Where"}
"""Operators that compute polynomials and exponentials of their inputs, and those that move values.
The condition of Where, and indices, must follow from sizes alone."""

FLOATING = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
PROJECTIONS = ("MatMul", "Gemm", "Conv", "Gather")
STEPS = 40
"""Values behind a loop that are tried at most."""


@dataclass(frozen=True)
class Region:
    """Nodes that may be one attention.

    Attributes:
        root: the value that is computed.
        leaves: what it is computed of, each with a dim of tokens.
        tokens: the size of that dim.
        place: of that dim in the root, which may state it as a number of chunks.
    """

    root: gs.Variable
    leaves: tuple[gs.Tensor, ...]
    tokens: Size
    place: int


class Regions:
    """The regions around the loops of a graph."""

    def __init__(self, graph: gs.Graph, evaluator: Evaluator) -> None:
        self.graph, self.evaluator = graph, evaluator
        self.data = {t.name for t in graph.inputs}.difference(evaluator.initial)
        for node in graph.nodes:
            if depends(node, self.data):
                self.data |= {o.name for o in node.outputs}.difference(evaluator.initial)
        self._mixed: dict[str, bool] = {}
        self._behind: set[str] | None = None

    def around(self, loop: gs.Node) -> Iterator[Region]:
        """Yield what may be computed by way of a loop, the nearest first."""
        made = [s for o in loop.outputs for s in self.evaluator.sizes(o) or ()]
        varying = {n for s in made for n in symbols_in(s)}
        given = {s for t in self.graph.inputs for s in t.shape or () if isinstance(s, str)}
        # Of "8*n" a loop over chunks has the size n.
        lengths = [s for s in map(parse, sorted(given)) if symbols_in(s) & varying]
        for root in self.passed(loop):
            own = self.evaluator.sizes(root) or []
            for tokens in lengths:
                places = [i for i, s in enumerate(own) if s == tokens or is_whole(s, str(tokens))]
                for leaves in self._all_leaves(root, tokens, loop) if len(places) == 1 else ():
                    yield Region(root, leaves, tokens, places[0])

    def passed(self, loop: gs.Node) -> Iterator[gs.Variable]:
        """Yield values that everything a loop computes passes through, except its last states."""
        place = index_of(self.graph, loop)
        count = len(starts_of(loop))
        tokens = self._symbols(loop.outputs[count:]) - self._symbols(loop.outputs[:count])
        waiting = {o.name: o for o in loop.outputs if is_read(self.graph, o)}
        waiting = self._without_last(waiting, tokens)
        inside = [loop]
        for _ in range(STEPS):
            # Nothing else is read of the loop: what follows can be replaced from here.
            if len(waiting) == 1:
                yield from waiting.values()
            if any(t is o for t in waiting.values() for o in self.graph.outputs):
                return
            following = self.graph.nodes[place + 1 :]
            node = next((n for n in following if any(t.name in waiting for t in n.inputs)), None)
            if node is None or not self._is_followed(node):
                return
            place = index_of(self.graph, node)
            inside.append(node)
            waiting |= {o.name: o for o in node.outputs if is_read(self.graph, o)}
            done = {id(n) for n in inside}
            waiting = {
                name: t
                for name, t in waiting.items()
                if any(id(n) not in done for n in t.outputs)
                or any(t is o for o in self.graph.outputs)
            }
            waiting = self._without_last(waiting, tokens)

    def _symbols(self, tensors: Iterable[gs.Tensor]) -> set[str]:
        return {n for t in tensors for s in self.evaluator.sizes(t) or () for n in symbols_in(s)}

    def _without_last(
        self, waiting: dict[str, gs.Variable], tokens: set[str]
    ) -> dict[str, gs.Variable]:
        """Return the values of tokens among several: a state behind the last one has no such dim.

        It becomes a state of the fused node, see ``final_states``.
        """
        found = {
            name: t
            for name, t in waiting.items()
            if (sizes := self.evaluator.sizes(t)) is None
            or any(symbols_in(s) & tokens for s in sizes)
        }
        return found or waiting

    def _is_followed(self, node: gs.Node) -> bool:
        """Return whether a node computes what a region may hold."""
        projected = node.op in PROJECTIONS and self._is_projection(node)
        return not projected and is_analytic(node, self.data)

    def _is_projection(self, node: gs.Node) -> bool:
        """Return whether tokens are multiplied with weights, or looked up in them."""
        weights = [self.evaluator.is_weight(t) for t in node.inputs[:2]]
        return weights[0] if node.op == "Gather" else any(weights)

    def _all_leaves(
        self, root: gs.Tensor, tokens: Size, loop: gs.Node
    ) -> Iterator[tuple[gs.Tensor, ...]]:
        """Yield what a value is computed of: rows of all sequences, and the tokens made of them."""
        self._mixed, self._behind = {}, None
        first = self._leaves(root, tokens)
        if first:
            yield first
        self._mixed, self._behind = {}, self._computed_of(loop)
        second = self._leaves(root, tokens)
        if second and second != first:
            yield second

    def _computed_of(self, loop: gs.Node) -> set[str]:
        """Return the names of the values that depend on those of a loop."""
        found = {o.name for o in loop.outputs}
        for node in self.graph.nodes[index_of(self.graph, loop) + 1 :]:
            if depends(node, found):
                found |= {o.name for o in node.outputs}
        return found

    def _leaves(self, root: gs.Tensor, tokens: Size) -> tuple[gs.Tensor, ...] | None:
        """Return what a value is computed of before tokens are mixed."""
        found: dict[str, gs.Tensor] = {}
        waiting, seen = [root], set[str]()
        while waiting:
            tensor = waiting.pop()
            if tensor.name in seen or tensor.name not in self.data:
                continue
            seen.add(tensor.name)
            if not self.mixes(tensor, tokens):
                found[tensor.name] = tensor
                continue
            node = producer(tensor)
            if node is None or not self._is_followed(node):
                return None
            if node.op != "Shape":
                waiting += reads(node)
        return None if root.name in found else self._factors(found, tokens)

    def mixes(self, tensor: gs.Tensor, tokens: Size) -> bool:
        """Return whether a value is computed of more tokens than one, as far as is followed."""
        if tensor.name not in self._mixed:
            self._mixed[tensor.name] = self._compute_mixes(tensor, tokens)
        return self._mixed[tensor.name]

    def _compute_mixes(self, tensor: gs.Tensor, tokens: Size) -> bool:
        node, sizes = producer(tensor), self.evaluator.sizes(tensor)
        if node is None or tensor.name not in self.data:
            return False
        # Projections act on each token alone.
        if node.op in PROJECTIONS and self._is_projection(node):
            return False
        if sizes is None or sizes.count(tokens) != 1 or self._has_more(sizes, tokens):
            return True
        if node.op in (*LOOPS, "CumSum", "Softmax"):
            return True
        if self._behind is not None and self._is_of_rows(node, tokens):
            return tensor.name in self._behind
        if node.domain:
            return False
        return any(self.mixes(t, tokens) for t in reads(node))

    def _is_of_rows(self, node: gs.Node, tokens: Size) -> bool:
        """Return whether tokens were rows before of all sequences, images say."""
        sizes = self.evaluator.sizes(node.inputs[0]) if node.op == "Reshape" else None
        return sizes is not None and tokens not in sizes and self._has_more(sizes, tokens)

    def _has_more(self, sizes: list[Size], tokens: Size) -> bool:
        """Return whether the number of tokens is in another dim as well."""
        return any(s != tokens and symbols_in(s) & symbols_in(tokens) for s in sizes)

    def _factors(self, found: dict[str, gs.Tensor], tokens: Size) -> tuple[gs.Tensor, ...]:
        """Return the leaves, with products by a number for each token factored.

        Keys and values are often multiplied with beta before anything else: leaves k and k * beta
        become k and beta, and v * beta becomes v.
        """
        found = {t.name: t for t in map(self._plain, found.values())}
        for known_first in (True, False):
            for name, tensor in list(found.items()):
                pair = self._product(tensor)
                if pair is None:
                    continue
                vector, number = pair
                known, new = (vector, number) if known_first else (number, vector)
                if known.name in found and known.name != name:
                    del found[name]
                    found[new.name] = new
        return tuple(found.values())

    def _product(self, tensor: gs.Tensor) -> tuple[gs.Tensor, gs.Tensor] | None:
        """Return x and the numbers of a product of vectors and numbers, be they columns or rows."""
        node = producer(tensor, "Mul")
        if node is None or any(isinstance(t, gs.Constant) for t in node.inputs):
            return None
        sizes = [self.evaluator.sizes(t) for t in node.inputs]
        for vector, number in ((0, 1), (1, 0)):
            a, b = ([s for s in sizes[i] or () if s != ONE] for i in (vector, number))
            if len(a) > len(b) > 0:
                return self._plain(node.inputs[vector]), self._plain(node.inputs[number])
        return None

    def _plain(self, tensor: gs.Tensor) -> gs.Tensor:
        """Return a value before its dims were put in order, and some of size 1 added."""
        node = producer(tensor)
        while node is not None and node.op in AXES_ONLY:
            if node.inputs[0].name not in self.data:
                break
            tensor = node.inputs[0]
            node = producer(tensor)
        return tensor


def depends(node: gs.Node, data: Collection[str]) -> bool:
    """Return whether what a node computes depends on the values of some tensors."""
    if node.op in ("Shape", "Size"):
        return False
    read = node.inputs[:1] if node.op == "CastLike" else reads(node)
    return any(t.name in data for t in read)


def is_analytic(node: gs.Node, data: Collection[str]) -> bool:
    """Return whether a node moves values, or makes polynomials and exponentials of them.

    Args:
        node: of the main graph, or of the body of a loop.
        data: names of the values that depend on those of the inputs. All else follows from sizes.
    """
    if not depends(node, data):
        return True
    if node.domain not in (None, "", "ai.onnx") or node.op not in ANALYTIC | MOVING:
        return False
    if node.op == "Cast" and node.attrs["to"] not in FLOATING:
        return False
    # A choice, a shape or a divisor that data decides is not a polynomial or an exponential of it.
    if any(node.inputs[place].name in data for place in _held(node)):
        return False
    bodies = [a for a in node.attrs.values() if isinstance(a, gs.Graph)]
    return all(_is_analytic_body(node, body, data) for body in bodies)


def _held(node: gs.Node) -> set[int]:
    """Return the inputs that must not depend on data: places, sizes, conditions and divisors."""
    if node.op in INDEXING:
        return {1}
    places = set(range(len(node.inputs)))
    moved = groups(node.op, len(places))
    return places.difference(*moved) if moved else set()


def _is_analytic_body(loop: gs.Node, body: gs.Graph, data: Collection[str]) -> bool:
    # A Scan's inputs are those of its body; in a Loop the count and the condition come first, and
    # the next condition is the first of its outputs.
    skipped = 0 if loop.op == "Scan" else 2
    inner = body.inputs[skipped:]
    given = dict(zip((t.name for t in inner), loop.inputs[skipped:], strict=True))
    known = {*data, *(name for name, outer in given.items() if outer.name in data)}
    following = body.outputs[skipped // 2 :]
    states = list(zip(inner, following, strict=False))[: len(loop.outputs)]
    if loop.op == "Scan":
        states = states[: len(loop.inputs) - loop.attrs["num_scan_inputs"]]
    while True:
        for node in body.nodes:
            if depends(node, known):
                known |= {o.name for o in node.outputs}
        more = {before.name for before, after in states if after.name in known} - known
        if not more:
            return all(is_analytic(node, known) for node in body.nodes)
        # A state depends on data in all steps if it does after one.
        known |= more
