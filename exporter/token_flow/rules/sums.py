"""Operators that make one element of many: sums, products of matrices, softmax, norms, choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from linexport.token_flow.axes import Axis, Span, has_tokens, span_of, spans
from linexport.token_flow.broadcasting import elementwise, pair_of
from linexport.token_flow.interpreter import FlowKind, Interpreter, rule
from linexport.token_flow.lengths import of
from linexport.token_flow.masks import EXCLUDED, LinearStep, Mask, combined
from linexport.token_flow.rules.layout import transposed, with_axes
from linexport.token_flow.values import MixingError, TokenValue

Neutral = Callable[[float], bool]

REDUCTIONS: dict[str, Neutral | None] = {
    **dict.fromkeys(("ReduceSum", "ReduceL1", "ReduceL2", "ReduceSumSquare"), lambda x: x == 0),
    "ReduceProd": lambda x: x == 1,
    "ReduceMax": lambda x: x <= EXCLUDED,
    "ReduceMin": lambda x: x >= -EXCLUDED,
    "ReduceLogSumExp": lambda x: x <= EXCLUDED,
    **dict.fromkeys(("ReduceMean", "ReduceLogSum", "ArgMax", "ArgMin"), None),
}
"""Operators, with which elements do not count in them; None where all do."""

ADVICE = {
    "ReduceMean": "a mean over the last w tokens needs a state of their rows; one over all earlier "
    "tokens is a cumulative sum, divided by the position",
    "CumSum": "a cumulative sum that multiplies or is divided becomes linear attention",
    "Softmax": "softmax over earlier tokens streams with a causal mask on its scores (s <= t)",
    "MatMul": "linear attention that is fused carries a state, and so does softmax attention "
    "with a causal mask",
}
ADVICE["Einsum"] = ADVICE["Gemm"] = ADVICE["ReduceSum"] = ADVICE["MatMul"]


@rule(*REDUCTIONS)
def reduction(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow a reduction of all elements along some axes."""
    given = a.value(node.inputs[0])
    keeps = bool(node.attrs.get("keepdims", 1))
    if node.op in ("ArgMax", "ArgMin"):
        places: list[int] | None = [node.attrs.get("axis", 0)]
    else:
        places = a.integers(node, 1, "axes")
    if places is None:
        places = [] if node.attrs.get("noop_with_empty_axes", 0) else list(range(given.rank))
    places = [place % given.rank for place in places]
    a.check_same_everywhere(given)
    axes = [axis for place, axis in enumerate(given.known_axes) if keeps or place not in places]
    if keeps:
        axes = [() if place in places else axis for place, axis in enumerate(axes)]
    whole = TokenValue(tuple(axes), tokens=given.tokens)
    if node.op == "ReduceSum" and len(places) == 1:
        a.sums[a.number] = node.inputs[0].name
        whole = replace(whole, running=a.number)
    found, neutral = given, REDUCTIONS[node.op]
    for place in places:
        if neutral is not None and neutral(EXCLUDED) and not neutral(-EXCLUDED):
            _check_own(given, place, neutral)
        found = reduced(a, node.op, found, place, neutral, [whole])
    return [replace(with_axes(replace(found, numbers=None), axes), tag=None)]


def reduced(
    a: Interpreter,
    op: str,
    given: TokenValue,
    place: int,
    neutral: Neutral | None,
    whole: Sequence[TokenValue] | None = None,
) -> TokenValue:
    """Return a value in which one element stands for all along an axis.

    Raises:
        MixingError: it is made of tokens that another call has, or may have; with ``whole``.
    """
    check_along(a, op, given, place, neutral, whole)
    axes = (*given.known_axes[:place], (), *given.known_axes[place + 1 :])
    mask = Mask()
    if pair_of(axes) is not None and neutral is not None and neutral(0.0):
        steps = tuple(s if s == LinearStep(0.0) else None for s in given.mask.steps)
        mask = combined("Identity", [Mask(given.mask.cuts, steps)])
    found = replace(given, axes=axes, numbers=None, form=None, mask=mask, tag=None)
    return replace(found, running=None)


def check_along(
    a: Interpreter,
    op: str,
    given: TokenValue,
    place: int,
    neutral: Neutral | None,
    whole: Sequence[TokenValue] | None = None,
) -> None:
    """Check that elements along an axis are there whenever one is made of them.

    Raises:
        MixingError: they are tokens that another call has, or may have; with ``whole``.
    """
    axis = given.known_axes[place]
    a.check_aligned(axis)
    if not has_tokens(axis):
        return
    span, pair = span_of(axis), pair_of(given.known_axes)
    advice = ADVICE.get(op, "")
    if span is None or pair is None or neutral is None:
        raise MixingError("reduces over all tokens of a call", advice, values=whole)
    other = given.known_axes[pair[0] if pair[1] == place else pair[1]]
    mask = given.mask if pair[1] == place else given.mask.turned()
    query = spans([other])[0]
    hull = mask.within(neutral)
    if hull is None:
        return
    nearest, farthest = hull
    if nearest < 0:
        raise MixingError("reads later tokens", advice)
    # Up to that distance before the last query, there must be a key for each query.
    behind = (span.stop - (query.stop - of(int(nearest)))).least
    if behind is None or behind < 0:
        raise MixingError("reads fewer of the last tokens than there are", advice)
    _check_rows(a, span, query, farthest, advice)


