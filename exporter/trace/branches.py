"""Branches on sizes that the example decides, traced where the trace is right for other sizes too.

    padding = -length % 64                  at a length of 128 the branch is left out of the trace,
    if padding > 0:                         and the outputs of 129 would be 192 long; at 127 it is
        y = y[:, :length]                   traced, and slices nothing off at 128

    if width % 2:                           at a width of 16 nothing is padded, and 15 would fail;
        x = F.pad(x, (0, width % 2))        at 15 a trace pads by width % 2, which is 0 at 16

Sizes next to those of the example, at which a comparison has another outcome, are where the model
and its trace are compared, and where else a trace is tried. It is taken where it gives at all of
these sizes what the model gives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from linexport.errors import UnsupportedModelError
from linexport.sources.first_run import buffers_kept, described, outputs_on, said_where
from linexport.sources.kept_inputs import copies
from linexport.sources.loaded_model import LoadedModel
from linexport.system.torch_internals import sizes
from linexport.system.torch_internals.exports import control_flow_as_it_is
from linexport.system.torch_internals.sizes import Symbol
from linexport.system.torch_internals.trees import pytree
from linexport.trace.dim_names import marked_dims, name_symbols, user_placeholders
from linexport.trace.examples import resized, unit_of
from linexport.trace.messages import error_summary
from linexport.trace.user_frames import is_users

log = logging.getLogger(__name__)

CLOSE = 1e-3
"""Difference of the largest value at which a trace gives what the model gives."""

FARTHEST = 64
"""How far from the example sizes are tried at which a line of the user branches otherwise."""

MOST = 8
"""Sizes at which a trace is compared with the model."""

LARGEST_MULTIPLE = 64
"""The largest number whose multiples are tried to take one branch."""

MULTIPLES = range(2, 10)
"""Multiples of a number at which branches are looked at."""


NEXT, LAST, TWICE = (
    lambda size, unit: size + unit,
    lambda size, unit: size - unit,
    lambda size, unit: 2 * size,
)
"""Other sizes than one, of which only multiples of a unit vary."""

Export = Callable[[LoadedModel], ExportedProgram]
"""Traces a model."""

Point = dict[Symbol, int]
"""Sizes by their symbols."""


class Branches:
    """Comparisons of sizes in the code that a program was traced from.

    Args:
        program: the trace.
    """

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self._values = [node.meta.get("val") for node in program.graph.nodes]
        found = (s for v in self._values for s in getattr(v, "shape", ()))
        self.size = next((s for s in found if isinstance(s, torch.SymInt)), None)

    @cached_property
    def guards(self) -> list[sizes.Guard]:
        """Comparisons whose outcome depends on sizes of the example."""
        every = [] if self.size is None else sizes.guards(self.size)
        return [g for g in every if self._example(g.holds.free_symbols) is not None]

    @cached_property
    def at(self) -> dict[Symbol, int]:
        """The sizes of the example."""
        names = set[Symbol]().union(*(g.holds.free_symbols for g in self.guards))
        return (self._example(names) or {}) if names else {}

    @cached_property
    def own(self) -> list[sizes.Guard]:
        """Comparisons in the user's lines."""
        return [g for g in self.guards if g.place is not None and is_users(g.place.filename)]

    def points(self) -> list[Point]:
        """Return sizes next to those of the example at which a comparison has another outcome.

        First those that differ in all such dimensions from the example.
        """
        own, found = self.own, list[Point]()
        for guard in self.guards:
            far = FARTHEST if any(guard is g for g in own) else 1
            for name in sorted(guard.holds.free_symbols, key=str):
                point = self._next(guard, [name], far)
                if point is not None:
                    found.append(point)
            together = self._next(guard, guard.holds.free_symbols, 1)
            if together is not None:
                found.append(together)
        every = {name: n for point in found for name, n in point.items() if n != self.at[name]}
        unique = {tuple(sorted(p.items(), key=str)): p for p in [self.at | every, *found]}
        return [*unique.values()][:MOST] if found else []

    def _next(self, guard: sizes.Guard, names: Iterable[Symbol], far: int) -> Point | None:
        """Return the nearest sizes at which a guard does not hold, moving some of them."""
        for distance in range(1, far + 1):
            for step in (-distance, distance):
                point = self.at | {name: self.at[name] + step for name in names}
                if self._allows(point) and not _holds(guard, point):
                    return point
        return None

    def _allows(self, point: Point) -> bool:
        limits = self.program.range_constraints
        return all(
            n > 1 and (name not in limits or limits[name].lower <= n <= limits[name].upper)
            for name, n in point.items()
        )

    def _example(self, names: Iterable[Symbol]) -> dict[Symbol, int] | None:
        """Return the sizes of the example by their symbols; None where one has none."""
        assert self.size is not None
        found = {s: sizes.example(self.size, s) for s in names}
        known = {s: n for s, n in found.items() if n is not None}
        return known if len(known) == len(found) else None

    def resized(self, loaded: LoadedModel, point: Point) -> LoadedModel | None:
        """Return a model with examples of other sizes; None where they are not those traced."""
        leaves, structure = pytree.tree_flatten((loaded.args, loaded.kwargs))
        nodes = user_placeholders(self.program)
        if len(nodes) != len(leaves):
            return None
        for place, (leaf, node) in enumerate(zip(leaves, nodes, strict=True)):
            value = node.meta.get("val")
            if not isinstance(leaf, Tensor) or not isinstance(value, Tensor):
                continue
            if leaf.shape != tuple(map(_in_example, value.shape)):
                return None
            for axis, size in enumerate(value.shape):
                wanted = _in_example(sizes.replaced(size, point))
                if wanted != leaf.shape[axis]:
                    leaf = resized(leaf, axis, wanted)
            leaves[place] = leaf.contiguous()
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        return replace(loaded, args=args, kwargs=kwargs)


