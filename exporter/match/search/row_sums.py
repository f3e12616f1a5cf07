"""Sums of the rows of a decay mask -> a function of the position, which needs no mask.

    sum_{s <= t} exp(l (t - s))  =  expm1(l (t + 1)) / expm1(l)
    expm1(x)  =  exp(x) - 1  =  tanh(x / 2) / sigmoid(-x)

RetNet as published divides the rows of its mask by the root of their sum. Written so, it takes T
numbers instead of T x T, and a piece of a sequence has the sums of the whole. ONNX has no expm1;
exp(l) - 1 would lose the digits of slow decays.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.edit import detach
from linexport.graph.monomials import parse
from linexport.graph.tensors import known_shape
from linexport.match.emit.layout import element_type
from linexport.match.emit.operands import Factors
from linexport.match.errors import NotAttentionError
from linexport.match.forms.axes import Axis, Index, size_of
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.terms import Iota, Leaf, Nested, PositionOrder, Term
from linexport.match.proof.prove import ProofFailedError
from linexport.match.roles.decay import common_exponent
from linexport.match.roles.roles import Roles
from linexport.match.roles.subgraph import Root
from linexport.match.search.rewriter import Rewriter
from linexport.match.search.stateful_region import depends

log = logging.getLogger(__name__)

NO_DECAY = 1e-30
"""Stands for a logarithm of 0: the quotient is then t + 1."""

FLOAT = np.dtype(np.float32)


def replace_row_sums(graph: gs.Graph) -> bool:
    """Replace sums of masks that depend on positions and weights alone; return whether any was.

    Args:
        graph: changed in place.
    """
    data = {t.name for t in graph.inputs}
    for node in graph.nodes:
        if depends(node, data):
            data |= {o.name for o in node.outputs}
    sums = [n for n in graph.nodes if n.op == "ReduceSum" and not depends(n, data)]
    rewriter = Rewriter(graph, Evaluator(graph)) if sums else None
    replaced = [n for n in sums if rewriter is not None and _is_replaced(rewriter, n)]
    return bool(replaced)


def _is_replaced(rewriter: Rewriter, node: gs.Node) -> bool:
    root = _read(rewriter, node.outputs[0])
    if root is None:
        return False
    writer = _Writer(root, rewriter.graph)
    try:
        writer.write()
        rewriter.swap(root, writer)
    except (NotAttentionError, ProofFailedError) as reason:
        log.debug("%s %r is left as it is: %s", node.op, node.name, reason)
        detach(writer.nodes)
        return False
    log.info("rewriting %s %r", node.op, node.name)
    return True


def _read(rewriter: Rewriter, total: gs.Variable) -> Root | None:
    """Return a sum of rows, of whose roles the decay and the positions are used."""
    form = rewriter.evaluator.form(total)
    if form is None or len(form.terms) != 1 or total.dtype != FLOAT:
        return None
    (term,) = form.terms
    orders, exps = term.of(PositionOrder), [f for f in term.of(Nested) if f.kind == "exp"]
    if len(orders) != 1 or len(exps) + 1 != len(term.factors) or orders[0].offset:
        return None
    t, s = orders[0].row, orders[0].column
    if len(t) != 1 or {*s} != term.axes - form.axes or not {*t} <= form.axes:
        return None
    try:
        exponent = common_exponent(term, t, s)
    except NotAttentionError:
        return None
    if exponent is not None:
        leaves = exponent.of(Leaf)
        counts = [f for f in exponent.factors if not isinstance(f, Leaf)]
        if counts != [Iota(t)] or len(leaves) > 1 or any(f.axes & {*t, *s} for f in leaves):
            return None
    nothing = ((), (), (), (), None)
    roles = Roles(*nothing, exponent, t, s, (), (), (), causal=True, post=term.coefficient)
    return Root(total, form, roles, rewriter.region(total, roles.leaves))


class _Writer(Factors):
    """Writes a sum as a function of the position."""

    def __init__(self, root: Root, graph: gs.Graph) -> None:
        super().__init__(root.tensor, root.form, root.roles)
        shaped = [t for t in graph.inputs if t.shape]
        self.read_sizes([Leaf(t, tuple((Axis(parse(s)),) for s in known_shape(t))) for t in shaped])

    def write(self) -> None:
        """Write all nodes.

        Raises:
            NotAttentionError: no input has the length.
        """
        roles, dims = self.roles, self.form.dims
        axes: list[Index] = [(a,) for index in dims for a in index]
        count = self.ordered(Leaf(self._count(), (roles.query_position,)), axes)
        rate = self._rate(roles.decay, axes)
        # A geometric sum, sum_{n <= t} e^{l n} = (e^{l (t + 1)} - 1) / (e^l - 1).
        total = self._op("Div", self._expm1(self._op("Mul", count, rate)), self._expm1(rate))
        if roles.post != 1.0:
            total = self._op("Mul", total, self._number(roles.post))
        present = {*roles.query_position}.union(*(leaf.axes for leaf in roles.leaves))
        self.result = self.merged(total, axes, dims, present)

    def _count(self) -> gs.Tensor:
        """Return t + 1 for every position."""
        size = size_of(self.roles.query_position)
        first, start, step = (
            gs.Constant(self.name("count"), np.asarray(n, np.int64)) for n in ([0], 0, 1)
        )
        limit = self.add("Squeeze", [self.size(size), first], np.dtype(np.int64))
        shape = [str(size)]
        positions = self.add("Range", [start, limit, step], np.dtype(np.int64), shape=shape)
        x = self.add("Cast", [positions], FLOAT, attrs={"to": element_type(FLOAT)}, shape=shape)
        return self._op("Add", x, self._number(1.0))

    def _rate(self, decay: Term | None, axes: list[Index]) -> gs.Tensor:
        """Return l, with its dims among the axes."""
        if decay is None:
            return self._number(NO_DECAY)
        if not decay.of(Leaf):
            return self._number(decay.coefficient)
        (leaf,) = decay.of(Leaf)
        if isinstance(leaf.tensor, gs.Constant):
            # It may be one that was read from a stored mask, and will be once more.
            leaf = replace(leaf, tensor=gs.Constant(self.name("rate"), leaf.tensor.values))
        x = self.applied("", self.ordered(leaf, axes), leaf, (), FLOAT)
        if decay.coefficient != 1.0:
            x = self._op("Mul", x, self._number(decay.coefficient))
        none = self.add("Equal", [x, self._number(0.0)], np.dtype(bool), shape=x.shape)
        return self.add("Where", [none, self._number(NO_DECAY), x], FLOAT, shape=x.shape)

    def _expm1(self, x: gs.Tensor) -> gs.Variable:
        # tanh(x / 2) = (e^x - 1) / (e^x + 1), and 1 / sigmoid(-x) = 1 + e^x; neither cancels near
        # 0.
        half = self._op("Tanh", self._op("Mul", x, self._number(0.5)))
        return self._op("Div", half, self._op("Sigmoid", self._op("Neg", x)))

    def _op(self, op: str, *inputs: gs.Tensor) -> gs.Variable:
        shapes = [x.shape for x in inputs if len(known_shape(x))]
        shape = [next((n for n in sizes if n != 1), 1) for sizes in zip(*shapes, strict=True)]
        return self.add(op, list(inputs), FLOAT, shape=shape)

    def _number(self, value: float) -> gs.Constant:
        return gs.Constant(self.name("number"), np.asarray(value, FLOAT))
