"""Convolutions by Fourier transforms in a graph, by the nodes that compute them.

    Re ifft(whole(rfft(u, n) rfft(v, n)))

with complex numbers as pairs, their product by four real ones, and the spectrum completed to the
whole one, as ``precise_fourier_transforms`` leaves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import onnx_graphsurgeon as gs

from linexport.graph.edit import producer
from linexport.graph.monomials import Size
from linexport.graph.run_subgraph import NotRunnableError, size_value, symbols_in
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.rules.padding import ends_of, fills_zero

COMPARED_LENGTHS = (1, 2, 3, 64, 1000, 1 << 20)
"""Numbers of tokens at which sizes are compared."""


class FourierConvolution(NamedTuple):
    """A cyclic convolution along one dim, counted from the end.

    Attributes:
        operands: what is convolved, before zeros are appended.
        along: the dim of all three.
        length: of the cycle, at least twice the tokens but one.
        transforms: of the two operands.
        turned: the Slice that completes the spectrum of the result.
    """

    operands: tuple[gs.Tensor, gs.Tensor]
    along: int
    length: Size
    transforms: tuple[gs.Node, gs.Node]
    turned: gs.Node


def read_convolution(e: Evaluator, tensor: gs.Tensor, tokens: Size) -> FourierConvolution | None:
    """Return the convolution that a tensor is, where its first tokens are those of a plain one."""
    inverse = _inverse(e, tensor)
    completed = None if inverse is None else _completed(e, inverse.inputs[0])
    spectra = None if completed is None else _multiplied(e, completed.inputs[0])
    if inverse is None or completed is None or spectra is None:
        return None
    turned = completed
    first, second = (producer(_unsqueezed(e, s), "DFT") for s in spectra)
    if first is None or second is None:
        return None
    length, other = _length(e, first), _length(e, second)
    missing = e.values.get(turned.inputs[1])
    if length is None or length != other or missing is None or missing.size != 1:
        return None
    start = missing.item()
    start = start if isinstance(start, Size) else Size(int(start))
    # rfft gives n // 2 + 1 numbers, and the others follow: so the inverse is of length n.
    if not compare(start, length, lambda a, b: a == b - b // 2 - 1):
        return None
    # Two signals of T tokens convolve to 2 T - 1: a shorter cycle would wrap around.
    if not compare(length, tokens, lambda a, b: a >= 2 * b - 1):
        return None
    operands = [_operand(e, node, s) for node, s in zip((first, second), spectra, strict=True)]
    x, y = operands
    sizes = e.sizes(tensor)
    if x is None or y is None or sizes is None:
        return None
    alongs = {x[1], y[1], _from_end(e, inverse, len(sizes))}
    if len(alongs) != 1:
        return None
    return FourierConvolution((x[0], y[0]), x[1], length, (first, second), turned)


def wraps_around(e: Evaluator, node: gs.Node) -> bool:
    """Return whether a transform is too short for a convolution whose ends do not meet."""
    inverses = (n for n in e.graph.nodes if n.op == "DFT" and n.attrs.get("inverse", 0))
    length = _length(e, node)
    if length is None or next(inverses, None) is None:
        return False
    for spectrum in (node.outputs[0], None):  # as it is, or without a first dim of size 1
        operand = _operand(e, node, spectrum)
        sizes = None if operand is None else e.sizes(operand[0])
        if operand is not None and sizes is not None:
            return not compare(length, sizes[operand[1]], lambda a, b: a >= 2 * b - 1)
    return False


def compare(a: Size, b: Size, holds: Callable[[int, int], bool]) -> bool:
    """Return whether something holds of two sizes, whatever the one symbol in them is."""
    symbols = symbols_in(a) | symbols_in(b)
    given = [dict.fromkeys(symbols, n) for n in COMPARED_LENGTHS]
    try:
        values = [(size_value(a, one), size_value(b, one)) for one in given]
    except NotRunnableError:
        return False
    return len(symbols) < 2 and all(holds(x, y) for x, y in values)


def _uncast(tensor: gs.Tensor) -> gs.Tensor:
    """Return a tensor before its casts."""
    node = producer(tensor, "Cast")
    return tensor if node is None else _uncast(node.inputs[0])


def _inverse(e: Evaluator, tensor: gs.Tensor) -> gs.Node | None:
    """Return the inverse transform whose real part a tensor is."""
    squeezed = producer(_uncast(tensor), "Squeeze")
    if squeezed is None or e.ints(squeezed, 1, "axes") != [-1]:
        return None
    part = _part(e, squeezed.inputs[0])
    # The exporter takes the real part of what is real.
    while part is not None and (inner := _part(e, part[0])) is not None:
        part = inner if part[1] == 0 else None
    if part is None or part[1] != 0:
        return None
    node = producer(part[0], "DFT")
    # The real part of the inverse transform of a complete spectrum is irfft.
    plain = node is not None and node.attrs.get("inverse", 0) and not node.attrs.get("onesided", 0)
    return node if plain and node is not None and _length_is_own(node) else None


def _length_is_own(node: gs.Node) -> bool:
    return len(node.inputs) < 2 or node.inputs[1].is_empty()


def _part(e: Evaluator, tensor: gs.Tensor) -> tuple[gs.Tensor, int] | None:
    """Return of what a tensor is the real (0) or the imaginary part (1)."""
    node = producer(_uncast(tensor), "Slice")
    if node is None or e.ints(node, 3, "axes") != [-1] or len(node.inputs) > 4:
        return None
    start, end = e.ints(node, 1, "starts"), e.ints(node, 2, "ends")
    if start not in ([0], [1]) or end != [start[0] + 1]:
        return None
    return _uncast(node.inputs[0]), start[0]


def _completed(e: Evaluator, tensor: gs.Tensor) -> gs.Node | None:
    """Return the Slice that a spectrum is completed by."""
    joined = producer(tensor, "Concat")
    product = None if joined is None else producer(joined.inputs[-1], "Mul")
    turned = None if product is None else producer(product.inputs[0], "Slice")
    if joined is None or product is None or turned is None or len(joined.inputs) != 2:
        return None
    signs = e.values.numbers(product.inputs[1])
    # A real signal has X_{n-m} = conj(X_m): the rest is the half spectrum backwards, with the
    # imaginary part negated.
    backwards = e.ints(turned, 2, "ends") == [0] and e.ints(turned, 4, "steps") == [-1]
    along = e.ints(turned, 3, "axes") == [joined.attrs["axis"]]
    if signs is None or signs.tolist() != [1, -1] or not backwards or not along:
        return None
    if turned.inputs[0] is not joined.inputs[0]:
        return None
    return turned if producer(turned.inputs[1], "Sub") is not None else None


def _multiplied(e: Evaluator, spectrum: gs.Tensor) -> tuple[gs.Tensor, gs.Tensor] | None:
    """Return the two tensors whose complex product one is, by its real and imaginary part."""
    joined = producer(_uncast(spectrum), "Concat")
    if joined is None or joined.attrs["axis"] != -1 or len(joined.inputs) != 2:
        return None
    real, imaginary = (producer(t, op) for t, op in zip(joined.inputs, ("Sub", "Add"), strict=True))
    if real is None or imaginary is None:
        return None
    products = [producer(t, "Mul") for t in (*real.inputs, *imaginary.inputs)]
    factors = [[_part(e, t) for t in p.inputs] for p in products if p is not None]
    parts = [[(f[0].name, f[1]) for f in pair if f is not None] for pair in factors]
    first, second = (
        (f[0] if f is not None else None for f in factors[0]) if factors else (None, None)
    )
    if first is None or second is None:
        return None
    # (a + b i) (c + d i) = a c - b d + (a d + b c) i
    ways = ((0, 0), (1, 1), (0, 1), (1, 0))
    expected = [[(first.name, i), (second.name, j)] for i, j in ways]
    return (first, second) if parts == expected else None


def _length(e: Evaluator, node: gs.Node) -> Size | None:
    """Return the length of a transform that states it."""
    stated = e.values.get(node.inputs[1]) if len(node.inputs) > 1 else None
    if stated is None or stated.size != 1:
        return None
    found = stated.item()
    return found if isinstance(found, Size) else Size(int(found))


def _from_end(e: Evaluator, node: gs.Node, rank: int) -> int | None:
    """Return the axis of a transform, counted from the end of a tensor of that rank.

    Its input has one dim more, of real and imaginary parts.
    """
    axis = e.ints(node, 2, "axis")
    if axis is None:
        return None
    return axis[0] - rank if axis[0] >= 0 else axis[0] + 1


def _unsqueezed(e: Evaluator, spectrum: gs.Tensor) -> gs.Tensor:
    """Return a spectrum with a first dim of size 1, which the exporter takes away again."""
    node = producer(spectrum, "Squeeze")
    return (
        _uncast(node.inputs[0]) if node is not None and e.ints(node, 1, "axes") == [0] else spectrum
    )


def _operand(
    e: Evaluator, node: gs.Node, spectrum: gs.Tensor | None
) -> tuple[gs.Tensor, int] | None:
    """Return what a transform is of, before zeros were appended, and along which dim."""
    if node.attrs.get("inverse", 0) or not node.attrs.get("onesided", 0):
        return None
    pairs = producer(_uncast(node.inputs[0]), "Unsqueeze")
    first = [] if spectrum is node.outputs[0] else [0]
    if pairs is None or e.ints(pairs, 1, "axes") != [*first, -1]:
        return None
    given = _uncast(pairs.inputs[0])
    sizes = e.sizes(given)
    axis = None if sizes is None else _from_end(e, node, len(sizes) + len(first))
    if sizes is None or axis is None:
        return None
    pad = producer(given, "Pad")
    if pad is None:
        return given, axis
    front, behind = ends_of(e, pad)
    if front or list(behind) != [axis % len(sizes)] or not fills_zero(e, pad):
        return None
    # A negative padding cuts.
    if not compare(behind[axis % len(sizes)], sizes[axis], lambda a, b: a >= 0):
        return None
    return pad.inputs[0], axis