def left_by_next(program: ExportedProgram) -> bool:
    """Return whether code branches otherwise at sizes next to those of the example."""
    return bool(Branches(program).points())


def at_other_sizes(
    loaded: LoadedModel,
    program: ExportedProgram,
    export: Export,
    named: object,
) -> ExportedProgram:
    """Return a program that is right at the next sizes too; the given one where none is needed.

    Args:
        loaded: the model.
        program: its trace.
        export: traces a model.
        named: dynamic shapes with the names of the user, for errors.

    Raises:
        UnsupportedModelError: no trace is right at all of them, and a line of the user branches.
    """
    branches = Branches(program)
    tried = _Tried(loaded)
    points = [(p, branches.resized(loaded, p)) for p in branches.points()]
    tried.add(model for _, model in points)
    wrong = tried.wrong(program)
    if not wrong:
        return program
    for other in list(tried.models[1:]):
        found = tried.right(other, export)
        if found is not None:
            return found
    said = _undecided(branches, [p for p, m in points if any(m is w for w in wrong)], named)
    if said:
        raise UnsupportedModelError(said)
    return program


def where_not_fixed(
    loaded: LoadedModel,
    fixed: Collection[int],
    export: Export,
) -> ExportedProgram | None:
    """Return a program of sizes next to those that code compares with; None of such as is right.

        if x.shape[1] != table.shape[1]:      at the length of the table its trace is of that alone
            table = interpolate(table, x.shape[1])

    Args:
        loaded: the model.
        fixed: the sizes of the example that torch fixes.
        export: traces a model.
    """
    tried = _Tried(loaded)
    for to in (NEXT, LAST):
        other = _moved(loaded, fixed, to)
        found = tried.right(other, export) if tried.add([other]) else None
        if found is not None:
            return found
    return None


def fails_at_others(loaded: LoadedModel, fixed: Collection[int]) -> str:
    """Return how a model itself fails at the next sizes, and at twice as many; "" if it does not.

    Args:
        loaded: the model.
        fixed: the sizes of the example that torch fixes.
    """
    said = ""
    for to in (TWICE, LAST, NEXT):
        other = _moved(loaded, fixed, to)
        try:
            with torch.no_grad(), control_flow_as_it_is(), buffers_kept(other.module):
                args, kwargs = copies((other.args, other.kwargs))
                other.module(*args, **kwargs)
        except Exception as error:
            said = f"on {described(other.module, other.args, other.kwargs)}: {said_where(error)}"
        else:
            return ""
    return said


def _moved(
    loaded: LoadedModel, fixed: Collection[int], to: Callable[[int, int], int]
) -> LoadedModel:
    """Return a model whose dynamic sizes are others where they are some."""
    leaves, structure = pytree.tree_flatten((loaded.args, loaded.kwargs))
    for (place, axis), dim in marked_dims(loaded.dynamic_shapes).items():
        leaf = leaves[place] if place < len(leaves) else None
        dynamic = dim is not None and dim != torch.export.Dim.STATIC
        if not dynamic or not isinstance(leaf, Tensor) or leaf.shape[axis] not in fixed:
            continue
        size = to(leaf.shape[axis], unit_of(dim))
        leaves[place] = resized(leaf, axis, size).contiguous() if size > 1 else leaf
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return replace(loaded, args=args, kwargs=kwargs)


