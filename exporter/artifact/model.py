"""A model that is called with inputs and states and returns outputs and the next states."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import prod

import numpy as np

from linexport.artifact.call_inputs import Arrays, CallInputs, Range, count_rows
from linexport.artifact.finite import non_finite_rows
from linexport.artifact.state import StreamState
from linexport.artifact.text.language_interface import language_interface
from linexport.artifact.token_axis import TokenAxis
from linexport.errors import UsageError
from linexport.graph.states import LENGTH, PADDING, State
from linexport.manifest import Manifest
from linexport.targets import InferenceSession
from linexport.targets.base import DeviceSession, run_into
from linexport.targets.runtime.options import LOGITS_TO_KEEP


class Model:
    """An opened model.

    Attributes:
        manifest: that of the artifact.
        model_sha256: digest of its file, which says whose state a state is.
        states: by the names of their inputs.
        inputs: those that a caller gives.
        tower: the model of the vision tower; None without one.
        predictor: the model of the head for multi-token prediction; None without one.
    """

    def __init__(
        self,
        manifest: Manifest,
        session: InferenceSession,
        ranges: Mapping[str, Range],
        tower: InferenceSession | None = None,
        predictor: Model | None = None,
    ) -> None:
        held = [State.from_record(s) for s in manifest.states]
        self.manifest, self.model_sha256 = manifest, manifest.model_sha256
        self.states = {s.past: s for s in held}
        array = session.array if isinstance(session, DeviceSession) else np.asarray
        self.inputs = CallInputs(manifest, self.states, ranges, array)
        self._session, self.tower, self.predictor = session, tower, predictor
        self._presents = {s.present: s.past for s in held}

    @cached_property
    def token_axis(self) -> TokenAxis:
        """The axis of the tokens in inputs and outputs."""
        return TokenAxis(self.manifest, list(self.states.values()))

    @property
    def longest(self) -> int | None:
        """Tokens of a call at most; None where nothing bounds them."""
        return self.manifest.dims[self.token_axis.dim].max

    def longest_piece(self, tokens: int, rows: int = 1, held: int = 0) -> int:
        """Return how many tokens of a prompt each call takes.

        Args:
            tokens: of the prompt.
            rows: of the batch.
            held: tokens before it.
        """
        return tokens if self.longest is None else min(tokens, self.longest)

    def initial_state(self, batch: int = 1) -> Arrays:
        """Return the states that begin sequences, by input name; growing ones have no length."""
        return {name: s.start(batch) for name, s in self.states.items()}

    def state_bytes(self, length: int = 0, batch: int = 1) -> int:
        """Return the bytes of the state after ``length`` tokens, known before any is computed.

        Only key-value rows and their mask depend on the length.
        """
        total = 0
        for state in self.states.values():
            sizes = list(state.start(batch).shape)
            if state.growing_axis is not None:
                sizes[state.growing_axis] = length
            total += prod(sizes) * np.dtype(state.dtype).itemsize
        return total

    def rows_of(self, state: Mapping[str, np.ndarray]) -> int | None:
        """Return the batch of states; None where all rows of a batch share them."""
        own = (state[name].shape[0] for name, s in self.states.items() if not s.shared)
        return next(own, None)

    def hold(self, state: Mapping[str, np.ndarray]) -> Arrays:
        """Return states where the model computes: on its GPU, where it runs on one.

        ``call`` returns the next ones there, and what is there is not copied again.
        """
        session = self._session
        return session.hold(state) if isinstance(session, DeviceSession) else dict(state)

    def empty(self, shape: tuple[int, ...], dtype: str | np.dtype[np.generic]) -> np.ndarray:
        """Return an array for states where the model computes, of any values."""
        session = self._session
        if isinstance(session, DeviceSession):
            found: np.ndarray = session.empty(shape, dtype)
            return found
        return np.empty(shape, dtype)

    def call(
        self,
        feeds: Mapping[str, np.ndarray],
        state: Mapping[str, np.ndarray],
        into: Mapping[str, np.ndarray] | None = None,
        logits_to_keep: int = 0,
    ) -> tuple[Arrays, Arrays]:
        """Return the outputs and the next state, both by name, for inputs that were checked.

        A state on a GPU is followed by one on that GPU.
        Next states of ``into`` are written to its arrays, which share no memory with ``state``.
        Logits are those of the last ``logits_to_keep`` tokens at least, 0 of all: others are not
        computed where the session need not.
        """
        inputs, taken = {**feeds, **state}, into or {}
        if logits_to_keep and getattr(self._session, "keeps_logits", False):
            inputs[LOGITS_TO_KEEP] = np.array([logits_to_keep], np.int64)
        arrays = {p: taken[past] for p, past in self._presents.items() if past in taken}
        outputs = run_into(self._session, inputs, arrays) if arrays else self._session.run(inputs)
        rest = {past: outputs.pop(p) for p, past in self._presents.items() if p not in arrays}
        return outputs, {**rest, **taken}

    def check_kept(self, logits_to_keep: int) -> None:
        """Check the number of last tokens whose logits are requested.

        Raises:
            UsageError: it is negative, or the model gives no logits of each token.
        """
        if logits_to_keep < 0:
            raise UsageError(f"logits_to_keep is {logits_to_keep}; expected 0 (all) or more.")
        if logits_to_keep:
            language_interface(self.manifest)

    def kept(self, outputs: Arrays, logits_to_keep: int) -> Arrays:
        """Return outputs with the logits of the last tokens alone; 0 keeps all."""
        if not logits_to_keep:
            return outputs
        name = language_interface(self.manifest).logits
        return {**outputs, name: outputs[name][:, -logits_to_keep:]}

    def run_graph(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """Run the graph on all its inputs; returns all outputs, states among them."""
        return self._session.run(feeds)

    def shared_states(self) -> list[str]:
        """Return the names of states in which one row cannot begin anew without the others.

        Positions are counted for all rows together, and buffers may be of all of them. Rows of a
        state that grows have one length, and begin anew as padding, where the model has a mask for
        that.
        """
        masked = any(s.op == PADDING for s in self.states.values())
        grown = [
            name for name, s in self.states.items() if s.growing_axis is not None and not masked
        ]
        shared = [name for name, s in self.states.items() if name == LENGTH[0] or s.shared]
        return shared + grown

    def check_state(self, state: StreamState, named: str) -> None:
        """Check that a state is one of this model.

        Raises:
            UsageError: it is of another model, or has NaN or infinity; ``named`` begins the text.
        """
        if state.model_sha256 != self.model_sha256:
            raise UsageError(
                f"{named} holds the state of another model, SHA-256 {state.model_sha256}."
            )
        if not state.arrays:
            return
        sizes: dict[str, int] = {}
        for name in sorted({*state.arrays, *self.states}):
            values, expected = state.arrays.get(name), self.states.get(name)
            if values is None or expected is None or not expected.fits(values, sizes):
                raise UsageError(
                    f"{named} holds the state of another model: {name} does not fit. Expected "
                    f"{ {n: s.shape for n, s in self.states.items()} }."
                )
            rows = non_finite_rows(values)
            if len(rows):
                raise UsageError(
                    f"{named} has NaN or infinity in {name}, {count_rows(rows.tolist())}."
                )
