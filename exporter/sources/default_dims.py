"""Dynamic dims of example inputs that come without any: batch and sequence.

Dim 0 of every tensor is the batch, unless it is a vector of another size than the batch of the
others, such as a scale of channels, or a stack of states, whose dim 0 is of layers and dim 1 the
batch. Dim 1 is the sequence in integer and boolean tensors of rank 2
(tokens, masks) and in floating-point tensors of rank 3 (embeddings). In floating-point tensors of
rank 2 (gates, resets), others of rank 3 (resets of heads) and any of rank 5 (an image of each step)
it may be, where it has the size of a sequence. Where sizes do not tell, as a width is as large or
several tensors have dims 1 of their own (a state), the module is run with longer ones: those vary
that it takes at another length. torch.export takes a dim of size 1 for a constant, so such examples
are repeated to size 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any

from linexport.system.untyped import DynamicShapes, Positional

if TYPE_CHECKING:
    import torch

Runs = Callable[[Positional], "list[torch.Tensor] | None"]
"""Return the outputs of the module on these examples; None where it does not take them."""

_SMALLEST = 2

_MOST_TRIED = 4
"""Tensors, or sizes, whose dim 1 is tried out: sixteen runs of the module at most, at a length."""


@dataclass(frozen=True)
class DefaultDims:
    """Examples that can be traced and their dims.

    Attributes:
        args: the examples, dims of size 1 repeated where they are dynamic.
        dynamic_shapes: one entry per argument, in torch.export's notation.
        warnings: what was repeated or left constant, and why.
        unclear: those of the warnings that may be wrong, as sizes do not tell.
    """

    args: Positional
    dynamic_shapes: DynamicShapes
    warnings: tuple[str, ...]
    unclear: tuple[str, ...] = ()


def default_dims(
    args: tuple[object, ...], runs: Runs | None = None, one_batch: str | None = None
) -> DefaultDims:
    """Choose batch and sequence dims for example inputs.

    Args:
        args: tensors, or tuples, lists and dicts of them; anything else is constant.
        runs: runs the module; None where sizes alone have to tell.
        one_batch: why the batch does not vary; None where it does.
    """
    batches = _Batches.of(args, runs)
    fault = batches.fault
    if fault is not None:
        return DefaultDims(
            args,
            map_tensors(args, lambda tensor: None, constants=False),
            (f"all dims stay constant: {fault}. Give dynamic_shapes.",),
        )
    tokens = _Tokens.of(args, batches.in_front, runs)

    def dims(tensor: torch.Tensor) -> tuple[int, ...]:
        axis = batches.axis(tensor)
        if axis is None:
            return ()
        batch = () if one_batch else (axis,)
        return (*batch, 1) if id(tensor) in tokens.varying | tokens.numbers else batch

    return DefaultDims(
        repeat_ones(args, dims),
        map_tensors(
            args, lambda tensor: _spec(dims(tensor), id(tensor) in tokens.numbers), constants=False
        ),
        (
            *_warnings(batches.sizes, tokens.sequences, tokens.lengths, one_batch),
            *_constant(batches.others, args),
            *tokens.unclear,
        ),
        tokens.unclear,
    )


@dataclass(frozen=True)
class _Batches:
    """Where examples have the batch; tensors are known by their ids.

    Attributes:
        tensors: those that may have it in dim 0.
        sizes: of the batch: one, unless the examples differ.
        stacked: those that have it in dim 1.
        others: those that have none, though others of their rank have.
    """

    tensors: list[torch.Tensor]
    sizes: set[int]
    stacked: set[int]
    others: set[int]

    @classmethod
    def of(cls, args: tuple[object, ...], runs: Runs | None) -> _Batches:
        """Return the batches of examples, by running the module where there are several sizes."""
        tensors = [tensor for tensor in _tensors(args) if tensor.dim() > 0]
        # A vector may be of channels: tensors of more dims tell the batch where there are some.
        of_batches = [tensor for tensor in tensors if tensor.dim() > 1] or tensors
        stacked = _stacked(args, of_batches, runs)
        sizes = {tensor.shape[int(id(tensor) in stacked)] for tensor in of_batches}
        others = _without_batch(args, of_batches, stacked, runs) if len(sizes) > 1 else set()
        if others:
            sizes = {of_batches[0].shape[0]}
        return cls([t for t in tensors if id(t) not in others], sizes, stacked, others)

    @property
    def fault(self) -> str | None:
        """Why nothing varies; None where it may."""
        if len(self.sizes) > 1:
            sizes = ", ".join(str(size) for size in sorted(self.sizes))
            return f"the examples have different first dims ({sizes})"
        return "the examples have a batch of 0" if 0 in self.sizes else None

    @property
    def in_front(self) -> list[torch.Tensor]:
        """The tensors that have no batch in dim 1."""
        return [tensor for tensor in self.tensors if id(tensor) not in self.stacked]

    def axis(self, tensor: torch.Tensor) -> int | None:
        """Return the dim of a tensor that is the batch; None where it has none."""
        if id(tensor) in self.stacked:
            return 1
        if tensor.dim() == 0 or id(tensor) in self.others:
            return None
        return 0 if tensor.shape[0] in self.sizes else None


@dataclass(frozen=True)
class _Tokens:
    """Which examples have tokens in dim 1; tensors are known by their ids.

    Attributes:
        varying: those of the rank of tokens, masks or embeddings, whose dim 1 varies.
        numbers: others, which have numbers of each token.
        sequences: the sizes of dim 1 of tensors of such a rank.
        lengths: of these, those that vary.
        unclear: warnings of dims that may have tokens.
    """

    varying: set[int]
    numbers: set[int]
    sequences: set[int]
    lengths: set[int]
    unclear: tuple[str, ...]

    @classmethod
    def of(
        cls, args: tuple[object, ...], tensors: list[torch.Tensor], runs: Runs | None
    ) -> _Tokens:
        """Return the tokens of examples, by running the module where sizes do not tell.

        Args:
            args: the examples.
            tensors: those of them that may have tokens in dim 1.
            runs: see ``default_dims``.
        """
        sequences = {tensor.shape[1] for tensor in tensors if _has_sequence(tensor)}
        lengths = _dynamic_lengths(sequences)
        widths = {size for tensor in tensors for size in tensor.shape[2:]}
        varying = {id(t) for t in tensors if _has_sequence(t) and t.shape[1] in lengths}
        numbers = {id(t) for t in tensors if _has_numbers(t, lengths - widths - {1})}
        by_sizes = cls(varying, numbers, sequences, lengths, _unclear(tensors, lengths & widths))
        if runs is None or not (len(sequences) > 1 or lengths & widths or 1 in lengths):
            return by_sizes
        found = _tried(args, tensors, sequences - {0}, varying | numbers, runs)
        if found is None:
            return by_sizes
        varying = {id(t) for t in tensors if id(t) in found and _has_sequence(t)}
        lengths = {t.shape[1] for t in tensors if id(t) in found}
        return cls(varying, found - varying, sequences, lengths, ())


def _stacked(args: tuple[object, ...], tensors: list[torch.Tensor], runs: Runs | None) -> set[int]:
    """Return the tensors, by id, that have the batch of the first one in dim 1.

    Args:
        args: the examples.
        tensors: those that have a batch.
        runs: runs the module, where both dims have that size; None: dim 0 is the batch then.
    """
    batch = tensors[0].shape[0] if tensors else 0
    several = [t for t in tensors[1:] if t.dim() > 2 and t.shape[1] == batch]
    found = {id(t) for t in several if t.shape[0] != batch}
    unclear = {id(t) for t in several} - found
    if runs is None or not unclear:
        return found
    usual, stack = (_more_rows(args, batch, stacked) for stacked in (found, found | unclear))
    return found | unclear if runs(usual) is None and runs(stack) is not None else found


def _without_batch(
    args: tuple[object, ...], tensors: list[torch.Tensor], stacked: set[int], runs: Runs | None
) -> set[int]:
    """Return the tensors, by id, whose dim 0 is not the batch of the first one.

    None of them where nothing runs the module, or it does not take more rows of the others.

    Args:
        args: the examples.
        tensors: those that may have a batch.
        stacked: those of them that have it in dim 1.
        runs: runs the module.
    """
    batch = tensors[0].shape[0]
    if runs is None or not batch or runs(_more_rows(args, batch, stacked)) is None:
        return set()
    return {id(t) for t in tensors if t.shape[int(id(t) in stacked)] != batch}


def _more_rows(args: tuple[object, ...], batch: int, stacked: set[int]) -> Positional:
    """Return the examples with twice as many rows of each tensor that has so many.

    Args:
        args: the examples.
        batch: the size of the batch.
        stacked: tensors that have it in dim 1.
    """

    def grown(tensor: torch.Tensor) -> torch.Tensor:
        place = int(id(tensor) in stacked)
        if tensor.dim() <= place or tensor.shape[place] != batch:
            return tensor
        return tensor.repeat_interleave(_SMALLEST, place)

    return map_tensors(args, grown)


def _constant(others: set[int], args: tuple[object, ...]) -> Iterator[str]:
    """Yield warnings of tensors that have no batch."""
    for tensor in _tensors(args):
        if id(tensor) in others:
            yield f"all dims of the input of shape {tuple(tensor.shape)} are constant: no batch"


def _unclear(tensors: list[torch.Tensor], sizes: set[int]) -> tuple[str, ...]:
    """Return warnings of dims that may have tokens, by sizes that are lengths as well as widths."""
    numbers = {t.shape[1] for t in tensors if _has_numbers(t, sizes)}
    pairs = {t.shape[1] for t in tensors if t.dim() == 3 and t.shape[1] == t.shape[2]} & sizes
    given = "give examples of another length, or return dynamic_shapes"
    return (
        *(
            f"dim 1 of the inputs of shape (batch, {n}) is constant: {n} is a width as well as "
            f"a length. Where they have a number of each token, {given}"
            for n in sorted(numbers)
        ),
        *(
            f"dim 2 of the inputs of shape (batch, {n}, {n}) is constant: {n} is a width as "
            f"well as a length. Where they have a number of each pair of tokens, {given}"
            for n in sorted(pairs)
        ),
    )


def _tried(
    args: tuple[object, ...],
    tensors: list[torch.Tensor],
    lengths: set[int],
    usual: set[int],
    runs: Runs,
) -> set[int] | None:
    """Return the tensors, by id, whose dim 1 may vary; None where running does not tell.

    None of them where the module takes the examples alone, as one that computes a single step does.

    Args:
        args: the examples.
        tensors: those of them that may have a sequence.
        lengths: sizes that may be those of a sequence.
        usual: tensors that are taken to have tokens by their sizes.
        runs: runs the module.
    """
    several = [t for t in tensors if t.dim() in (2, 3) and t.shape[1] in lengths]
    groups = _groups({id(t): t.shape[1] for t in several})
    if not 0 < len(groups) <= _MOST_TRIED:
        return None
    unread = _unread(args, groups, runs)
    groups = {group: size for group, size in groups.items() if group not in unread}
    subsets = chain.from_iterable(combinations(groups, n) for n in range(1, len(groups) + 1))
    chosen = [frozenset().union(*subset) for subset in subsets]
    undecided = False
    for other in (lambda n: n + 3, lambda n: 2 * n, lambda n: 3 * n, lambda n: n - 1):
        if any(other(size) < 1 for size in groups.values()):
            continue
        resized = [map_tensors(args, partial(_resized, chosen=c, other=other)) for c in chosen]
        results = map(runs, resized)
        taken = {c for c, found in zip(chosen, results, strict=True) if found is not None}
        together = frozenset().union(*taken)
        if together in taken:
            return set(together)
        if usual & together in taken:
            return set(usual & together)
        undecided |= bool(taken)
    return None if undecided or runs(args) is None else set()


def _groups(sizes: dict[int, int]) -> dict[frozenset[int], int]:
    """Return tensors, by id, that are tried together, with their size.

    Each alone, or, of many tensors such as the caches of several layers, all of a size.
    """
    if len(sizes) <= _MOST_TRIED:
        return {frozenset({one}): size for one, size in sizes.items()}
    return {
        frozenset(one for one, own in sizes.items() if own == size): size
        for size in sorted({*sizes.values()})
    }


def _unread(
    args: tuple[object, ...], groups: dict[frozenset[int], int], runs: Runs
) -> set[frozenset[int]]:
    """Return the tensors of whose dim 1 the module reads, or returns, no more than the example has.

    Rows of a state, say, which it takes by number, or the last of which it returns. What has the
    length of another tensor may belong to that one, as a mask that is not used, and is none of
    them.

    Args:
        args: the examples.
        groups: the tensors that may have a sequence, with their sizes.
        runs: runs the module.
    """
    drawn = {id(t): _drawn(t) for t in _tensors(args)}

    def outputs(group: Set[int]) -> list[torch.Tensor] | None:
        def value(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in group:
                return drawn[id(tensor)]
            longer = _drawn(_resized(tensor, group, lambda n: n + 3))
            longer[:, : tensor.shape[1]] = drawn[id(tensor)]
            return longer

        return runs(map_tensors(args, value))

    plain, found = outputs(frozenset()) if len(groups) > 1 else None, set[frozenset[int]]()
    for group in groups if plain is not None else ():
        longer, shapes = outputs(group), [t.shape for t in _tensors(args) if id(t) in group]
        if longer is None or plain is None:
            continue
        if _same(longer, plain) or _returns(longer, plain, shapes):
            found.add(group)
    read = {size for group, size in groups.items() if group not in found}
    return {group for group in found if groups[group] not in read}


def _drawn(tensor: torch.Tensor) -> torch.Tensor:
    """Return random numbers in the place of floating ones: zeros would hide what is read."""
    import torch

    if not tensor.is_floating_point():
        return tensor.clone()
    random = torch.Generator().manual_seed(0)
    return torch.randn(tensor.shape, generator=random, dtype=tensor.dtype)


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    pairs = zip(some, others, strict=False)
    return len(some) == len(others) and all(
        a.shape == b.shape and bool((a == b).all()) for a, b in pairs
    )


def _returns(
    longer: list[torch.Tensor], plain: list[torch.Tensor], shapes: list[torch.Size]
) -> bool:
    """Return whether outputs have the shapes of inputs as they were, though these are longer."""
    sizes = [output.shape for output in longer]
    return sizes == [output.shape for output in plain] and all(s in sizes for s in shapes)


def _resized(tensor: torch.Tensor, chosen: Set[int], other: Callable[[int], int]) -> torch.Tensor:
    """Return one of the chosen tensors with another size of dim 1, any other as it is."""
    if id(tensor) not in chosen:
        return tensor
    size = other(tensor.shape[1])
    return tensor.repeat(1, -(-size // tensor.shape[1]), *[1] * (tensor.dim() - 2))[:, :size]


def repeat_ones(
    args: tuple[object, ...], dims: Callable[[torch.Tensor], tuple[int, ...]]
) -> Positional:
    """The examples with every dim of size 1 among `dims(tensor)` repeated to size 2."""

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        for dim in dims(tensor):
            if tensor.shape[dim] == 1:
                tensor = tensor.repeat_interleave(_SMALLEST, dim)
        return tensor

    return map_tensors(args, repeated)


def repeat_ones_where(value: Any, spec: Any) -> Any:
    """`value` with every dim of size 1 repeated to 2 that `spec` marks as dynamic.

    `spec` nests like `value`, in torch.export's notation; what does not match it is left alone,
    for torch.export to complain of.
    """
    import torch

    if isinstance(value, torch.Tensor):
        marked = spec if isinstance(spec, dict) else dict(enumerate(spec or ()))
        for dim, mark in marked.items():
            dynamic = not (mark is None or isinstance(mark, int) or mark is torch.export.Dim.STATIC)
            if dynamic and isinstance(dim, int) and dim < value.dim() and value.shape[dim] == 1:
                value = value.repeat_interleave(_SMALLEST, dim)
        return value
    if isinstance(value, dict) and isinstance(spec, dict):
        return {key: repeat_ones_where(item, spec.get(key)) for key, item in value.items()}
    if isinstance(value, tuple | list) and isinstance(spec, tuple | list):
        pairs = zip(value, [*spec, *[None] * (len(value) - len(spec))], strict=False)
        items = [repeat_ones_where(item, part) for item, part in pairs]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _has_sequence(tensor: torch.Tensor) -> bool:
    return tensor.dim() == (3 if tensor.is_floating_point() or tensor.is_complex() else 2)


def _has_numbers(tensor: torch.Tensor, lengths: set[int]) -> bool:
    """Return whether a tensor may have numbers of each token, of each of its heads, or an image."""
    ranks = (2, 5) if tensor.is_floating_point() else (2, 3, 5)
    return tensor.dim() in ranks and not _has_sequence(tensor) and tensor.shape[1] in lengths


def _dynamic_lengths(sequences: set[int]) -> set[int]:
    """Which sizes of dim 1 vary: a 1 among longer ones is there to be broadcast."""
    return sequences if sequences == {1} else sequences - {0, 1}


def _warnings(
    batches: set[int], sequences: set[int], lengths: set[int], one_batch: str | None
) -> tuple[str, ...]:
    found = [] if one_batch is None else [one_batch]
    if 1 in batches and one_batch is None:
        found.append("the example batch of 1 was repeated to 2, so that the batch can vary")
    if 1 in lengths:
        found.append("the example sequence of 1 was repeated to 2, so that its length can vary")
    for size in sorted(sequences - lengths):
        found.append(f"dim 1 of the inputs where it is {size} is constant")
    return tuple(found)


def _spec(dims: tuple[int, ...], numbers: bool) -> dict[int, Any] | None:
    from torch.export import Dim

    return dict.fromkeys(dims, Dim.DYNAMIC) | ({1: Dim.AUTO} if numbers else {}) or None


def _tensors(value: object) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def map_tensors(
    value: object, function: Callable[[torch.Tensor], object], *, constants: bool = True
) -> Any:
    """Apply ``function`` to each tensor of a nested value; keep other leaves, or make them None."""
    import torch

    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {
            key: map_tensors(item, function, constants=constants) for key, item in value.items()
        }
    if isinstance(value, tuple | list):
        items = [map_tensors(item, function, constants=constants) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value if constants else None
