"""Scans in functions of the model's own, found by what the functions compute.

    f(a, b) = h,   h_t = a_t h_{t-1} + b_t        however f computes it: by trees, blocks or kernels
    f(m, u, w) = U, W                             the sums of a softmax over earlier tokens

A tree scan is a loop over powers of two or a recursion, whose number of passes a trace fixes. Each
function of the model's own code that is called with two or three tensors is run on numbers, at
several lengths; one that computes a known scan is swapped for a loop over tokens while a model is
traced. Where there is none, loops in the middle of functions are looked at as functions of their
own.
"""

from __future__ import annotations

import gc
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from linexport.patches.inline_loops import loops_as_functions
from linexport.patches.known_scans import PREFIX_SOFTMAX, RECURRENCE, Scan
from linexport.patches.packages import replaced
from linexport.patches.scans import ASSOCIATIVE
from linexport.system.torch_internals.trees import pytree
from linexport.system.untyped import Keywords, Positional, TorchCallable

__all__ = ["own_scans"]

TRIED_LENGTHS = (1, 2, 3, 4, 8, 16, 32)
"""Lengths tried, besides that of the call; some functions take powers of two alone."""

LIMIT = 1e-5
"""Difference allowed of the largest value: functions may compute in float32."""

SCANS = {2: RECURRENCE, 3: PREFIX_SOFTMAX}
"""Scans that functions of so many tensors are compared with."""

LIBRARY = tuple(str(Path(m.__file__ or "").parent) for m in (torch, inspect))


@dataclass(frozen=True)
class _Call:
    """A function called with two or three tensors, and what it returned."""

    function: FunctionType
    arguments: Mapping[str, object]
    result: Any


@contextmanager
def own_scans(model: nn.Module, args: Positional, kwargs: Keywords) -> Iterator[int]:
    """Swap functions of a model's code that compute known scans; yields how many there are.

    Calls of PyTorch's ``associative_scan`` are counted as well, which ``as_loops`` swaps.

    Args:
        model: is run once on the example.
        args: the example.
        kwargs: the example's named arguments.
    """
    with ExitStack() as swapped:
        found, ran = _found(model, args, kwargs)
        if not found and not ran.associative:
            swapped.enter_context(loops_as_functions(ran.functions))
            found, ran = _found(model, args, kwargs)
        swapped.enter_context(replaced(found, model))
        yield len(found) + ran.associative


def _found(
    model: nn.Module, args: Positional, kwargs: Keywords
) -> tuple[dict[FunctionType, Callable[..., object]], _Ran]:
    """Return what takes the place of functions that compute known scans, and all that ran."""
    ran = _run_model(model, args, kwargs)
    loops = {call.function: _loop(call) for call in ran.calls}
    return {function: loop for function, loop in loops.items() if loop is not None}, ran


@dataclass(frozen=True)
class _Ran:
    """The functions that a model ran.

    Attributes:
        functions: of its own code.
        calls: the first of each function that is called with two or three tensors.
        associative: whether PyTorch's scan is called.
    """

    functions: list[FunctionType]
    calls: list[_Call]
    associative: bool


def _run_model(model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> _Ran:
    scan = getattr(sys.modules.get(ASSOCIATIVE.module), ASSOCIATIVE.name, None)
    codes = {inspect.unwrap(scan).__code__} if scan else set()
    seen: set[CodeType] = set()
    own: set[CodeType] = set()
    begun_codes: set[CodeType] = set()
    begun: dict[FrameType, Mapping[str, object]] = {}
    ended: dict[CodeType, tuple[Mapping[str, object], object]] = {}

    def note(frame: FrameType, event: str, result: object) -> None:
        code = frame.f_code
        if code in codes:
            seen.add(code)
        if code.co_filename.startswith(LIBRARY):
            return
        own.add(code)
        if event == "call" and code not in begun_codes:
            arguments = inspect.getargvalues(frame)
            given = {name: frame.f_locals[name] for name in arguments.args}
            if not arguments.varargs and not arguments.keywords and len(_tensors(given)) in SCANS:
                # Of a recursion the outermost call.
                begun[frame] = given
                begun_codes.add(code)
        elif event == "return" and frame in begun:
            ended[code] = begun.pop(frame), result

    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        sys.setprofile(previous)
    # All at once: each call looks through everything that Python holds.
    functions = [f for f in gc.get_referrers(*own) if isinstance(f, FunctionType)]
    calls = [_Call(f, *ended[f.__code__]) for f in functions if f.__code__ in ended]
    return _Ran(functions, [c for c in calls if c.result is not None], bool(seen))


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if _is_drawn(leaf)]


