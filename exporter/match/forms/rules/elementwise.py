"""Operators that act on entries: arithmetic, masks, exponentials, functions of one tensor."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import onnx_graphsurgeon as gs

from linexport.match.forms import algebra
from linexport.match.forms.evaluate import Evaluator, interesting, rule
from linexport.match.forms.rules.positions import (
    absolute,
    clip,
    equal,
    maximum,
    minimum,
    position_order,
    rectify,
)
from linexport.match.forms.terms import (
    Count,
    Form,
    Function,
    Leaf,
    Nested,
    PositionOrder,
    StepValue,
    Term,
)

UNARY = (
    *("Abs", "Ceil", "Celu", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid"),
    *("HardSwish", "LeakyRelu", "Log", "Mish", "Neg", "Reciprocal", "Relu", "Round", "Selu"),
    *("Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Tanh", "ThresholdedRelu"),
)
BINARY = (
    *("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min"),
    *("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"),
)
OTHER = ["Clip", "Where", "Not", "And", "Or"]

EXPANDED_POWERS = (2, 3, 4, 5)
"""Powers that are multiplied out."""

VERY_NEGATIVE = -1e9
"""Masks are filled with this or less where exp is to make zeros."""


@rule(*UNARY, *BINARY, *OTHER)
def elementwise(e: Evaluator, node: gs.Node) -> Form | None:
    """Algebra where there is a rule for it; else a function of one tensor; else opaque."""
    given = [t for t in node.inputs if not t.is_empty()]
    forms = e.forms(given)
    if forms is None:
        return None
    if node.op == "Equal" and node.inputs[0] is node.inputs[1] and _stored(e, forms[0]):
        # A number is equal to itself. Powers of positions under a mask are numbers, where computing
        # them gives 0 times infinity; of the model's input a user may mean to clean NaN.
        return algebra.constant(1.0, forms[0].dims)
    if node.op in ("Add", "Sub") and _is_hold(e, forms):
        return None
    forms = [_masked_number(f) for f in forms]
    special = SPECIAL.get(node.op)
    if node.op == "Clip" and len(node.inputs) == 3 and node.inputs[1].is_empty():
        special = minimum
    elif len(given) != len(node.inputs):
        special = None
    if special is not None:
        form = special(*forms)
        if form is not None:
            return form
    form = pointwise(e, node, forms)
    if form is None and node.op == "Mul" and all(map(_single, forms)):
        product = algebra.times(*forms)
        if product is not None:
            e.products[node.outputs[0].name] = product
    return form


def pointwise(e: Evaluator, node: gs.Node, forms: list[Form]) -> Form | None:
    """Return a function of the entries of one tensor and of constants, as one leaf."""
    base: Form | None = None
    for form in forms:
        if form.leaf is None and form.scalar is None:
            return None
        if form.leaf is None:
            continue
        if base is None:
            base = form
            continue
        aligned = algebra.broadcast(base, form)
        if aligned is None:
            return None
        # Two arguments are one number only if they are the same entry of the same tensor.
        base, other, _ = aligned
        assert base.leaf is not None and other.leaf is not None
        if (base.leaf.tensor, base.leaf.dims, base.dims) != (
            other.leaf.tensor,
            other.leaf.dims,
            other.dims,
        ):
            return None
    if base is None or base.leaf is None:
        return None
    arguments: list[Function] = []
    position = iter(forms)
    for tensor in node.inputs:
        arguments.append(("none",) if tensor.is_empty() else _argument(e, tensor, next(position)))
    rank = max(len(f.dims) for f in forms)
    if rank > len(base.dims):
        return None
    attributes = tuple(sorted((k, _frozen(v)) for k, v in node.attrs.items()))
    function = (node.op, attributes, *arguments)
    return Form(base.dims, (Term(1.0, (replace(base.leaf, function=function),)),))


@rule("IsNaN", "IsInf")
def not_finite(e: Evaluator, node: gs.Node) -> Form | None:
    """Return that powers of positions under a mask are finite, as nan_to_num makes them."""
    form = e.form(node.inputs[0])
    if form is None or form.leaf is not None or not _stored(e, form):
        return None
    # Stored tensors are taken to be finite, and in the algebra a mask of 0 removes what it
    # multiplies.
    finite = all(math.isfinite(term.coefficient) for term in form.terms)
    return algebra.constant(0.0, form.dims) if finite else None


def _stored(e: Evaluator, form: Form) -> bool:
    """Return whether a form depends on positions and stored tensors alone."""
    factors = [f for term in form.terms for f in term.factors]
    leaves = [f for f in factors if isinstance(f, Leaf)]
    inside = [f.inner for f in factors if isinstance(f, Nested)]
    return all(e.is_weight(f.tensor) for f in leaves) and all(_stored(e, f) for f in inside)


def _is_hold(e: Evaluator, forms: list[Form]) -> bool:
    """Return whether a number is added to exp(d A), of stored A and a tensor of single tokens.

    As exp(d A) - 1 of a zero-order hold it is a factor of one key, which two terms would not be.
    """
    exps = [f for f in forms if f.scalar is None and len(f.terms) == 1]
    if len(forms) != 2 or len(exps) != 1 or not any(f.scalar is not None for f in forms):
        return False
    (form,) = exps
    (term,) = form.terms
    nested = term.of(Nested)
    if len(nested) != 1 or nested[0].kind != "exp" or len(nested[0].inner.terms) != 1:
        return False
    (exponent,) = nested[0].inner.terms
    leaves = [*term.of(Leaf), *exponent.of(Leaf)]
    if len(leaves) + 1 != len(term.factors) + len(exponent.factors):
        return False
    inside = {*term.axes, *exponent.axes}
    tokens = {f.tensor.name for f in leaves if not e.is_weight(f.tensor)}
    return len(tokens) < 2 and inside <= form.axes and not any(a.parameter for a in inside)


def _frozen(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _argument(e: Evaluator, tensor: gs.Tensor, form: Form) -> Function:
    if form.leaf is not None:
        scale = form.terms[0].coefficient
        inside = form.leaf.function
        return inside if scale == 1 else ("Mul", (), inside, ("const", scale, None))
    value = e.values.numbers(tensor)
    kind = None if value is None else value.dtype.name
    return ("const", form.scalar, kind)


def _masked_number(form: Form) -> Form:
    """Numbers as negative as masks use stand for minus infinity."""
    value = form.scalar
    if value is not None and value <= VERY_NEGATIVE:
        return algebra.constant(-math.inf, form.dims)
    return form


def _single(form: Form) -> bool:
    return form.leaf is not None


def _plain(form: Form) -> bool:
    """One tensor, outside loops."""
    return _single(form) and not interesting(form)


def _nested(a: Form, b: Form) -> bool:
    """One of two leaves has all the labels of the other, once they are shared."""
    aligned = algebra.broadcast(a, b)
    if aligned is None:
        return True
    # The labels of the tensors: a dim along which one is broadcast is not a label of it.
    x, y = (form.leaf for form in aligned[:2])
    assert x is not None and y is not None
    return x.axes <= y.axes or y.axes <= x.axes


def multiply(a: Form, b: Form) -> Form | None:
    """Return a b; a tensor times a mask or a gate in front of the attention is opaque."""
    for x, y in ((a, b), (b, a)):
        if x.scalar is not None or _number(x):
            if x.scalar is not None and math.isinf(x.scalar):
                return None
            return algebra.times(x, y)
    # Two tensors of the graph with the same labels are no query and key: the product is one tensor,
    # and as one leaf it can be a masked key or a gated value.
    if _plain(a) and _plain(b) and _nested(a, b):
        return None
    return algebra.times(a, b)


def _number(form: Form) -> bool:
    """Return whether a form is a size, or one over it."""
    return all(isinstance(f, Count) for t in form.terms for f in t.factors)


def divide(a: Form, b: Form) -> Form | None:
    """Return a (1 / b)."""
    if b.scalar is not None:
        return None if b.scalar == 0 else multiply(a, algebra.constant(1 / b.scalar))
    # A tensor over a tensor, in front of the attention, is a tensor.
    if not _number(b) and _single(b) and not interesting(a) and a.scalar is None:
        return None
    over = algebra.one_over(b)
    return None if over is None else multiply(a, over)


def add(a: Form, b: Form) -> Form | None:
    """Return a + b, where one side is of interest or both are numbers."""
    if a.scalar is not None and b.scalar is not None:
        return algebra.plus(a, b)
    # A number and one tensor are a function of it, such as the gate 1 - f: followed, it would be
    # two products of everything behind it.
    if (a.scalar is not None and _single(b)) or (b.scalar is not None and _single(a)):
        return None
    # Sums of plain tensors, such as a bias or a residual, stay opaque: followed, they would double
    # the terms of every product behind them.
    if interesting(a) or interesting(b):
        return algebra.plus(a, b)
    if _single(a) and _single(b) and not _nested(a, b):
        return algebra.plus(a, b)
    return None


def subtract(a: Form, b: Form) -> Form | None:
    """Return a + (-1) b."""
    return add(a, algebra.negated(b))


def negate(a: Form) -> Form | None:
    """Return (-1) a."""
    return algebra.negated(a)


def log(a: Form) -> Form | None:
    """Return log of a sum over positions, which an exp behind it undoes, or of exp itself.

    One exp more, or a number, may be added: of what there was before the first position.
    """
    if a.scalar is not None:
        return algebra.constant(math.log(a.scalar), a.dims) if a.scalar > 0 else None
    exps = [f for t in a.terms for f in t.of(Nested) if f.kind == "exp" and f.axes <= a.axes]
    # log(exp(x) exp(y)) = x + y.
    if len(a.terms) == 1 and a.terms[0] == Term(1.0, tuple(exps)):
        return Form(a.dims, tuple(t for f in exps for t in f.inner.terms))
    summed = [term for term in a.terms if term.axes - a.axes]
    first = [t for t in a.terms if _is_number(t) or _is_one_exp(t)]
    if len(summed) != 1 or [*first, *summed] not in ([*a.terms], [*a.terms][::-1]):
        return None
    return replace(a, terms=(Term(1.0, (algebra.nested("log", a),)),))


def _is_number(term: Term) -> bool:
    return not term.factors and term.coefficient > 0


def _is_one_exp(term: Term) -> bool:
    leaves = (f.function for f in term.of(Leaf))
    return len(term.factors) == 1 and all(name == "Exp" for name, *_ in leaves)


def reciprocal(a: Form) -> Form | None:
    """Return 1 / a."""
    return None if _single(a) else divide(algebra.constant(1.0), a)


def exp(a: Form) -> Form | None:
    """Return exp of sums as products of exps, where they may be a decay, a mask or scores.

    Other sums are those of a feature map, such as w . x - |x|^2 / 2: one opaque factor.
    """
    mixing = _is_of_pairs(a) or any(_mixes(term) or _is_total(term, a) for term in a.terms)
    return algebra.exponential(a) if mixing or a.scalar is not None else None


def _mixes(term: Term) -> bool:
    """Return whether a term has positions, a mask, or a product of several tensors."""
    leaves = term.of(Leaf)
    named = any(isinstance(f, StepValue) for f in leaves)
    return (
        math.isinf(term.coefficient) or len(leaves) > 1 or len(leaves) < len(term.factors) or named
    )


def _is_total(term: Term, form: Form) -> bool:
    """Return whether a term adds up what a step of a loop is given, such as a chunk's decays."""
    return bool(term.axes - form.axes) and any(a.parameter for a in term.axes)