class _Tried:
    """Examples of several sizes that a model takes, with what it gives for them.

    Args:
        loaded: the model, with its own example.

    Attributes:
        models: with the example of each; its own first.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.models, self._expected = list[LoadedModel](), list[list[Tensor]]()
        self._seen = set[tuple[object, ...]]()
        self.add([loaded])

    def add(self, models: Iterable[LoadedModel | None]) -> bool:
        """Add examples of sizes that are new, and that the model takes; return if there are any."""
        before = len(self.models)
        for model in filter(None, models):
            leaves = pytree.tree_leaves((model.args, model.kwargs))
            shapes = tuple(x.shape for x in leaves if isinstance(x, Tensor))
            if shapes in self._seen:
                continue
            self._seen.add(shapes)
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(0)
                expected = outputs_on(model.module, *copies((model.args, model.kwargs)))
            if expected is not None:
                self.models.append(model)
                self._expected.append(expected)
        return len(self.models) > before

    def right(self, model: LoadedModel, export: Export) -> ExportedProgram | None:
        """Return a trace at the example of a model that is right at all sizes; None without one.

        Sizes at which the comparisons of this trace have another outcome are added.
        """
        try:
            found = export(model)
        except Exception as error:
            log.info("not traced at other sizes: %s", error_summary(error))
            return None
        own = Branches(found)
        self.add(own.resized(model, point) for point in own.points())
        return None if self.wrong(found) else found

    def wrong(self, program: ExportedProgram) -> list[LoadedModel]:
        """Return those for which a program gives something else, or fails."""
        module = program.module(check_guards=False)
        pairs = zip(self.models, self._expected, strict=True)
        return [model for model, expected in pairs if not _gives(module, model, expected)]


def _gives(module: Any, model: LoadedModel, expected: Sequence[Tensor]) -> bool:
    """Return whether a traced module gives what the model gives."""
    try:
        with (
            torch.no_grad(),
            control_flow_as_it_is(),
            buffers_kept(model.module),
            torch.random.fork_rng(devices=()),
        ):
            torch.manual_seed(0)
            args, kwargs = copies((model.args, model.kwargs))
            leaves = pytree.tree_leaves(module(*args, **kwargs))
    except Exception as error:
        log.info("a trace fails at other sizes: %s", error_summary(error))
        return False
    found = [x for x in leaves if isinstance(x, Tensor)]
    return len(found) == len(expected) and all(map(_is_close, expected, found))


def _is_close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point() or not a.numel():
        return True
    limit = CLOSE * a.nan_to_num(posinf=0, neginf=0).abs().max().double()
    same = (a == b) | (a.isnan() & b.isnan())
    return bool((same | ((a - b).abs().double() <= limit)).all())


def _undecided(branches: Branches, wrong: Sequence[Point], named: object) -> str:
    """Return what to say of a line whose branches no one trace computes; "" without such a line.

    Args:
        branches: of the trace.
        wrong: sizes at which it is not what the model computes.
        named: dynamic shapes with the names of the user.
    """
    names, *_ = name_symbols(branches.program, named)
    for point in wrong:
        guard = next((g for g in branches.own if not _holds(g, point)), None)
        if guard is None or guard.place is None:
            continue
        symbols = sorted(guard.holds.free_symbols, key=str)
        here, there = (
            " and ".join(f"{names.get(str(s), s)} {at[s]}" for s in symbols)
            for at in (branches.at, point)
        )
        return (
            f"{guard.place.filename}:{guard.place.lineno}: `{guard.place.line}` decides by sizes "
            f"what is computed: a trace at {here} is not what the model computes at {there}, and "
            f"no trace of another size is right for both. {_advice(branches, symbols, names)}"
        )
    return ""


def _advice(branches: Branches, symbols: Sequence[Symbol], names: Mapping[str, str]) -> str:
    """Return how to take sizes of one branch alone."""
    units = {symbol: unit for symbol in symbols if (unit := _unit(branches, symbol))}
    if not units:
        return "Compute both cases, and choose with torch.where, or give such sizes no name."
    sizes_of = [f"{names[str(s)]}={n}*{-(-branches.at[s] // n)}" for s, n in units.items()]
    return (
        f"Multiples take one branch: write {' and '.join(sizes_of)} in --input, or "
        f"{next(iter(units.values()))} * torch.export.Dim(...) in dynamic_shapes."
    )


def _unit(branches: Branches, symbol: Symbol) -> int | None:
    """Return the least number whose multiples take the same branches; None where none does."""
    own = [g for g in branches.own if symbol in g.holds.free_symbols]
    for unit in range(2, LARGEST_MULTIPLE + 1):
        found = {tuple(_holds(g, branches.at | {symbol: n * unit}) for g in own) for n in MULTIPLES}
        if len(found) == 1:
            return unit
    return None


def _holds(guard: sizes.Guard, point: Point) -> bool:
    return str(guard.holds.subs(point)) != "False"


def _in_example(size: sizes.Size) -> int:
    return size if isinstance(size, int) else sizes.hint(size) or 0
