"""Dynamic dims of example inputs that come without any: batch and sequence.

Dim 0 of every tensor is the batch. Dim 1 is the sequence in integer and boolean tensors of rank 2
(tokens, masks) and in floating-point tensors of rank 3 (embeddings). In floating-point tensors of
rank 2 (gates, resets) and others of rank 3 (resets of heads) it may be, where it has the size of a
sequence, which no width has: torch is left to find out. torch.export takes a dim of size 1 for a
constant, so such examples are repeated to size 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_SMALLEST = 2


@dataclass(frozen=True)
class DefaultDims:
    """Examples that can be traced and their dims.

    Attributes:
        args: the examples, dims of size 1 repeated where they are dynamic.
        dynamic_shapes: one entry per argument, in torch.export's notation.
        warnings: what was repeated or left constant, and why.
    """

    args: tuple[Any, ...]
    dynamic_shapes: tuple[Any, ...]
    warnings: tuple[str, ...]


def default_dims(args: tuple[Any, ...]) -> DefaultDims:
    """Choose batch and sequence dims for positional example inputs.

    Args:
        args: tensors, or tuples, lists and dicts of them; anything else is constant.
    """
    tensors = [tensor for tensor in _tensors(args) if tensor.dim() > 0]
    batches = {tensor.shape[0] for tensor in tensors}
    if len(batches) > 1 or 0 in batches:
        sizes = ", ".join(str(size) for size in sorted(batches))
        reason = (
            f"the examples have different first dims ({sizes})"
            if len(batches) > 1
            else "the examples have a batch of 0"
        )
        return DefaultDims(
            args,
            _map(args, lambda tensor: None, constants=False),
            (f"all dims stay constant: {reason}. Return dynamic_shapes from the factory.",),
        )

    sequences = {tensor.shape[1] for tensor in tensors if _has_sequence(tensor)}
    lengths = _dynamic_lengths(sequences)
    widths = {size for tensor in tensors for size in tensor.shape[2:]}
    numbers = lengths - widths - {1}
    unclear = {
        size
        for tensor in tensors
        if _has_numbers(tensor, lengths & widths)
        for size in tensor.shape[1:2]
    }

    def dims(tensor: torch.Tensor) -> tuple[int, ...]:
        if tensor.dim() == 0:
            return ()
        return (0, 1) if _has_sequence(tensor) and tensor.shape[1] in lengths else (0,)

    return DefaultDims(
        repeat_ones(args, dims),
        _map(
            args, lambda tensor: _spec(dims(tensor), _has_numbers(tensor, numbers)), constants=False
        ),
        _warnings(batches, sequences, lengths, unclear),
    )


def repeat_ones(
    args: tuple[Any, ...], dims: Callable[[torch.Tensor], tuple[int, ...]]
) -> tuple[Any, ...]:
    """The examples with every dim of size 1 among `dims(tensor)` repeated to size 2."""

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        for dim in dims(tensor):
            if tensor.shape[dim] == 1:
                tensor = tensor.repeat_interleave(_SMALLEST, dim)
        return tensor

    return _map(args, repeated)


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
    """Return whether a tensor may have numbers of each token, (B, T), or of each of its heads."""
    ranks = (2,) if tensor.is_floating_point() else (2, 3)
    return tensor.dim() in ranks and not _has_sequence(tensor) and tensor.shape[1] in lengths


def _dynamic_lengths(sequences: set[int]) -> set[int]:
    """Which sizes of dim 1 vary: a 1 among longer ones is there to be broadcast."""
    return sequences if sequences == {1} else sequences - {0, 1}


def _warnings(
    batches: set[int], sequences: set[int], lengths: set[int], unclear: set[int]
) -> tuple[str, ...]:
    found = []
    if 1 in batches:
        found.append("the example batch of 1 was repeated to 2, so that the batch can vary")
    if 1 in lengths:
        found.append("the example sequence of 1 was repeated to 2, so that its length can vary")
    for size in sorted(sequences - lengths):
        found.append(f"dim 1 of the inputs where it is {size} stays constant")
    for size in sorted(unclear):
        found.append(
            f"dim 1 of inputs (batch, {size}) stays constant: {size} is a width as well as a "
            "length. Where they have a number of each token, give examples of another length, or "
            "return dynamic_shapes"
        )
    return tuple(found)


def _spec(dims: tuple[int, ...], numbers: bool) -> dict[int, Any] | None:
    from torch.export import Dim

    return dict.fromkeys(dims, Dim.DYNAMIC) | ({1: Dim.AUTO} if numbers else {}) or None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _map(value: Any, function: Callable[[torch.Tensor], Any], *, constants: bool = True) -> Any:
    """Apply ``function`` to each tensor of a nested value; keep other leaves, or make them None."""
    import torch

    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map(item, function, constants=constants) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_map(item, function, constants=constants) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value if constants else None
