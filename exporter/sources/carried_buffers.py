"""Buffers that ``forward`` writes: what a call of a module leaves to the next one.

    y, memory' = forward(x, memory)         the module itself keeps memory from call to call

Streaming models of speech and robotics are written so. ``forward`` is run with values of a caller
in the place of the module's buffers, and gives back what it wrote there:

    restarted(module)   begins every call with the module's own values, so that calls are alike
    stepping(module)    takes past_buffer_NAME, and returns present_buffer_NAME behind its outputs

A buffer with a row for each row of a batch has the axis of the batch as its first one: running the
module with another batch tells. Any other is one for all rows together. Values that are not all
alike begin by a flag, which is 0 before the first call:

    memory = where(past_buffer_NAME_begun > 0, past_buffer_NAME, the module's own values)
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor, nn

from linexport.errors import UnsupportedModelError
from linexport.graph.states import BUFFERS, State
from linexport.manifest.records import BUFFER
from linexport.sources.first_run import first_rows
from linexport.system.torch_internals.exports import control_flow_as_it_is
from linexport.system.torch_internals.trees import pytree

BEGUN = "_begun"
"""Ending of the state that says whether a buffer was written before."""

BATCH = "batch"

ROWS = 3
"""Rows with which a module is run to find out which of its buffers have the axis of the batch."""

MOST_TRIED = 4
"""Buffers that are tried one by one; of more, all or none have that axis."""

HELD = "_linexport_holds_buffers"
"""Attribute of a module while its buffers are those of a caller."""

LARGEST_NUMBER = 2**53
"""Up to this all integers are numbers of a manifest."""

Values = Mapping[str, Tensor]
"""Values of buffers by the buffers' names."""


@dataclass(frozen=True)
class Buffer:
    """A buffer that ``forward`` writes.

    Attributes:
        name: by which the module has it, such as "encoder.cache".
        title: its name for people.
        key: its name in those of its states.
        batched: it has a row for each row of a batch.
        initial: all its values before the first call; None where they differ.
        shape: of the module's own.
        dtype: of its values.
    """

    name: str
    title: str
    key: str
    batched: bool
    initial: float | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    def states(self) -> tuple[State, ...]:
        """Return its states; a single number is one of shape (1,)."""
        rows: tuple[int | str, ...] = (BATCH,) if self.batched else ()
        sizes = self.shape[1:] if self.batched else self.shape or (1,)
        dtype = str(self.dtype).removeprefix("torch.")
        past, present = (f"{side}{self.key}" for side in BUFFERS)
        start = self.initial or 0.0
        own = State(past, present, dtype, (*rows, *sizes), BUFFER, initial_value=start)
        if self.initial is not None:
            return (own,)
        return own, State(f"{past}{BEGUN}", f"{present}{BEGUN}", "int64", rows or (1,), BUFFER)


def buffers_of(
    module: nn.Module,
    names: Sequence[str],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    source: str,
    inside: str = "",
) -> tuple[tuple[Buffer, ...], bool]:
    """Return what is to be known of buffers that ``forward`` writes.

    Args:
        module: as the user gave it.
        names: of the buffers.
        args: the user's example.
        kwargs: that by name.
        source: what the user calls the model.
        inside: beginning of the buffers' names that is not of the user's making.

    Returns:
        The buffers, and whether the module takes other batches than that of the example.

    Raises:
        UnsupportedModelError: a buffer that no state stands for.
    """
    absent = [name for name in names if name not in dict(module.named_buffers())]
    if absent:
        raise UnsupportedModelError(
            f"{source}: the buffer {absent[0]} is None until forward gives it values. What a call "
            "leaves to the next one becomes a state of the artifact: register a tensor of the "
            "values that it begins with."
        )
    titles = [name.removeprefix(inside) for name in names]
    single = [_buffer(module, *pair, titles) for pair in zip(names, titles, strict=True)]
    present = _run(module, single, first_rows((args, kwargs)), args, kwargs)
    for buffer in single:
        _check(buffer, present[buffer.name], source)
    rows = ROWS + (first_rows((args, kwargs)) == ROWS)  # another batch than the example's
    more = _resized((args, kwargs), rows)
    able = [b for b in single if _may_have_rows(module.get_buffer(b.name), args, kwargs)]
    for chosen in _subsets([b.name for b in able]):
        tried = [_with_rows(b, b.name in chosen) for b in single]
        try:
            found = _run(module, tried, rows, *more)
        except Exception:  # it does not take this batch
            continue
        if all(tuple(found[b.name].shape) == _shape(b, rows) for b in tried):
            return tuple(tried), True
    for buffer in single:
        _check_size(buffer, present[buffer.name], source)
    return tuple(single), False


