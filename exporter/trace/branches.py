"""A branch on a length that the example decides, traced where it is taken as most lengths take it.

    padding = -length % 64                  at a length of 128 the branch is left out of the trace,
    if padding > 0:                         and the outputs of 129 would be 192 long; at 126 it is
        y = y[:, :length]                   traced, and slices nothing off at 128

A trace at another length is taken where the next length takes its branches too, and where it gives
what the model gives at the length of the example.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch.export import ExportedProgram

from linexport.sources.first_run import buffers_kept
from linexport.sources.loaded_model import LoadedModel
from linexport.system.torch_internals import sizes
from linexport.system.torch_internals.exports import control_flow_as_it_is
from linexport.system.torch_internals.trees import pytree
from linexport.trace.messages import error_summary

log = logging.getLogger(__name__)

FEWER = (2, 3)
"""Tokens left out of the example. One would make the next length that of the example."""

CLOSE = 1e-3
"""Difference of the largest value at which a trace gives what the model gives."""


def left_by_next(program: ExportedProgram) -> set[int]:
    """Return sizes of the example at which code branched as it does not at the next ones."""
    values = (node.meta.get("val") for node in program.graph.nodes)
    found = (s for v in values for s in getattr(v, "shape", ()) if isinstance(s, torch.SymInt))
    size, left = next(found, None), set[int]()
    if size is None:
        return left
    for guard in sizes.guards(size):
        numbers = {s: sizes.example(size, s) for s in guard.free_symbols}
        known = {s: n for s, n in numbers.items() if n is not None}
        following = {s: n + 1 for s, n in known.items()}
        if len(known) == len(numbers) and str(guard.subs(following)) == "False":
            left |= set(known.values())
    return left


def at_other_length(
    loaded: LoadedModel, left: Collection[int], export: Callable[[LoadedModel], ExportedProgram]
) -> ExportedProgram | None:
    """Return the program of a shorter example; None where it has such branches as well.

    Args:
        loaded: the model.
        left: see ``left_by_next``.
        export: traces a model.
    """
    for fewer in FEWER:
        shorter = _shorter(loaded, {n: n - fewer for n in left if n > fewer + 1})
        try:
            program = export(shorter)
            if not left_by_next(program) and _is_right(loaded, program):
                return program
        except Exception as error:
            log.info("not traced at %d tokens fewer: %s", fewer, error_summary(error))
    return None


def _shorter(loaded: LoadedModel, lengths: dict[int, int]) -> LoadedModel:
    """Return a model with examples that are shorter along sizes behind the first."""

    def cut(value: object) -> object:
        if isinstance(value, torch.Tensor):
            for axis in range(1, value.dim()):
                length = lengths.get(value.shape[axis], value.shape[axis])
                value = value.narrow(axis, 0, length)
            return value.contiguous()
        return value

    args, kwargs = pytree.tree_map(cut, (loaded.args, loaded.kwargs))
    return replace(loaded, args=args, kwargs=kwargs)


def _is_right(loaded: LoadedModel, program: ExportedProgram) -> bool:
    """Return whether a program gives what the model gives on its own example."""
    module = program.module(check_guards=False)
    with torch.no_grad(), control_flow_as_it_is(), buffers_kept(loaded.module):
        expected = pytree.tree_leaves(loaded.module(*loaded.args, **loaded.kwargs))
        found = pytree.tree_leaves(module(*loaded.args, **loaded.kwargs))
    pairs = [(a, b) for a, b in zip(expected, found, strict=True) if isinstance(a, torch.Tensor)]
    return all(
        a.shape == b.shape
        and bool(((a - b).abs().double() <= CLOSE * a.abs().max().double()).all())
        for a, b in pairs
        if a.is_floating_point()
    )