def _is_of_pairs(form: Form) -> bool:
    """Return whether one term has a position that another lacks, and the other way round.

    Such is the difference of the exponents of keys and a maximum of each query.
    """
    positions = [{a for a in t.axes if a.size.known is None} for t in form.terms]
    return any(
        {a.size for a in x - y} & {a.size for a in y - x} for x in positions for y in positions
    )


def power(a: Form, b: Form) -> Form | None:
    """a^b = exp(b log a), where b counts positions; a whole power of a sum of products."""
    if b.scalar in EXPANDED_POWERS and a.leaf is None and any(t.axes - a.axes for t in a.terms):
        result: Form | None = a
        for _ in range(int(b.scalar or 0) - 1):
            # (sum_i x_i)^2 = sum_ij x_i x_j: the sums of every factor run over labels of their own.
            result = result and algebra.times(result, a.fresh())
        return result
    if not interesting(b):
        return None
    # exp and log are inverse for positive numbers.
    if a.scalar is not None and a.scalar > 0:
        exponent = algebra.times(b, algebra.constant(math.log(a.scalar)))
    elif a.leaf is not None and a.terms[0].coefficient == 1:
        logarithm = Form(a.dims, (Term(1.0, (a.leaf.logarithm,)),))
        exponent = algebra.times(b, logarithm)
    else:
        return None
    return exponent and algebra.exponential(exponent)