def restart(module: nn.Module, buffers: Sequence[Buffer]) -> None:
    """Make every call of a module begin with the values that its buffers have, in place."""
    plain = type(module)

    @functools.wraps(plain.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if vars(self).get(HELD):  # the values are those of the caller
            return plain.forward(self, *args, **kwargs)
        start = _start(self, buffers, first_rows((args, kwargs)))
        with holding(self, start):
            return plain.forward(self, *args, **kwargs)

    # A class rather than an attribute, so that a deep copy runs with its own buffers.
    own = {"forward": forward, "__module__": plain.__module__}
    module.__class__ = type(plain.__name__, (plain,), own)


def stepping(module: nn.Module, buffers: Sequence[Buffer]) -> nn.Module:
    """Return a module of the same weights that takes and returns the values of buffers.

    Its outputs are those of the module and the present states, in the order of ``states_of``.
    """
    plain = type(module)
    pasts = [state.past for state in states_of(buffers)]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        past = {name: kwargs.pop(name) for name in pasts}
        with holding(self, _values(self, buffers, past)) as held:
            outputs = plain.forward(self, *args, **kwargs)
            return outputs, tuple(_presents(buffers, held(), past))

    signature = inspect.signature(plain.forward)
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, kind) for name in pasts]
    rest = [p for p in signature.parameters.values() if p.kind != inspect.Parameter.VAR_KEYWORD]
    last = [p for p in signature.parameters.values() if p.kind == inspect.Parameter.VAR_KEYWORD]
    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*rest, *added, *last]
    )
    own = {"forward": forward, "__module__": plain.__module__}
    made: nn.Module = object.__new__(type(plain.__name__, (plain,), own))
    made.__dict__.update(vars(module))
    return made


def states_of(buffers: Sequence[Buffer]) -> tuple[State, ...]:
    """Return the states of buffers, those with the axis of the batch first."""
    found = (state for buffer in buffers for state in buffer.states())
    return tuple(sorted(found, key=lambda state: state.shared))


