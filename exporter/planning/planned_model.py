"""A model as planning needs it: weights, states, and what a call takes besides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from linexport.planning.weights import Kind, PlannedWeight

Scratch = Callable[[int, int, int], int]
"""Bytes of values inside a call, from its rows, the tokens of a row, and earlier tokens."""


@dataclass(frozen=True)
class PlannedModel:
    """A model.

    Attributes:
        description: one line for people.
        weights: all of them.
        state_bytes: of one sequence, states of a fixed size.
        token_bytes: of one sequence and token, keys and values and whatever else grows.
        scratch: see ``Scratch``.
        streams: it has states; another reads whole sequences, each in one call.
        target: what an artifact is for; None before conversion.
        kind: of an artifact's weights; None before conversion, and for weights of several kinds.
        stored_bytes: of an artifact's weights; None before conversion.
        half_keys: its keys and values are in half precision.
    """

    description: str
    weights: tuple[PlannedWeight, ...]
    state_bytes: int
    token_bytes: int
    scratch: Scratch
    streams: bool
    target: str | None = None
    kind: Kind | None = None
    stored_bytes: int | None = None
    half_keys: bool = False
