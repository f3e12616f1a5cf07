"""The inputs that a converted model is compared with its original on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from linexport.graph.dims import DimRange, related, sequence
from linexport.parity.input_kinds import draw_like
from linexport.sources.bounds import bounds_of
from linexport.sources.loaded_model import LoadedModel
from linexport.system.torch_internals.trees import pytree

NEVER_TRACED = (37, 150, 101)
"""Lengths tried in addition to the traced one; none is a multiple of a usual chunk."""

LONG_SEQUENCE = 4096 + 1
"""At least 4096, and not a multiple of a usual chunk."""

AREA = 64 * LONG_SEQUENCE
"""Values along the dynamic dimensions of one input where it has several, such as the height and
width of an image: at least 4096 patches of 8 x 8."""

BATCHES = (1, 3)

MAGNITUDES = {"large": 1e2, "tiny": 1e-3, "zeros": 0.0}
"""Cases of floating inputs that are not of unit variance, with the factor on them."""

SIDE_BY_SIDE = "sequences side by side"
"""Name of cases whose sequences have lengths of their own, and no padding."""

EXCLUDES = -1e4
"""The least that is added to scores to exclude them from a softmax; float16 has it."""


@dataclass(frozen=True)
class Case:
    """Sizes of the dynamic dimensions and the kind of values to draw.

    Attributes:
        name: for people.
        sizes: by dimension name; those that follow from another's are made to do so.
        seed: of the random values.
        magnitude: factor on floating inputs of unit variance; 0 gives zeros.
        like: inputs are of the kinds that those of the example are, see ``input_kinds``.
    """

    name: str
    sizes: Mapping[str, int]
    seed: int
    magnitude: float = 1.0
    like: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", related(self.sizes))

    @property
    def at(self) -> str:
        """The sizes in words, such as "batch 3, seq 16"."""
        return ", ".join(f"{name} {size}" for name, size in self.sizes.items())


@dataclass(frozen=True)
class ChosenSizes:
    """Sizes to check in place of the usual ones; empty for those."""

    lengths: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()


DEFAULT_SIZES = ChosenSizes()


def plan_cases(
    dims: Mapping[str, DimRange],
    traced: Mapping[str, int],
    floating: bool,
    seed: int,
    shapes: Sequence[Sequence[int | str]] = (),
    chosen: ChosenSizes = ChosenSizes(),
    behind: int = 0,
) -> list[Case]:
    """Cases for a model with these dynamic dimensions.

    Lengths 1, the traced one, two never traced and one of at least 4096 (or the longest allowed),
    with batch 1 and 3 and a new seed each; then, where there are floating inputs, large and tiny
    magnitudes and zeros. ``shapes`` are those of the inputs: where one has several dynamic
    dimensions, the longest keeps their product to ``AREA``. ``chosen`` takes the place of lengths
    and batches. ``behind`` is a length at which constants that reach back have done so.
    """
    longest = _longest(dims, shapes)
    lengths = chosen.lengths or _lengths(dims, traced, longest)
    first = sequence(dims)
    farthest = dims[first].nearest(behind) if first and not chosen.lengths else 0
    cases: list[Case] = []
    for length in (*lengths, farthest) if farthest > longest >= LONG_SEQUENCE else lengths:
        for batch in chosen.batches or (BATCHES if length < longest else BATCHES[:1]):
            sizes = related(_sizes(dims, batch, length))
            case = Case("random", sizes, seed + len(cases))
            if sizes not in [c.sizes for c in cases]:
                cases.append(case)
    if floating:
        middle = _sizes(dims, (chosen.batches or BATCHES)[-1], sorted(lengths)[len(lengths) // 2])
        for name, magnitude in MAGNITUDES.items():
            cases.append(Case(name, middle, seed + len(cases), magnitude))
    return cases


def longer_cases(dims: Mapping[str, DimRange], traced: Mapping[str, int], seed: int) -> list[Case]:
    """Cases of twice and three times the traced length, where the dimensions allow them.

    A model of whole chunks takes these where it takes none of the usual lengths, although nothing
    in its trace says what its chunks are.
    """
    first = sequence(dims)
    lengths = [n * traced[first] for n in (2, 3)] if first else []
    sizes = [_sizes(dims, BATCHES[-1], n) for n in lengths if first and dims[first].allows(n)]
    return [Case("random", found, seed) for found in sizes]


def complete_inputs(
    loaded: LoadedModel,
    names: Sequence[str],
    shapes: Sequence[Sequence[int | str]],
    given: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Return all inputs in their order, those that are not given at their defaults.

    ``names`` and ``shapes`` are those of the flattened inputs of ``loaded``.
    """
    sizes: dict[int | str, int] = {}
    for name, shape in zip(names, shapes, strict=True):
        if name in given:
            sizes |= dict(zip(shape, given[name].shape, strict=True))
    leaves = [
        x for x in pytree.tree_leaves((loaded.args, loaded.kwargs)) if isinstance(x, torch.Tensor)
    ]
    found = {}
    for name, shape, leaf in zip(names, shapes, leaves, strict=True):
        if name in given:
            found[name] = given[name]
        else:
            size = [d if isinstance(d, int) else sizes[d] for d in shape]
            found[name] = torch.full(size, loaded.defaults[name], dtype=leaf.dtype).numpy()
    return found


