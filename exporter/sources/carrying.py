"""A model that writes buffers, with the one that is traced in its place."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from linexport.sources.carried_buffers import Buffer, example_past, states_of, stepping
from linexport.sources.loaded_model import CarriedBuffers, LoadedModel
from linexport.system.torch_internals.trees import pytree


def carrying(loaded: LoadedModel, buffers: tuple[Buffer, ...]) -> LoadedModel:
    """Return a model with the one that is traced in its place, whose buffers are states.

    Args:
        loaded: its module begins every call with the values that the buffers have.
        buffers: that it writes.
    """
    past = example_past(loaded.module, buffers, loaded.args, loaded.kwargs)
    states = states_of(buffers)
    mark = _batch_mark(loaded)
    marks = {s.past: None if s.shared or mark is None else {0: mark} for s in states}
    shapes = loaded.dynamic_shapes
    if isinstance(shapes, dict):
        shapes = {**shapes, **marks}
    elif shapes is not None:
        shapes = (*shapes, *marks.values())
    traced = replace(
        loaded,
        module=stepping(loaded.module, buffers),
        kwargs={**loaded.kwargs, **past},
        dynamic_shapes=shapes,
    )
    return replace(loaded, carried=CarriedBuffers(buffers, traced, states))


def _batch_mark(loaded: LoadedModel) -> object:
    """Return what dynamic_shapes say of the first dim of the first example; None for constant."""
    shapes, examples = loaded.dynamic_shapes, (*loaded.args, *loaded.kwargs.values())
    if shapes is None:
        return None
    entries = shapes.values() if isinstance(shapes, dict) else shapes
    for example, entry in zip(examples, entries, strict=False):
        leaves = [x for x in pytree.tree_leaves(example) if isinstance(x, Tensor) and x.dim()]
        if leaves and isinstance(entry, dict):
            return entry.get(0)
        if leaves:
            return entry[0] if isinstance(entry, tuple | list) and entry else None
    return None
