"""Expressions of one token: what operands of attention are computed from, for kernels to evaluate.

    key = silu(conv(x)) / sqrt(sum of its squares in a head + eps)     of each head and component

An expression has a value for every head and component of a row. Tensors are addressed by affine
steps, which all of reshape, split, slice, concat and the sharing of heads come to. ``encoded``
writes expressions as numbers, a constant of a kernel: see ``sources/expressions.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

UNARY = ("Neg", "Exp", "Log", "Sigmoid", "Softplus", "Sqrt", "Reciprocal", "Relu", "Abs")
BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min")
KINDS = ("Load", "Number", "Sum", "Convolution", *UNARY, *BINARY)
"""Kinds of expressions; an encoded one begins with the place of its kind."""


@dataclass(frozen=True)
class View:
    """Elements of a token's values: ``offset`` + ``head`` * h + ``component`` * i."""

    offset: int
    head: int
    component: int


@dataclass(frozen=True)
class Load:
    """Elements of tensor number ``tensor``: it has ``width`` for each token, or 0 and is shared."""

    tensor: int
    width: int
    view: View


@dataclass(frozen=True)
class Number:
    """One number for every head and component."""

    value: float


@dataclass(frozen=True)
class Applied:
    """One of UNARY or BINARY."""

    kind: str
    operands: tuple[Expression, ...]


@dataclass(frozen=True)
class Sum:
    """Sum over the ``width`` components of a row, times ``factor``."""

    operand: Expression
    width: int
    factor: float


@dataclass(frozen=True)
class Convolution:
    """Depthwise causal convolution, as the op CausalConvTokens.

    Attributes:
        operand: its input at these channels.
        weight: number of a tensor, as bias and past, which are None where there is none.
        present: number of its present state among those of the node.
        size: taps.
        silu: whether that is applied.
        channels: of the whole convolution.
        view: of the channels.
    """

    operand: Expression
    weight: int
    bias: int | None
    past: int | None
    present: int
    size: int
    silu: bool
    channels: int
    view: View


Expression = Load | Number | Applied | Sum | Convolution

Encoded = tuple[int | float, ...]


def encoded(roots: Sequence[Expression]) -> tuple[Encoded, dict[Expression, int]]:
    """Return expressions as numbers, and where each begins; what they share is written once."""
    program: list[int | float] = []
    places: dict[Expression, int] = {}
    for root in roots:
        for one in parts(root):
            if one not in places:
                places[one] = len(program)
                program += _words(one, places)
    return tuple(program), places


def parts(expression: Expression) -> Iterator[Expression]:
    """Yield everything in an expression, operands first."""
    own = expression.operands if isinstance(expression, Applied) else ()
    if isinstance(expression, Sum | Convolution):
        own = (expression.operand,)
    for operand in own:
        yield from parts(operand)
    yield expression


def renumbered(
    one: Expression, tensors: Mapping[int, int], states: Mapping[int, int]
) -> Expression:
    """Return an expression that reads other numbers of tensors and writes other ones of states."""
    if isinstance(one, Number):
        return one
    if isinstance(one, Load):
        return replace(one, tensor=tensors[one.tensor])
    if isinstance(one, Applied):
        return replace(one, operands=tuple(renumbered(x, tensors, states) for x in one.operands))
    operand = renumbered(one.operand, tensors, states)
    if isinstance(one, Sum):
        return replace(one, operand=operand)
    return replace(
        one,
        operand=operand,
        weight=tensors[one.weight],
        bias=None if one.bias is None else tensors[one.bias],
        past=None if one.past is None else tensors[one.past],
        present=states[one.present],
    )


def read_by(one: Expression) -> Iterator[int]:
    """Yield the numbers of the tensors that an expression itself reads, its operands aside."""
    if isinstance(one, Load):
        yield one.tensor
    elif isinstance(one, Convolution):
        yield from (x for x in (one.weight, one.bias, one.past) if x is not None)


def _words(one: Expression, places: dict[Expression, int]) -> list[int | float]:
    if isinstance(one, Applied):
        return [KINDS.index(one.kind), *(places[x] for x in one.operands)]
    words: list[int | float] = [KINDS.index(type(one).__name__)]
    for field in fields(one):
        value = getattr(one, field.name)
        if field.name == "operand":
            words.append(places[value])
        elif isinstance(value, View):
            words += [value.offset, value.head, value.component]
        else:
            words.append(-1 if value is None else int(value) if isinstance(value, bool) else value)
    return words