def _longest(dims: Mapping[str, DimRange], shapes: Sequence[Sequence[int | str]]) -> int:
    """Return the longest length to try, where the range allows it; odd in any case."""
    lengths = {name for name, limits in dims.items() if not limits.batch}
    together = max((len(lengths.intersection(shape)) for shape in shapes), default=1)
    return LONG_SEQUENCE if together < 2 else int(AREA ** (1 / together)) - 1 | 1


def _lengths(
    dims: Mapping[str, DimRange], traced: Mapping[str, int], longest: int = LONG_SEQUENCE
) -> list[int]:
    first = sequence(dims)
    if first is None:
        return [1]
    limits = dims[first]
    longest = limits.nearest(longest)
    # In a range that leaves those out, its optimum, its middle and its ends take their place.
    never_traced = map(limits.rounded, NEVER_TRACED)
    tried = (*never_traced, limits.opt, (limits.min + longest) // 2, limits.min, longest)
    inside = dict.fromkeys(n for n in tried if n and n != traced[first] and limits.allows(n))
    target = [limits.multiple, traced[first], *list(inside)[:2], longest]
    return list(dict.fromkeys(n for n in target if limits.allows(n)))


def _sizes(dims: Mapping[str, DimRange], batch: int, length: int) -> dict[str, int]:
    """One size per dimension; a second sequence dimension gets another length than the first."""
    sizes = {}
    for position, (name, limits) in enumerate(
        sorted(dims.items(), key=lambda item: not item[1].batch)
    ):
        sizes[name] = limits.nearest(batch if limits.batch else length + 3 * max(position - 1, 0))
    return sizes


def is_square(shape: Sequence[int | str]) -> bool:
    """Return whether an input has a value for each pair of tokens, as masks do."""
    return len(shape) > 1 and shape[-1] == shape[-2] and isinstance(shape[-1], str)


def _excluded(example: torch.Tensor, dims: Sequence[int | str]) -> float | None:
    """Return what an input adds to scores to exclude them; None for one that is not added.

    Such a mask is 0, or a bias below it, where another one is 1, or a weight: zeros in an example
    of pairs exclude everything from a product.
    """
    masks = example.is_floating_point() and any(isinstance(size, str) for size in dims)
    if not masks or not example.numel() or example.max() > 0:
        return None
    least = float(example.min())
    return least if least <= EXCLUDES else EXCLUDES if is_square(dims) else None


def _mask(
    shape: Sequence[int], generator: torch.Generator, weighted: bool, excluded: float | None
) -> torch.Tensor:
    """Return ones or weights, and zeros; of one that is added, their logarithms.

    Each token has itself at least, or the first where the last two sizes are not the same.
    """
    kept = torch.rand(tuple(shape), generator=generator) < 0.8
    if shape[-2:-1] == shape[-1:]:
        kept |= torch.eye(shape[-1]).bool()
    else:
        kept[..., 0] = True
    weights = torch.rand(tuple(shape), generator=generator) / 2 + 0.5
    weights = weights if weighted else torch.ones(())
    return kept * weights if excluded is None else torch.where(kept, weights.log(), excluded)


def _held(
    example: torch.Tensor, shape: Sequence[int], generator: torch.Generator
) -> torch.Tensor | None:
    """Return values of an example for pairs of tokens; None where it has zeros and ones alone.

    Each token has of itself what one has there: rows need not be excluded as a whole.
    """
    if (
        not example.is_floating_point()
        or not example.numel()
        or bool(((example == 0) | (example == 1)).all())
    ):
        return None
    found = _choose(example.flatten(), shape, generator)
    own = _choose(example.diagonal(dim1=-2, dim2=-1).flatten(), shape, generator)
    return torch.where(torch.eye(shape[-1]).bool(), own, found)


def _choose(values: torch.Tensor, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return values[torch.randint(len(values), tuple(shape), generator=generator)]


def unbounded(loaded: LoadedModel, cases: Sequence[Case]) -> list[Case]:
    """Return a case of normal values where floating inputs of the example are bounded.

    Args:
        loaded: the original.
        cases: that are planned.
    """
    leaves = pytree.tree_leaves((loaded.args, loaded.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if loaded.graph is not None or all(bounds_of(tensor) is None for tensor in tensors):
        return []
    return [Case("unbounded", cases[-1].sizes, cases[-1].seed + 1, like=False)]


def draw_inputs(
    loaded: LoadedModel, shapes: Sequence[Sequence[int | str]], case: Case
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Inputs of a case, nested as the model takes them.

    ``shapes`` are those of the flattened inputs, with dimension names for dynamic sizes.
    """
    leaves, structure = pytree.tree_flatten((loaded.args, loaded.kwargs))
    generator = torch.Generator().manual_seed(case.seed)
    drawn: list[object] = []
    tensors = iter(shapes)
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            drawn.append(leaf)
            continue
        dims = next(tensors)
        shape = [d if isinstance(d, int) else case.sizes[d] for d in dims]
        excluded, real = _excluded(leaf, dims), leaf.dtype == torch.bool or leaf.is_floating_point()
        masks = excluded is not None or (is_square(dims) and real)
        if masks and case.magnitude in (0, 1):  # any other values at other magnitudes
            # The example of a file in ONNX is none of its user.
            own = excluded is None and loaded.graph is None
            held = _held(leaf, shape, generator) if own else None
            mask = _mask(shape, generator, case.seed % 2 == 1, excluded) if held is None else held
            drawn.append(mask.to(leaf.dtype))
            continue
        # The range that is known of integers goes before that of the example.
        own = loaded.graph is None and position not in loaded.integer_ranges
        like = draw_like(leaf, dims, shape, generator) if own and case.like else None
        if like is not None:
            drawn.append(like)
        elif leaf.dtype == torch.bool:
            drawn.append(torch.rand(shape, generator=generator) < 0.8)
        elif leaf.is_floating_point():
            drawn.append(case.magnitude * torch.randn(shape, generator=generator, dtype=leaf.dtype))
        else:
            low, high = loaded.integer_ranges.get(
                position, (int(leaf.min()), int(leaf.max()) + 1) if leaf.numel() else (0, 2)
            )
            if position in loaded.places:
                high = case.sizes[loaded.places[position]]
            drawn.append(torch.randint(low, high, shape, generator=generator, dtype=leaf.dtype))
    args, kwargs = pytree.tree_unflatten(drawn, structure)
    return args, kwargs
