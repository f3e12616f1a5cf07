"""Operators that move, choose, sum or make numbers, applied to each part of complex ones.

    f(a + b i)  =  f(a) + f(b) i

is so of all that is linear with real factors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from linexport.trace.decompositions.complex_pairs.arithmetic import (
    absolute,
    angle,
    conjugate,
    polar,
)
from linexport.trace.decompositions.complex_pairs.writer import (
    ComplexPair,
    PairWriter,
    Part,
    Rules,
    arguments,
    aten,
    is_complex,
    operands,
    opname,
    value_of,
)

OF_ONE = (
    *("alias", "chunk", "clone", "contiguous", "cumsum", "detach", "diag_embed", "diagonal"),
    *("expand", "flatten", "flip", "gather", "getitem", "index", "index_select", "lift_fresh_copy"),
    *("mT", "mean", "movedim", "narrow", "permute", "repeat", "repeat_interleave", "reshape"),
    *("resolve_conj", "resolve_neg", "roll", "select", "slice", "split", "split_with_sizes"),
    *("squeeze", "sum", "t", "transpose", "tril", "triu", "unbind", "unflatten", "unfold"),
    "unsqueeze",
)
"""Operators whose first argument alone is complex."""

OF_SEVERAL = {
    "cat": ("tensors",),
    "constant_pad_nd": ("self", "value"),
    "copy": ("self", "src"),
    "index_put": ("self", "values"),
    "masked_fill": ("self", "value"),
    "pad": ("self", "value"),
    "scatter": ("self", "src", "value"),
    "select_scatter": ("self", "src"),
    "slice_scatter": ("self", "src"),
    "stack": ("tensors",),
    "steps": ("steps",),
    "where": ("self", "other"),
}
"""Arguments that may be complex, by operator."""

FILLED = {"zeros": 0, "empty": 0, "ones": 1}
"""Numbers that operators fill tensors with."""


def by_part(w: PairWriter, node: Node) -> ComplexPair:
    """Apply an operator to each part."""
    given = arguments(node)
    names = [n for n in OF_SEVERAL.get(opname(node), [*given][:1]) if n in given]
    return ComplexPair(*(_part(w, node, given, names, index) for index in (0, 1)))


def _part(
    w: PairWriter, node: Node, given: dict[str, Any], names: Sequence[str], index: int
) -> Part:
    """Return one part of what an operator gives; 0.0 where it is made of zeros."""
    values = [x for n in names for x in (given[n] if isinstance(given[n], list) else [given[n]])]
    if all(w.pair(x)[index] == 0.0 for x in values):
        return 0.0

    def part(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return [part(item) for item in x]
        found = w.pair(x)[index]
        tensor = isinstance(value_of(x), torch.Tensor)
        return w.whole(found, value_of(x).shape) if tensor else found

    replaced = [part(x) if n in names else _real(x) for n, x in given.items()]
    count = len(operands(node))
    kwargs = dict(zip([*given][count:], replaced[count:], strict=True))
    return w(node.target, *replaced[:count], **kwargs)


def _real(x: object) -> object:
    """Return the dtype of the parts of numbers of a complex dtype; other arguments as they are."""
    return x.to_real() if isinstance(x, torch.dtype) and x.is_complex else x


def _steps(w: PairWriter, node: Node) -> ComplexPair:
    """Mark steps of a loop once, with both parts in them: one loop computes both."""
    steps, length = operands(node)
    pairs = [w.pair(step) for step in steps]
    if 0.0 in itertools.chain(*pairs):
        return by_part(w, node)
    shape = value_of(steps[0]).shape
    whole = w(node.target, [join(w, pair, shape) for pair in pairs], length)
    return parts_of(w, whole)


def _filled(w: PairWriter, node: Node) -> ComplexPair:
    """Make a tensor of one number; a state that begins with zeros has two parts in all steps."""
    given, name = arguments(node), opname(node).removeprefix("new_").removesuffix("_like")
    number = given["fill_value"] if "fill_value" in given else given.get("s", FILLED.get(name, 0))
    re, im = w.pair(number)
    shape = value_of(node).shape
    whole = w.full(shape, re) if isinstance(re, float) else w.whole(re, shape)
    if number == 0:
        return ComplexPair(whole, whole)
    return ComplexPair(0.0 if re == 0.0 else whole, im if im == 0.0 else w.whole(im, shape))


def _cast(w: PairWriter, node: Node) -> ComplexPair | Part:
    """Change the type: a real number of a complex one is its real part."""
    if is_complex(node):
        return w.pair(operands(node)[0])
    real, value = w.pair(operands(node)[0]).re, value_of(node)
    return w(aten._to_copy.default, w.whole(real, value.shape), dtype=value.dtype)


def parts_of(w: PairWriter, x: Node) -> ComplexPair:
    """Return the parts of a tensor that has them along its last axis."""
    last = value_of(x).dim() - 1
    return ComplexPair(*(w(aten.select.int, x, last, i) for i in (0, 1)))


def _view(w: PairWriter, node: Node) -> ComplexPair | Part:
    """Change the shape; or take neighbours for parts, or parts for neighbours."""
    x, shape = operands(node)[:2]
    if not isinstance(shape, torch.dtype):
        # A part may be an expanded tensor, which has no view of another shape.
        parts = (p if p == 0.0 else w(aten.reshape.default, p, shape) for p in w.pair(x))
        return ComplexPair(*parts)
    sizes = w.sizes(value_of(node).shape)
    if is_complex(node):
        return parts_of(w, w(aten.view.default, x, [*sizes, 2]))
    return w(aten.view.default, join(w, w.pair(x), value_of(x).shape), sizes)


def _joined(w: PairWriter, node: Node) -> Node:
    """Put parts together; what takes one of them, as x.real does, gets it without that."""
    pair, shape = w.pair(operands(node)[0]), value_of(node).shape[:-1]
    for user in list(node.users):
        if opname(user) == "select" and operands(user)[1] in (len(shape), -1):
            user.replace_all_uses_with(w.whole(pair[operands(user)[2]], shape))
    return join(w, pair, shape)


def join(w: PairWriter, x: ComplexPair, shape: Sequence[object]) -> Node:
    """Return a tensor of pairs, with an axis of 2 at the end."""
    return w(aten.stack.default, [w.whole(part, shape) for part in x], len(shape))


def _size(w: PairWriter, node: Node) -> Part:
    x, dim = operands(node)
    return w.sizes([value_of(x).shape[dim]])[0]


def _product(w: PairWriter, node: Node) -> ComplexPair:
    """Multiply along a dim: sizes are multiplied and angles added."""
    x, *dims = operands(node)
    pair = w.fitted(w.pair(x), value_of(x).shape)
    size, turn = w(node.target, absolute(w, pair), *dims), angle(w, pair)
    if opname(node) == "cumprod":
        return polar(w, size, w(aten.cumsum.default, turn, *dims))
    if not dims:
        return polar(w, size, w(aten.sum.default, turn))
    return polar(w, size, w(aten.sum.dim_IntList, turn, dims[:1], *dims[1:]))


RULES: Rules = {
    **dict.fromkeys((*OF_ONE, *OF_SEVERAL), by_part),
    **dict.fromkeys(("zeros", "ones", "empty", "full", "scalar_tensor"), _filled),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), _filled),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "empty_like"), _filled),
    "_to_copy": _cast,
    **dict.fromkeys(("cumprod", "prod"), _product),
    "mH": lambda w, node: conjugate(w, by_part(w, node)),
    "steps": _steps,
    "sym_size": _size,
    **dict.fromkeys(("view", "_unsafe_view"), _view),
    "view_as_complex": lambda w, node: parts_of(w, operands(node)[0]),
    "view_as_real": _joined,
}