def example_past(
    module: nn.Module,
    buffers: Sequence[Buffer],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> dict[str, Tensor]:
    """Return values of the past states in the middle of a sequence, for an example."""
    rows = first_rows((args, kwargs))
    start = _start(module, buffers, rows)
    found: dict[str, Tensor] = {}
    for buffer in buffers:
        past, *flag = buffer.states()
        # A tensor of its own: torch traces the sizes of a view to those of its base.
        found[past.past] = start[buffer.name].clone().reshape(_shape(buffer, rows) or (1,))
        for begun in flag:
            found[begun.past] = torch.ones(rows if buffer.batched else 1, dtype=torch.int64)
    return {state.past: found[state.past] for state in states_of(buffers)}


@contextmanager
def holding(module: nn.Module, values: Values) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Put values in the place of a module's buffers; yields what is there at the time of a call.

    They are attributes meanwhile: torch.export makes a copy into the buffer of an assignment to it.
    """
    places = {name: _place(module, name) for name in values}
    saved = {name: part._buffers.pop(key) for name, (part, key) in places.items()}
    for name, (part, key) in places.items():
        vars(part)[key] = values[name].clone()
    vars(module)[HELD] = True
    try:
        yield lambda: {name: vars(part)[key] for name, (part, key) in places.items()}
    finally:
        del vars(module)[HELD]
        for name, (part, key) in places.items():
            vars(part).pop(key, None)
            part._buffers[key] = saved[name]


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the part of a module that has a buffer, and what it is called there."""
    part, _, key = name.rpartition(".")
    return module.get_submodule(part), key


def _start(module: nn.Module, buffers: Sequence[Buffer], rows: int) -> dict[str, Tensor]:
    """Return the values that buffers begin with."""
    return {b.name: _own(module, b, rows) for b in buffers}


def _own(module: nn.Module, buffer: Buffer, rows: int) -> Tensor:
    value = module.get_buffer(buffer.name).detach()
    return value[:1].expand(_shape(buffer, rows)) if buffer.batched else value


def _values(module: nn.Module, buffers: Sequence[Buffer], past: Values) -> dict[str, Tensor]:
    """Return the values of buffers that past states stand for."""
    found = {}
    for buffer in buffers:
        state, *flag = buffer.states()
        value = past[state.past]
        value = value if buffer.shape else value.reshape(())
        for begun in flag:
            rows = value.shape[0] if buffer.batched else 1
            is_begun = (past[begun.past] > 0).reshape((rows, *[1] * (value.dim() - 1)))
            is_begun = is_begun if buffer.shape else is_begun.reshape(())
            own = module.get_buffer(buffer.name)
            value = torch.where(is_begun, value, own[:1] if buffer.batched else own)
        found[buffer.name] = value
    return found


def _presents(buffers: Sequence[Buffer], held: Values, past: Values) -> Iterator[Tensor]:
    found = {}
    for buffer in buffers:
        state, *flag = buffer.states()
        value = held[buffer.name]
        found[state.past] = (value if buffer.shape else value.reshape(1)).clone()
        for begun in flag:
            found[begun.past] = torch.ones_like(past[begun.past])
    return (found[state.past] for state in states_of(buffers))


def _run(
    module: nn.Module,
    buffers: Sequence[Buffer],
    rows: int,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> dict[str, Tensor]:
    """Return what a call leaves in buffers."""
    start = _start(module, buffers, rows)
    with torch.no_grad(), control_flow_as_it_is(), holding(module, start) as held:
        module(*args, **kwargs)
        return held()


def _buffer(module: nn.Module, name: str, title: str, titles: Sequence[str]) -> Buffer:
    value = module.get_buffer(name)
    plain = [re.sub(r"\W", "_", n) for n in titles]
    place = titles.index(title)
    key = f"{plain[place]}_{place}" if plain.count(plain[place]) > 1 else plain[place]
    return Buffer(name, title, key, False, _initial(value), tuple(value.shape), value.dtype)


def _initial(value: Tensor) -> float | None:
    """Return the number that all values are; None where they differ, or no manifest has it."""
    if not value.numel():
        return 0.0
    first = value.flatten()[0]
    alike = bool((value == first).all()) and bool(torch.isfinite(first))
    return float(first) if alike and abs(float(first)) <= LARGEST_NUMBER else None


def _check(buffer: Buffer, after: Tensor, source: str) -> None:
    """Check that a buffer has the type and the shape after a call that it had before.

    Raises:
        UnsupportedModelError: it has not, or has values that no state holds.
    """
    reason = None
    if buffer.dtype.is_complex:
        reason = "which has complex numbers: write it as two of real ones"
    elif not isinstance(after, Tensor) or after.dtype != buffer.dtype:
        kind = getattr(after, "dtype", type(after).__name__)
        reason = f"which has {buffer.dtype} before a call and {kind} after it: keep its type"
    elif after.dim() != len(buffer.shape) or tuple(after.shape)[1:] != buffer.shape[1:]:
        reason = _reshaped(buffer, after)
    if reason is not None:
        raise _refusal(buffer, source, reason)


def _check_size(buffer: Buffer, after: Tensor, source: str) -> None:
    """Check that a buffer has as many rows after a call as before.

    Raises:
        UnsupportedModelError: it has not, and they are not those of the batch.
    """
    if tuple(after.shape) != buffer.shape:
        raise _refusal(buffer, source, _reshaped(buffer, after))


def _reshaped(buffer: Buffer, after: Tensor) -> str:
    return (
        f"which has the shape {buffer.shape} before a call and {tuple(after.shape)} after it: give "
        "it the room that it needs, and write there"
    )


def _refusal(buffer: Buffer, source: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{source}: forward writes the buffer {buffer.title}, {reason}. What a call leaves to the "
        "next one becomes a state of the artifact, which has one type and one shape."
    )


def _may_have_rows(value: Tensor, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Return whether the first axis of a buffer may be that of the batch."""
    if not value.dim() or value.shape[0] not in (1, first_rows((args, kwargs))):
        return False
    return torch.equal(value, value[:1].expand_as(value))


def _subsets(names: Sequence[str]) -> Iterator[frozenset[str]]:
    """Yield sets of buffers that have the axis of the batch, the largest first."""
    sizes = range(len(names), -1, -1) if len(names) <= MOST_TRIED else (len(names), 0)
    yield from map(frozenset, chain.from_iterable(combinations(names, n) for n in sizes))


def _with_rows(buffer: Buffer, batched: bool) -> Buffer:
    return replace(buffer, batched=batched)


def _shape(buffer: Buffer, rows: int) -> tuple[int, ...]:
    return (rows, *buffer.shape[1:]) if buffer.batched else buffer.shape


def _resized(value: object, rows: int) -> Any:
    """Return examples with so many rows, by repeating theirs."""

    def resized(leaf: object) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        times = -(-rows // leaf.shape[0])
        return leaf.repeat(times, *[1] * (leaf.dim() - 1))[:rows]

    return pytree.tree_map(resized, value)
