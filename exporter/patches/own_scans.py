"""First-order recurrences in functions of the model's own, found by what the functions compute.

    f(a, b) = h,   h_t = a_t h_{t-1} + b_t        however f computes it: by trees, blocks or kernels

A tree scan is a loop over powers of two or a recursion, whose number of passes a trace fixes. Each
function of the model's own code that is called with two tensors is run on numbers, at several
lengths; one that computes the recurrence is swapped for a loop over tokens while a model is traced.
Where there is none, loops in the middle of functions are looked at as functions of their own.
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
from torch.utils import _pytree as pytree

from linexport.patches.inline_loops import loops_as_functions
from linexport.patches.packages import replaced
from linexport.patches.scans import ASSOCIATIVE, products, recurrence

__all__ = ["own_scans"]

LENGTHS = (1, 2, 3, 4, 8, 16, 32)
"""Lengths tried, besides that of the call; some functions take powers of two alone."""

LIMIT = 1e-5
"""Difference allowed of the largest value: functions may compute in float32."""

DRAWS = ((0.2, 1.0, 1.0), (-1.0, 1.0, 1.0), (-1.3, 1.3, 1e4))
"""Bounds of a, and the size of b. The first is what functions in log space take, and others as
well: those that must be equal wherever the function gives a number."""

LIBRARY = tuple(str(Path(m.__file__ or "").parent) for m in (torch, inspect))

Compute = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class _Call:
    """A function called with two tensors, and what it returned."""

    function: FunctionType
    arguments: Mapping[str, Any]
    result: Any


@contextmanager
def own_scans(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[int]:
    """Swap functions of a model's code that compute recurrences; yields how many there are.

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
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[FunctionType, Callable[..., Any]], _Ran]:
    """Return what takes the place of functions that compute recurrences, and all that ran."""
    ran = _run_model(model, args, kwargs)
    loops = {call.function: _loop(call) for call in ran.calls}
    return {function: loop for function, loop in loops.items() if loop is not None}, ran


@dataclass(frozen=True)
class _Ran:
    """The functions that a model ran.

    Attributes:
        functions: of its own code.
        calls: the first of each function that is called with two tensors.
        associative: whether PyTorch's scan is called.
    """

    functions: list[FunctionType]
    calls: list[_Call]
    associative: bool


def _run_model(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Ran:
    scan = getattr(sys.modules.get(ASSOCIATIVE.module), ASSOCIATIVE.name, None)
    codes = {inspect.unwrap(scan).__code__} if scan else set()
    seen: set[CodeType] = set()
    own: set[CodeType] = set()
    begun_codes: set[CodeType] = set()
    begun: dict[FrameType, Mapping[str, Any]] = {}
    ended: dict[CodeType, tuple[Mapping[str, Any], Any]] = {}

    def note(frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if code in codes:
            seen.add(code)
        if code.co_filename.startswith(LIBRARY):
            return
        own.add(code)
        if event == "call" and code not in begun_codes:
            arguments = inspect.getargvalues(frame)
            given = {name: frame.f_locals[name] for name in arguments.args}
            if not arguments.varargs and not arguments.keywords and len(_tensors(given)) == 2:
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


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if _is_drawn(leaf)]


def _is_drawn(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _loop(call: _Call) -> Callable[..., Any] | None:
    """Return what takes the place of a function; None where that is no recurrence."""
    first, second = _tensors(call.arguments)
    results = _tensors(call.result)
    if first.dim() != second.dim() or len(results) != len(pytree.tree_leaves(call.result)):
        return None
    for axis in range(first.dim()):
        for order in ((0, 1), (1, 0)):
            if first.shape[axis] == second.shape[axis] > 1:
                computed = _results(call, axis, order)
                if computed is not None:
                    return _replacement(call, axis, order, computed)
    return None


def _results(call: _Call, axis: int, order: tuple[int, int]) -> list[Compute] | None:
    """Return what each result of a function is, with the tokens along an axis."""
    own = _tensors(call.arguments)[0].shape[axis]
    computed: list[Compute] = [recurrence, lambda a, b: products(a)]
    left = [list(computed) for _ in _tensors(call.result)]
    for length in (own, *LENGTHS):
        for draw, (low, high, size) in enumerate(DRAWS):
            generator = torch.Generator().manual_seed(length)
            pair = [
                torch.empty(
                    [length if i == axis else n for i, n in enumerate(x.shape)], dtype=torch.float64
                )
                for x in _tensors(call.arguments)
            ]
            pair[order[0]].uniform_(low, high, generator=generator)
            pair[order[1]].normal_(generator=generator).mul_(size)
            given = _tensors(call.arguments)
            pair = [_turned(x, y, generator) for x, y in zip(pair, given, strict=True)]
            try:
                found = _tensors(_run(call, pair, {own: length}))
            except Exception:
                if length == own:
                    return None
                continue  # a length that it does not take
            if len(found) != len(left):
                return None
            a, b = (pair[i].movedim(axis, 1) for i in order)
            for place, got in enumerate(found):
                left[place] = [
                    compute
                    for compute in left[place]
                    if _equal(got, compute(a, b).movedim(1, axis), partly=draw > 0)
                ]
            if not all(left):
                return None
    states = [compute for (compute, *_) in left]
    return states if recurrence in states else None


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
    call: _Call, axis: int, order: tuple[int, int], results: Sequence[Compute]
) -> Callable[..., Any]:
    signature, structure = inspect.signature(call.function), pytree.tree_structure(call.result)

    def loop(*args: Any, **kwargs: Any) -> Any:
        pair = _tensors(signature.bind(*args, **kwargs).arguments)
        a, b = (pair[i].movedim(axis, 1) for i in order)
        found = [compute(a, b).movedim(1, axis) for compute in results]
        return pytree.tree_unflatten(found, structure)

    return loop
