"""The first operation in the way, for a graph in which nothing looked like linear attention.

What linear attention adds up are tokens, so its graph has an operation along their axis. The first
one that could not be read is named, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import onnx_graphsurgeon as gs

from linexport.graph import sequence_axis
from linexport.graph.edit import producer
from linexport.graph.findings import UnmatchedCandidate
from linexport.graph.operators import SIZES_ONLY, SUMS, Trait, having
from linexport.graph.scan_body import (
    has_directions,
    nonlinear_operator,
    nonlinear_read,
    reads_by_number,
)
from linexport.match.emit.layout import written_size
from linexport.match.forms.evaluate import RULES, Evaluator
from linexport.match.forms.fourier import wraps_around
from linexport.match.forms.rules.kernels import is_long, long_obstacle
from linexport.match.forms.terms import Form, Iota, Leaf, Nested, PositionOrder, Term
from linexport.match.search.loop_reasons import linear_loop_reason

ADDS_UP = SUMS | having(Trait.CONTRACTION)
SHIFTS = ("Pad", "Slice", "Concat", "Split", "Gather")

NAMED_OPERATORS = ("DFT", "STFT", "Scan", "Loop")
"""Operators that are named whether or not the shapes around them are known."""

SUM = (
    "a sum of exponentials of positions, c * exp(a * t) of weights, or times cos(b * t), sin(b * t)"
)

LONG_CONVOLUTION = "is a convolution along {dim} with a kernel as long as the sequence"
LONG_REASONS = {
    "bias": f"{LONG_CONVOLUTION} and a bias. Without one it is fused where its kernel is {SUM}: "
    "add the bias to what it gives",
    "not turned around": f"{LONG_CONVOLUTION} whose kernel is not K.flip(-1). conv1d does not "
    "flip K: without a flip each token meets itself by the kernel's last number, another one at "
    "every length",
    "": f"{LONG_CONVOLUTION}. It is fused behind as many zeros but one, of stride 1, where each "
    f"channel has one kernel, which is {SUM}",
}

CIRCULAR = (
    "is a Fourier transform along {dim} of fewer than 2 T - 1 numbers, T the tokens: a product of "
    "such is a circular convolution, in which the last tokens reach the first ones. A causal one "
    f"has n = 2 * T in rfft and irfft; it is fused where its kernel is {SUM}"
)

LOG_SUM = (
    "adds up exponentials of tokens of {dim}, of which the logarithm is taken (logcumsumexp): that "
    "is not a sum of products. It is computed by a loop over tokens, whose state is "
    "the logarithm of the sum so far"
)

REASONS = {
    **dict.fromkeys(("ReduceMax", "ReduceMin"), "compares all tokens of {dim}: not a sum"),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), "passes its state through a function at every token"),
    **dict.fromkeys(
        ("DFT", "STFT"),
        "is a Fourier transform along {dim}, which needs all tokens. A causal convolution by it is "
        f"fused where its kernel is {SUM}",
    ),
    **dict.fromkeys(
        SHIFTS,
        "shifts, cuts or lengthens {dim}. A recurrence by shifts of growing distance (a tree scan) "
        "is found where it is a function or a loop of two tensors, or cumulative sums (cumsum, "
        "logcumsumexp)",
    ),
    "DynamicQuantizeLinear": "takes its scale from the least and the largest value of all tokens "
    "of {dim}. Quantise with scales that were measured before, or the weights alone",
    "If": "computes tokens of {dim} in one of two bodies; what can be computed in both is fused",
    "Softmax": "divides by a sum over {dim}",
    "Conv": "is a convolution along {dim}, whose weights are the same for all tokens: a causal one "
    "gets a state, and the rest is fused",
}
"""Reasons by operator, for those that are not sums of products."""


DIFFERENT = (
    "different products are added to each other. Where they share values, mask and decay they are "
    "fused as one; otherwise multiply each with the values, and add the results"
)


COUNTED = (
    "takes tokens by a number that its steps count, but not each in its turn. Where it takes "
    "x[:, i] while i < x.shape[1], from i = 0, and reads nothing of the tensor that it writes to "
    "y[:, i], it is a loop over tokens: it is fused where it is linear in its state, and streams"
)


READ_OTHERWISE = (
    "is linear in its state, of which {operator} is computed in each step for what it gives: that "
    "takes the state of every token, so the loop is kept. A readout of the state by products and "
    "sums (q^T S) may be normalised, or go through any function"
)


BACKWARDS = (
    "runs backwards over tokens: what it gives depends on later ones. A causal model reads its "
    "tokens forwards, and attention in both directions is a product of matrices without a loop"
)


def first_loop(graph: gs.Graph) -> UnmatchedCandidate | None:
    """Return the first loop over tokens, and why it is kept; None if there is none."""
    evaluator = Evaluator(graph)
    for node in _of_inputs(graph):
        if node.op in ("Scan", "Loop"):
            return _candidate_of(evaluator, node, "tokens")
    return None


def _candidate_of(evaluator: Evaluator, node: gs.Node, dim: str) -> UnmatchedCandidate:
    name = f"{node.op} {node.name}".strip()
    return _candidate(node.outputs[0].name, [node], f"{name} {_why(evaluator, node, dim)}")


def first_obstacle(graph: gs.Graph) -> UnmatchedCandidate | None:
    """Return the first operation that mixes tokens, and why nothing could be made of it.

    Without an operation that does, the first output; None of a graph without outputs.
    """
    dim = _tokens(graph.inputs)
    if not graph.outputs:
        return None
    where = graph.outputs[0].name
    if dim is None:
        return _candidate(
            where,
            [],
            "no dimension besides the batch is dynamic, so that there are no tokens to add up",
        )
    evaluator = Evaluator(graph)
    _state_shapes(graph, evaluator)
    mixing = [node for node in _of_inputs(graph) if _mixes(node, dim)]
    # A loop takes its first token from a Gather or its chunks from a Reshape, and a convolution
    # pads for its transform. A convolution is in front of many loops.
    for node in sorted(mixing, key=lambda n: (n.op in (*SHIFTS, "Reshape"), n.op == "Conv")):
        return _candidate_of(evaluator, node, dim)
    return _candidate(where, [], f"no operation was found that adds up tokens of {dim}")


def _candidate(where: str, nodes: Iterable[gs.Node], reason: str) -> UnmatchedCandidate:
    return UnmatchedCandidate(where, tuple(n.name for n in nodes), reason)


def _tokens(inputs: Iterable[gs.Tensor]) -> str | None:
    """Return the dynamic size that is the sequence: of the last axis that has one."""
    dynamic = [
        (axis, size)
        for tensor in inputs
        for axis, size in enumerate(tensor.shape or ())
        if isinstance(size, str) and size != "batch"
    ]
    return max(dynamic, key=lambda found: found[0])[1] if dynamic else None


def _of_inputs(graph: gs.Graph) -> list[gs.Node]:
    """Return the nodes whose values depend on those of the inputs, not on their sizes alone."""
    known, found = {t.name for t in graph.inputs}, []
    for node in graph.nodes:
        if node.op not in SIZES_ONLY and any(t.name in known for t in _read(node)):
            known |= {t.name for t in node.outputs}
            found.append(node)
    return found


def _read(node: gs.Node) -> Iterator[gs.Tensor]:
    """Yield what a node reads, and its bodies of the values around them."""
    yield from node.inputs
    for body in (a for a in node.attrs.values() if isinstance(a, gs.Graph)):
        for inner in body.nodes:
            yield from _read(inner)


def _state_shapes(graph: gs.Graph, e: Evaluator) -> None:
    """Write the shapes that follow from forms, where the graph states none."""
    for tensor in (t for n in graph.nodes for t in n.outputs if t.shape is None):
        sizes = e.sizes(tensor)
        if sizes is not None:
            tensor.shape = [written_size(size) for size in sizes]


def _mixes(node: gs.Node, dim: str) -> bool:
    if node.op in NAMED_OPERATORS or is_long(node):
        return True
    before, after = (
        max((list(t.shape or ()).count(dim) for t in tensors), default=0)
        for tensors in (node.inputs, node.outputs)
    )
    if not before or after > before:
        return False  # pairs of tokens are only formed here
    nested = any(isinstance(a, gs.Graph) for a in node.attrs.values())
    return nested or after < before or sequence_axis.changes_along(node, dim)


def _why(e: Evaluator, node: gs.Node, dim: str) -> str:
    if node.op in ("Scan", "Loop"):
        if has_directions(node):
            return BACKWARDS
        if reads_by_number(node):
            return COUNTED
        operator = nonlinear_operator(node)
        if operator is None:
            read = nonlinear_read(node)
            if read is not None:
                return READ_OTHERWISE.format(operator=read)
            return linear_loop_reason(e, node)
        return f"has a body that is not linear in its state: {operator} is computed of it"
    if node.op == "DFT" and wraps_around(e, node):
        return CIRCULAR.format(dim=dim)
    if is_long(node):
        return LONG_REASONS[long_obstacle(e, node)].format(dim=dim)
    if _is_log_sum(node):
        return LOG_SUM.format(dim=dim)
    if node.op in REASONS:
        return REASONS[node.op].format(dim=dim)
    if node.op not in ADDS_UP:
        return f"mixes tokens of {dim}, and is not a sum of products"
    form = e.form(node.outputs[0])
    what = None if form is None else _form_reason(e, node, form)
    return f"adds up tokens of {dim}, but " + (what or "not products of query, key and value")


def _is_log_sum(node: gs.Node) -> bool:
    """Return whether a node adds up exponentials for a logarithm."""
    exps = node.op == "CumSum" and producer(node.inputs[0], "Exp") is not None
    return exps and any(reader.op == "Log" for reader in node.outputs[0].outputs)


def _form_reason(e: Evaluator, node: gs.Node, form: Form) -> str | None:
    """Return what in a sum of products is not linear attention."""
    if form.leaf is not None and form.leaf.tensor is node.outputs[0]:
        unread = e.opaque_over.get(node.outputs[0].name, node)
        # Of convolutions those alone are read that have a kernel as long as the sequence.
        if unread.op in RULES and unread.op != "Conv":
            return "of more products than are followed"
        return f"{unread.op} is not an operator whose sums are followed"
    if len(form.terms) > 1:
        return _different(form.terms)
    (term,) = form.terms
    for exponent in (f for f in term.of(Nested) if f.kind == "exp"):
        if len(exponent.inner.terms) > 1 or not exponent.axes <= form.axes | term.axes:
            return "exp is taken of a sum that is not a decay between two positions"
    names = dict.fromkeys(f.tensor.name for f in term.of(Leaf))
    if len(names) < 2:
        return f"of {''.join(names) or 'numbers'} alone, not of a product of query, key and value"
    return f"the product of {' and '.join(names)} is not one of query, key and value"


def _is_of_pairs(leaf: Leaf, terms: tuple[Term, ...]) -> bool:
    """Return whether a tensor has an entry for each query and key that a mask is of."""
    orders = [order for term in terms for order in term.of(PositionOrder)]
    return any({*order.row, *order.column} <= leaf.axes for order in orders)


def _different(terms: tuple[Term, ...]) -> str:
    """Return in what the terms of a sum differ."""
    plain = min(terms, key=lambda t: len(t.of(Leaf)))
    most = max(len(t.of(Leaf)) for t in terms)
    masks = {len(t.of(PositionOrder)) for t in terms}
    own = next((f.tensor.name for t in terms for f in t.of(Leaf) if _is_of_pairs(f, terms)), "")
    if own and len(masks) > 1:
        return (
            f"{own} weighs pairs of tokens of its own in addition to the mask, such as "
            "those of one distance: add their product to the sum over earlier tokens"
        )
    if not _is_number(plain, terms):
        return f"{len(terms)} {DIFFERENT}"
    if len(plain.of(Leaf)) < most and plain.of(Iota):
        return "positions are added to products of query and key"
    if len(plain.of(Leaf)) < most and math.isfinite(plain.coefficient) and len(masks) > 1:
        return f"{plain.coefficient:g} is added after the mask, so that masked tokens count as well"
    if len(plain.of(Leaf)) < most and math.isfinite(plain.coefficient):
        return f"{plain.coefficient:g} is added to products of query and key"
    return f"{len(terms)} {DIFFERENT}"


def _is_number(plain: Term, terms: tuple[Term, ...]) -> bool:
    """Return whether a term adds a number, or positions, to what the others multiply values by."""
    others = [{f.tensor.name for f in t.of(Leaf)} for t in terms if t is not plain]
    own = {f.tensor.name for f in plain.of(Leaf)}
    return not plain.of(Nested) and all(own <= names for names in others)
