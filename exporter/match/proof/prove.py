"""The original nodes and the fused ones on the same random inputs: equal, or no rewrite.

Both run in ONNX Runtime without optimisations, the fused node by its portable function body, at
several lengths, with batch and heads above 1 where they are not fixed, and kinds of inputs: unit
variance; far on the negative side, where positive feature maps and so denominators are small; tiny;
and, where features multiply channels, queries nearly orthogonal to all keys, whose scores are small
sums of large terms. Differences are taken relative to the largest value of the original's output.

What is in half precision is computed in float32 on both sides: rounding and overflow, which differ
with the order of a sum, say nothing of a formula. What they do is seen where the artifact is
compared with its original.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_graphsurgeon as gs
import onnxruntime

from linexport.graph.monomials import CHUNKS, Size, parse
from linexport.graph.run_subgraph import NotRunnableError, session, size_value, symbols_in
from linexport.graph.tensors import known_shape
from linexport.manifest.matches import ProofRecord
from linexport.match.proof.sampling import Draw, bounded, falling

log = logging.getLogger(__name__)

PROVEN_LENGTHS = (5, 70, 64, 128, 192, 16, 36, 8, 1)
"""Tried in this order: no multiple of a chunk first, then what models in chunks may ask for."""

STRIDES = (1, 2, 4, 8, 16, 32)
"""Pixels of a side of a patch that are tried where the patches of an image are the tokens."""

MIN_LENGTHS_PROVEN = 2
"""Lengths that must be compared, where the length is not fixed."""

RELATIVE, ABSOLUTE = 5e-5, 1e-30
"""Differences allowed, of the largest value: sums in another order differ by 6e-8 a term, 1e-5 over
1e4 terms. A wrong mask, epsilon or scale gives 1e-3 and more where the denominator is small."""

LOW = 40
"""Times that where features are small: elu(x) + 1 in float32 is off by 6e-8, which at features of
1e-3 is 1e-4 of the output. A wrong epsilon gives a tenth of it there."""

SLANT = 1e-2
"""The cosine of nearly orthogonal queries and keys: features of degree 2 lose 1e4 roundings."""

HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

SMALLEST = 1e-12
"""Outputs all below this are compared absolutely."""


@dataclass(frozen=True)
class RewriteCandidate:
    """A rewrite to be checked.

    Attributes:
        inputs: tensors of the graph that both sides read, with their sizes.
        known: values of inputs that are the same at every run.
        positive, negative: names of inputs that must be drawn so, for the denominator not to change
            its sign and for decays to decay.
        steady: names of inputs that are of unit variance in every kind: decays that are written as
            a quotient of products leave float32 sooner than the recurrence does.
        bounded: what makes values of other inputs from normal ones, in every kind.
        channels: dims of channels of queries (0) and keys (1) whose scores are to be nearly 0.
        original, replacement: the nodes of each, in order, and what they compute.
        length: the size of a sequence.
        reach: how many tokens before a query its newest key may be: shorter sequences show nothing.
        imports: operator sets of the model.
    """

    inputs: Sequence[tuple[gs.Variable, Sequence[Size]]]
    known: Mapping[str, np.ndarray]
    positive: frozenset[str]
    negative: frozenset[str]
    steady: frozenset[str]
    bounded: Mapping[str, Draw]
    channels: Mapping[str, tuple[int, int]]
    original: tuple[Sequence[gs.Node], gs.Tensor]
    replacement: tuple[Sequence[gs.Node], gs.Tensor]
    length: Size
    reach: int
    imports: Mapping[str, int]


class ProofFailedError(Exception):
    """The two sides differ, or could not be compared; the text says how."""


def prove(candidate: RewriteCandidate) -> ProofRecord:
    """Compare both sides.

    Raises:
        ProofFailedError: see there.
    """
    given = [tensor for tensor, _ in candidate.inputs]
    try:
        before = session(given, *candidate.original, candidate.imports, wide=True)
        after = session(given, *candidate.replacement, candidate.imports, wide=True)
    except NotRunnableError as error:
        raise ProofFailedError(str(error)) from None
    random = np.random.default_rng(0)
    worst, sizes = 0.0, list[dict[str, int]]()
    problem = ""
    for symbols in _assignments(candidate):
        try:
            if not size_value(candidate.length, symbols):
                problem = "there are no tokens where sequences are this short"
                continue  # fewer tokens than one chunk: nothing would be compared
            shapes = [[size_value(s, symbols) for s in shape] for _, shape in candidate.inputs]
        except NotRunnableError:  # a quotient by a number of chunks that is 0
            shapes = [[-1]]
        if any(size < 0 for shape in shapes for size in shape):
            problem = "the model does not take sequences this short"
            continue
        for kind in ("normal", "low", "tiny", *(["orthogonal"] if candidate.channels else [])):
            fed = {
                tensor.name: _draw(random, tensor, shape, kind, candidate)
                for tensor, shape in zip(given, shapes, strict=True)
            }
            try:
                expected = before.run(None, fed)[0]
            except Exception as error:
                # A length this model does not take, for instance no multiple of its chunk.
                log.info("the original nodes do not run at %s: %s", symbols, error)
                problem = f"they do not take {size_value(candidate.length, symbols)} tokens"
                break
            worst = max(worst, _difference(candidate, expected, after, fed, symbols, kind))
        else:
            sizes.append(dict(symbols))
        if len(sizes) == MIN_LENGTHS_PROVEN or (sizes and not symbols):
            break
    fixed = candidate.length.known is not None
    if len(sizes) < (1 if fixed else MIN_LENGTHS_PROVEN):
        raise ProofFailedError(
            f"the original nodes run at too few lengths to be compared: {problem}, nor others that "
            "were tried. Where they take whole chunks alone, dynamic_shapes says so, 64 * "
            'torch.export.Dim("n")'
        )
    return ProofRecord(tuple(sizes), worst)


def is_run_at(candidate: RewriteCandidate, lengths: Mapping[str, int]) -> bool:
    """Return whether the original nodes take sequences of these lengths, by their symbols."""
    symbols = {**next(_assignments(candidate)), **lengths}
    random = np.random.default_rng(0)
    try:
        given = [t for t, _ in candidate.inputs]
        before = session(given, *candidate.original, candidate.imports, wide=True)
        fed = {
            tensor.name: _draw(
                random, tensor, [size_value(s, symbols) for s in shape], "normal", candidate
            )
            for tensor, shape in candidate.inputs
        }
        before.run(None, fed)
    except Exception:  # whatever ONNX Runtime says of it
        return False
    return True


def _difference(
    candidate: RewriteCandidate,
    expected: np.ndarray,
    after: onnxruntime.InferenceSession,
    fed: dict[str, np.ndarray],
    symbols: Mapping[str, int],
    kind: str,
) -> float:
    try:
        got = after.run(None, fed)[0]
    except Exception as error:
        _check_chunks(candidate, expected.shape, symbols)
        log.info("the fused node does not run at %s: %s", symbols, error)
        at = ", ".join(f"{name} = {size}" for name, size in symbols.items())
        raise ProofFailedError(
            f"the operator does not take the shapes that the original nodes take ({at})"
        ) from None
    at = f"on {kind} inputs at {', '.join(f'{k} = {v}' for k, v in symbols.items()) or 'its size'}"
    if got.shape != expected.shape:
        _check_chunks(candidate, expected.shape, symbols)
        raise ProofFailedError(f"shape {got.shape} instead of {expected.shape} {at}")
    a, b = expected.astype(np.float64), got.astype(np.float64)
    finite = np.isfinite(a)
    if np.isnan(b[finite]).any() and any(node.op == "Log" for node in candidate.replacement[0]):
        raise ProofFailedError(
            "the operator takes logarithms, and what it would take one of may be negative, such as "
            f"a decay of both signs ({at})"
        )
    if not np.array_equal(finite, np.isfinite(b)):
        raise ProofFailedError(f"one side is finite where the other is not, {at}")
    if not finite.any():
        return 0.0
    magnitude = float(np.abs(a[finite]).max())
    largest = float(np.abs(a[finite] - b[finite]).max())
    share = RELATIVE * (LOW if kind == "low" else 1)
    limit = share * magnitude + ABSOLUTE
    if largest > limit and largest > SMALLEST * RELATIVE:
        raise ProofFailedError(
            f"relative difference {largest / max(magnitude, 1e-300):.1e} {at}; "
            f"at most {limit / max(magnitude, 1e-300):.0e} is rounding"
        )
    return largest / magnitude if magnitude else 0.0


def _check_chunks(
    candidate: RewriteCandidate, shape: tuple[int, ...], symbols: Mapping[str, int]
) -> None:
    """Refuse an original of chunks that runs where they are not whole, with other sizes.

    Raises:
        ProofFailedError: it is one.
    """
    chunks = [m["chunk"] for atom in candidate.length.atoms if (m := CHUNKS.fullmatch(atom))]
    try:
        stated = tuple(size_value(parse(n), symbols) for n in known_shape(candidate.replacement[1]))
    except NotRunnableError:
        return
    if chunks and shape != stated:
        at = ", ".join(f"{name} = {size}" for name, size in symbols.items())
        raise ProofFailedError(
            f"it is computed where chunks of {chunks[0]} tokens are not whole as well, with other "
            f"sizes: at {at} its shape is {list(shape)}, where {list(stated)} was expected. A -1 "
            "in a reshape to chunks does this: write the size in its place, or give dynamic_shapes "
            f'whole chunks alone, {chunks[0]} * torch.export.Dim("n")'
        )


def _along(x: np.ndarray, place: int) -> list[int]:
    return [-1 if p == place else 1 for p in range(x.ndim)]


def _assignments(candidate: RewriteCandidate) -> Iterator[dict[str, int]]:
    """Values for the symbols: lengths in turn, everything else small and above 1."""
    known = sorted({n for _, shape in candidate.inputs for s in shape for n in symbols_in(s)})
    along = [n for n in known if n in symbols_in(candidate.length)]
    for count, length in enumerate(PROVEN_LENGTHS):
        # Neighbours differ, so that exchanged dims show.
        symbols = {n: 2 + (i + count) % 2 for i, n in enumerate(known)}
        if along:
            symbols[along[-1]] = length + (candidate.reach if candidate.reach > 1 else 0)
        yield _in_patches(candidate.length, symbols, along) if len(along) > 1 else symbols
        if not along:
            return


def _in_patches(length: Size, symbols: Mapping[str, int], along: Sequence[str]) -> dict[str, int]:
    """Return sizes of an image of whole patches, (height // 4) * (width // 4), for those of pixels.

    Args:
        length: the number of patches.
        symbols: the sizes where each pixel is a patch.
        along: the sides of the image among them.
    """
    pixels = math.prod(symbols[name] for name in along)
    for stride in STRIDES:
        scaled = {n: size * stride if n in along else size for n, size in symbols.items()}
        with contextlib.suppress(NotRunnableError):
            if size_value(length, scaled) >= pixels:
                return scaled
    return dict(symbols)


def _draw(
    random: np.random.Generator,
    tensor: gs.Tensor,
    shape: list[int],
    kind: str,
    candidate: RewriteCandidate,
) -> np.ndarray:
    """Return values of an input: those of half precision, in float32."""
    values = _drawn(random, tensor, shape, kind, candidate)
    return values.astype(np.float32) if values.dtype in HALVES else values


def _drawn(
    random: np.random.Generator,
    tensor: gs.Tensor,
    shape: list[int],
    kind: str,
    candidate: RewriteCandidate,
) -> np.ndarray:
    dtype = np.dtype(tensor.dtype)
    if tensor.name in candidate.known:
        return candidate.known[tensor.name]
    if dtype == np.dtype(bool):
        mask = random.random(shape) < 0.7
        # One key is read by all queries. Along a dim of one entry, everything would be true, and
        # nothing be seen of what is computed elsewhere.
        along = next((place for place in reversed(range(mask.ndim)) if shape[place] > 1), None)
        if along is not None:
            np.moveaxis(mask, along, 0)[:1] = True
        return np.asarray(mask)
    if dtype.kind in "iu":
        return random.integers(0, 2, shape).astype(dtype)
    x = random.standard_normal(shape)
    if tensor.name in candidate.bounded:
        return candidate.bounded[tensor.name](x).astype(dtype)
    inside = bounded(tensor.name, x)
    if inside is not None:
        return inside.astype(dtype)
    if tensor.name in candidate.steady:
        kind = "normal"
    if kind == "orthogonal" and tensor.name in candidate.channels:
        # Queries live in channels 0, 2, 4, ..., keys in 1, 3, 5, ...
        place, side = candidate.channels[tensor.name]
        outside = np.arange(shape[place]) % 2 != side
        return (x * np.where(outside, SLANT, 1.0).reshape(_along(x, place))).astype(dtype)
    if tensor.name in candidate.positive:
        # Away from 0: a denominator of few keys must not vanish by chance.
        x = (np.abs(x) + 0.1) * {"normal": 1.0, "low": 1e-2, "tiny": 1e-4}[kind]
    elif tensor.name in candidate.negative:
        # Neither at once, nor so late that a wrong decay would not show at the lengths compared.
        x = falling(x)
    elif kind == "low":
        # elu(x) + 1 = exp(x) is near 1e-3 here, where an epsilon or a bound shows most.
        x = x / 2 - 7
    elif kind == "tiny":
        x *= 1e-4
    return x.astype(dtype)