def _check_rows(a: Interpreter, span: Span, query: Span, farthest: float, advice: str) -> None:
    """Check that tokens as far back as that are there, and note how far."""
    everything = span.valid_from.number is not None
    if everything:
        a.note(FlowKind.STATEFUL)
    if math.isinf(farthest):
        if not everything:
            raise MixingError("reads all earlier tokens, and has those of this call alone", advice)
        return
    reach = int(farthest)
    missing = (span.valid_from - (query.start - of(reach))).number
    if not everything and (missing is None or missing > 0):
        raise MixingError(
            f"looks back {reach} tokens, and has rows of "
            f"{0 if missing is None else reach - missing} of them",
            "a window over the last tokens needs a state of their rows",
        )
    if reach:
        a.note(FlowKind.WINDOW, reach, span.rows)


@rule("MatMul")
def matmul(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow products of matrices."""
    return [product(a, "MatMul", *a.inputs(node)[:2])]


def product(a: Interpreter, op: str, x: TokenValue, y: TokenValue) -> TokenValue:
    """Return x y, whose last two axes are matrices; a value of one axis is a vector."""
    rows, columns = x.rank > 1, y.rank > 1
    if not rows:
        x = with_axes(x, ((), *x.known_axes))
    if not columns:
        y = with_axes(y, (*y.known_axes, ()))
    # (.., r, s, 1) and (.., 1, s, c): what is added up is the product of entries that meet.
    x = _bare(x, (*x.known_axes, ()))
    y = _bare(y, (*y.known_axes[:-2], (), *y.known_axes[-2:]))
    found = reduced(a, op, elementwise(a, "Mul", [x, y]), -2 + max(x.rank, y.rank), _is_zero)
    axes = list(found.known_axes)
    del axes[-2]
    if not columns:
        del axes[-1]
    if not rows:
        del axes[-2 if columns else -1]
    return with_axes(replace(found, numbers=None), axes)


def _is_zero(x: float) -> bool:
    return x == 0


def _bare(value: TokenValue, axes: Sequence[Axis]) -> TokenValue:
    """Return a value with further axes of size 1."""
    return with_axes(value.without_form(), axes)


@rule("Gemm")
def gemm(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow a product of matrices to which something is added."""
    x, y, *rest = a.inputs(node)
    x = transposed(x, [1, 0]) if node.attrs.get("transA", 0) else x
    y = transposed(y, [1, 0]) if node.attrs.get("transB", 0) else y
    found = product(a, "Gemm", x, y)
    return [elementwise(a, "Add", [found, *rest]) if rest else found]


@rule("Einsum")
def einsum(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow sums of products whose axes have letters."""
    values = a.inputs(node)
    terms, out = _terms(node.attrs["equation"], [v.rank for v in values])
    letters = list(dict.fromkeys(letter for term in (out, *terms) for letter in term))
    spread = []
    for value, term in zip(values, terms, strict=True):
        if len(set(term)) < len(term):
            raise MixingError("reads a diagonal, which cannot be followed")
        order = [term.index(letter) for letter in letters if letter in term]
        moved = transposed(value.without_form(), order)
        own = dict(zip([term[i] for i in order], moved.known_axes, strict=True))
        spread.append(_bare(moved, [own.get(letter, ()) for letter in letters]))
    found = elementwise(a, "Mul", spread) if len(spread) > 1 else spread[0]
    a.check_same_everywhere(found)
    for place, letter in enumerate(letters):
        if letter not in out:
            found = reduced(a, "Einsum", found, place, _is_zero)
    axes = [axis for axis, letter in zip(found.known_axes, letters, strict=True) if letter in out]
    return [replace(with_axes(replace(found, numbers=None), axes), tag=None)]


def _terms(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return the letters of the inputs and of the output, those that dots stand for among them."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    widths = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    dotted = [w for w, term in zip(widths, terms, strict=True) if "..." in term]
    names = [chr(0x3B1 + i) for i in range(max(dotted, default=0))]
    spelled = [
        term.replace("...", "".join(names[len(names) - w :])) if "..." in term else term
        for term, w in zip(terms, widths, strict=True)
    ]
    if not arrow:
        once = sorted(x for x in set(left) - set(",.") if left.count(x) == 1)
        out = "".join(["..." if dotted else "", *once])
    return spelled, out.replace("...", "".join(names))


@rule("Softmax", "LogSoftmax", "Hardmax", "LpNormalization")
def softmax(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow shares of a sum along one axis."""
    given = a.value(node.inputs[0])
    place = node.attrs.get("axis", -1) % given.rank
    a.check_same_everywhere(given)
    neutral = _is_zero if node.op == "LpNormalization" else (lambda x: x <= EXCLUDED)
    check_along(a, node.op, given, place, neutral)
    _check_own(given, place, neutral)
    return [elementwise(a, node.op, [given])]


def _check_own(given: TokenValue, place: int, neutral: Neutral) -> None:
    """Check that scores of the first token are not all masked: keys then count, also later ones.

    Raises:
        MixingError: they are.
    """
    if pair_of(given.known_axes) is not None and has_tokens(given.known_axes[place]):
        own = given.mask.at(0)
        if own is not None and (own.number is None or neutral(own.number)):
            raise MixingError("masks every token at the first one", "let every token see itself")


NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")


@rule(
    *NORMS, *(f"com.microsoft:{n}" for n in ("SimplifiedLayerNormalization", "LayerNormalization"))
)
def norm(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow a norm over all axes from one on."""
    given = a.value(node.inputs[0])
    first = node.attrs.get("axis", -1) % given.rank
    return _normed(a, node, given, range(first, given.rank))


@rule("InstanceNormalization", "GroupNormalization", "LRN", "MeanVarianceNormalization")
def channel_norm(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow a norm over channels, or over what is behind them."""
    given = a.value(node.inputs[0])
    return _normed(a, node, given, range(1, given.rank))


@rule("BatchNormalization")
def batch_norm(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow a scale for each channel, which inference has stored."""
    given = a.value(node.inputs[0])
    if has_tokens(given.known_axes[1]):
        raise MixingError("scales tokens by their place")
    a.check_same_everywhere(given)
    return [elementwise(a, node.op, [given])]


def _normed(
    a: Interpreter, node: gs.Node, given: TokenValue, places: Sequence[int]
) -> Sequence[TokenValue]:
    a.check_same_everywhere(given)
    for place in places:
        if given.known_axes[place]:
            check_along(a, node.op, given, place, None)
    weights = [v for v in a.inputs(node)[1:] if v.spans]
    if weights:
        raise MixingError("has weights of tokens")
    found = elementwise(a, node.op, [given])
    rest = [
        replace(a.stated(t), tokens=given.tokens, faults=given.faults) for t in node.outputs[1:]
    ]
    return [found, *rest]


@rule("TopK")
def top_k(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow the largest elements along one axis, and where they are."""
    given, count = a.value(node.inputs[0]), a.value(node.inputs[1]).uniform
    place = node.attrs.get("axis", -1) % given.rank
    a.check_same_everywhere(given)
    check_along(a, node.op, given, place, None)
    size = a.axis_size(count, node.outputs[0], place)
    axes = (*given.known_axes[:place], a.axis_of(size), *given.known_axes[place + 1 :])
    found = replace(elementwise(a, node.op, [given]).without_numbers(), axes=axes)
    return [found, found]


@rule("CumSum")
def running_sum(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow sums of all elements before each."""
    given, along = a.value(node.inputs[0]), a.value(node.inputs[1]).uniform
    places = range(given.rank)
    number = getattr(along, "number", None)
    if number is not None:
        places = range(number % given.rank, number % given.rank + 1)
    a.check_same_everywhere(given)
    found = elementwise(a, node.op, [given])
    backwards = bool(node.attrs.get("reverse", 0))
    for place in places:
        span = span_of(given.known_axes[place])
        if span is not None and span.valid_from.number is not None and not backwards:
            a.note(FlowKind.STATEFUL)  # all rows are there, from the first of the sequence on
            continue
        if span is not None and backwards == bool(node.attrs.get("exclusive", 0)):
            a.sums[a.number] = node.inputs[0].name
            found = found if backwards else replace(found, running=a.number)
        if given.known_axes[place]:
            check_along(a, node.op, given, place, None, [found])
    return [found]


@rule("DFT", "STFT")
def transform(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow a Fourier transform along an axis without tokens."""
    given = a.value(node.inputs[0])
    place = node.attrs.get("axis", 1)
    if len(node.inputs) > 2:
        place = (a.integers(node, 2) or [-2])[0]
    a.check_same_everywhere(given)
    check_along(a, node.op, given, place % given.rank, None)
    found = a.stated(node.outputs[0], given.faults)
    if not given.spans:
        return [replace(found, tokens=given.tokens, time=given.time)]
    if found.axes is None or [s.place for s in found.spans] != [s.place for s in given.spans]:
        raise MixingError("is a transform whose result cannot be followed")
    return [replace(found, tokens=given.tokens, time=given.time)]


@rule("LSTM", "GRU", "RNN")
def recurrence(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow a recurrence along an axis without tokens."""
    given = a.value(node.inputs[0])
    if any(v.spans for v in a.inputs(node)):
        raise MixingError(
            "carries a state from token to token that is not an input and an output of the model",
            "write it as a loop over tokens (torch.scan, or a Python loop), which gets a state",
        )
    times = [v.time for v in a.inputs(node)]
    outputs = [a.stated(t, given.faults) for t in node.outputs if not t.is_empty()]
    return [replace(v, tokens=given.tokens, time=times[0]) for v in outputs]