def where(condition: Form, a: Form, b: Form) -> Form | None:
    """Return c a + (1 - c) b, where one of them is a number."""
    if condition.scalar is not None:
        chosen, other = (a, b) if condition.scalar else (b, a)
        # The side that is not chosen still broadcasts the result.
        ones = algebra.times(*(algebra.constant(1.0, x.dims) for x in (condition, other)))
        return ones and algebra.times(chosen, ones)
    if not _boolean(condition):
        return None
    # A mask is 0 or 1, so that Where(c, a, b) = c a + (1 - c) b for finite a and b.
    opposite = algebra.complement(condition)
    if opposite is None:
        return None
    sides = ((condition, a, b), (opposite, b, a))
    for kept, x, y in sides:
        if y.scalar is not None and math.isinf(y.scalar):
            # x + (-inf) (1 - c): where c is 1 nothing is added, as the algebra takes 0 inf for 0,
            # and where c is 0 the sum is infinite whatever x is.
            gone = algebra.complement(kept)
            filled = gone and algebra.times(algebra.constant(y.scalar), gone)
            return filled and algebra.plus(x, filled)
    for kept, x, y in sides:
        # c x + (1 - c) 0 = c x.
        if y.scalar == 0:
            return multiply(x, kept) if len(kept.terms) == 1 else None
    if a.scalar is not None and b.scalar is not None:
        first, second = algebra.times(condition, a), algebra.times(opposite, b)
        return first and second and algebra.plus(first, second)
    return None


def _boolean(form: Form) -> bool:
    return all(isinstance(f, PositionOrder | Leaf) for t in form.terms for f in t.factors)


def invert(a: Form) -> Form | None:
    """Return 1 - a."""
    return algebra.complement(a) if not _single(a) else None


def both(a: Form, b: Form) -> Form | None:
    """Return a b, which for masks is a and b."""
    return multiply(a, b) if _boolean(a) and _boolean(b) else None


SPECIAL: dict[str, Any] = {
    "Add": add,
    "Sub": subtract,
    "Mul": multiply,
    "Div": divide,
    "Neg": negate,
    "Reciprocal": reciprocal,
    "Exp": exp,
    "Log": log,
    "Pow": power,
    "Where": where,
    "GreaterOrEqual": lambda a, b: position_order(a, b, 0),
    "Greater": lambda a, b: position_order(a, b, -1),
    "LessOrEqual": lambda a, b: position_order(b, a, 0),
    "Less": lambda a, b: position_order(b, a, -1),
    "Equal": equal,
    "Not": invert,
    "And": both,
    "Relu": rectify,
    "Clip": clip,
    "Abs": absolute,
    "Min": minimum,
    "Max": maximum,
}
"""Operators with a meaning in the algebra; each returns None where that does not apply."""
