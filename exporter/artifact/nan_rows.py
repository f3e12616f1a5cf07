"""Rows that lost their state to NaN or infinity: found, begun again, and their outputs blanked."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from linexport.artifact.call_inputs import Arrays
from linexport.artifact.finite import non_finite_rows
from linexport.graph.states import LENGTH, State


def lost_rows(
    states: Mapping[str, State],
    arrays: Arrays,
    before: Mapping[str, int],
    outputs: Arrays,
    batch: int,
) -> dict[str, list[int]]:
    """Return the rows with NaN or infinity of each state that has any, by name.

    A state that all rows share is lost in all of them.

    Args:
        states: of the model, by name.
        arrays: their values after a call.
        before: length of each state that grows, before it. Only what was added is looked at: the
            rest was, when it was added.
        outputs: of that call. States on a GPU are read only where these have NaN or infinity, as
            what is computed from such a state has.
        batch: rows of the call.
    """
    on_device = any(not isinstance(values, np.ndarray) for values in arrays.values())
    if on_device and not any(len(non_finite_rows(values)) for values in outputs.values()):
        return {}
    found = {}
    for name, state in states.items():
        values, axis = np.asarray(arrays[name]), state.growing_axis
        if axis is not None:
            values = values[(slice(None),) * axis + (slice(before[name], None),)]
        rows = non_finite_rows(values)
        if len(rows):
            found[name] = list(range(batch)) if state.shared else rows.tolist()
    return found


def begun_again(states: Mapping[str, State], arrays: Arrays, rows: Collection[int]) -> Arrays:
    """Copy states with these rows as at the beginning; what they grew by becomes padding."""
    changed = {name: np.array(values) for name, values in arrays.items()}
    for name, state in states.items():
        if name != LENGTH[0]:
            place = ... if state.shared else sorted(rows)
            changed[name][place] = 0 if state.growing_axis is not None else state.initial_value
    return changed


def blanked(values: np.ndarray, rows: Collection[int], batch: int) -> np.ndarray:
    """Copy an output with NaN in rows that are stopped, where its type has that."""
    if values.dtype.kind != "f" or not values.ndim or values.shape[0] != batch:
        return values
    values = np.array(values)
    values[sorted(rows)] = np.nan
    return values