def _is_drawn(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _loop(call: _Call) -> TorchCallable | None:
    """Return the replacement of a function; None if it is not a known scan."""
    given, results = _tensors(call.arguments), _tensors(call.result)
    scan = SCANS[len(given)]
    if len(results) != len(pytree.tree_leaves(call.result)):
        return None
    for order in scan.orders:
        tensors = [given[i] for i in order]
        if not scan.takes(tensors):
            continue
        for axis in range(tensors[0].dim()):
            sizes = {x.shape[axis] for x in tensors}
            if len(sizes) == 1 and sizes != {1}:
                places = _results(call, scan, axis, order)
                if places is not None:
                    return _replacement(call, scan, axis, order, places)
    return None


def _results(call: _Call, scan: Scan, axis: int, order: Sequence[int]) -> list[int] | None:
    """Return which of a scan's results a function's are, with the tokens along an axis."""
    given = _tensors(call.arguments)
    own, left = given[0].shape[axis], [set[int]() for _ in _tensors(call.result)]
    for trial, length in enumerate((own, *TRIED_LENGTHS)):
        for number, draws in enumerate(scan.draws):
            generator = torch.Generator().manual_seed(length)
            drawn = dict(zip(order, draws, strict=True))
            tensors = [
                _drawn(x, axis, length, drawn[place], generator) for place, x in enumerate(given)
            ]
            try:
                found = _tensors(_run(call, tensors, {own: length}))
                expected = _along(scan, axis, [tensors[i] for i in order])
            except Exception:
                if length == own:
                    return None
                continue  # a length that it does not take
            if len(found) != len(left):
                return None
            partly = number >= len(scan.draws) - scan.partly
            for place, got in enumerate(found):
                same = {i for i, x in enumerate(expected) if _equal(got, x, partly)}
                left[place] = left[place] & same if trial or number else same
            if not all(left):
                return None
    places = [min(found) for found in left]
    return places if scan.states & {*places} else None


def _drawn(
    given: Tensor,
    axis: int,
    length: int,
    draw: Callable[[Tensor, torch.Generator], Tensor],
    generator: torch.Generator,
) -> Tensor:
    """Return numbers of a length in the place of those of a call."""
    shape = [length if place == axis else n for place, n in enumerate(given.shape)]
    drawn = draw(torch.empty(shape, dtype=torch.float64), generator)
    return _turned(drawn, given, generator)


def _along(scan: Scan, axis: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the results of a scan, with the tokens along an axis."""
    return [x.movedim(1, axis) for x in scan.compute(*(x.movedim(axis, 1) for x in tensors))]


def _turned(drawn: Tensor, given: Tensor, generator: torch.Generator) -> Tensor:
    """Return numbers in all directions of the plane where those of the call are complex."""
    if not given.is_complex():
        return drawn
    angle = torch.empty_like(drawn).uniform_(0, math.tau, generator=generator)
    return torch.polar(drawn.abs(), angle)


def _run(call: _Call, pair: Sequence[Tensor], sizes: Mapping[int, int]) -> Any:
    """Call a function with other tensors, and with their sizes where it is given sizes."""
    given = iter(pair)
    leaves, structure = pytree.tree_flatten(dict(call.arguments))
    taken = [
        next(given).clone()
        if _is_drawn(leaf)
        else sizes.get(leaf, leaf)
        if type(leaf) is int
        else leaf
        for leaf in leaves
    ]
    arguments = pytree.tree_unflatten(taken, structure)
    with torch.no_grad():
        return call.function(*arguments.values())


def _equal(got: Tensor, expected: Tensor, partly: bool) -> bool:
    """Return whether numbers are equal; where ``partly``, some of those got may not be finite."""
    if got.shape != expected.shape or not (partly or got.isfinite().all()):
        return False
    finite = got.isfinite()
    difference = torch.where(finite, got - expected, 0.0).abs().max()
    return bool(difference <= LIMIT * expected.abs().max())


def _replacement(
    call: _Call, scan: Scan, axis: int, order: Sequence[int], places: Sequence[int]
) -> Callable[..., object]:
    signature, structure = inspect.signature(call.function), pytree.tree_structure(call.result)

    def loop(*args: object, **kwargs: object) -> object:
        tensors = _tensors(signature.bind(*args, **kwargs).arguments)
        results = _along(scan, axis, [tensors[i] for i in order])
        return pytree.tree_unflatten([results[i] for i in places], structure)

    return loop
