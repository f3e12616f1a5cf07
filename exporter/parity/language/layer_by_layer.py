"""Parity of a causal language model layer by layer, where the whole would take too much memory.

    for each layer k:   artifact_k(h_{k-1})  against  h_k = original_k(h_{k-1})

h_{k-1} is what the original's layers before compute of the same prompt: each layer is run on its
real inputs, whole and in pieces with its own states, with and without padding; rows of a padded
prompt are those that the original computes of each alone. Only one layer's
weights are in use at a time. Where a layer is off by more than the tolerance, the original's is run
in float64 on the same inputs, and what it loses to rounding is allowed for. Choices of the artifact
are taken for the original's where rounding decides them, see ``parity.routing.near_ties``.

That every layer is right is not that their errors stay small together: the quantised model, which
has an error of its own, is compared as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property, partial

import numpy as np
import onnx
import torch

from linexport.artifact.temporary import Run
from linexport.errors import UnsupportedModelError
from linexport.graph.segments import Segment, cut, stand_in
from linexport.manifest.proof import CaseRecord, LayerRecord, StreamingRecord
from linexport.parity.cases import ChosenSizes
from linexport.parity.check import (
    NOT_FINITE,
    ModelUnderTest,
    Parity,
    case_record,
    largest_error,
    require_compared,
)
from linexport.parity.compare import Comparison, compare_arrays
from linexport.parity.language.layers import AFTER, observe, returned_by
from linexport.parity.language.prompts import BATCH, SEQUENCE, Prompt, Trial, plan_prompts
from linexport.parity.language.rows_alone import choices_by_row
from linexport.parity.noise.float32_error import apart
from linexport.parity.noise.padding import padded_error
from linexport.parity.reference.extra_outputs import Change
from linexport.parity.reference.module import Reference
from linexport.parity.routing.choices import recording
from linexport.parity.routing.near_ties import Decided, decide, notes
from linexport.parity.tolerances import Tolerance
from linexport.system import memory
from linexport.trace import Traced

log = logging.getLogger(__name__)

LAYER_LENGTHS = (1, 64, 65, 300)
"""Lengths of whole sequences: more than any chunk, and few logits in memory at once."""

OpenGraph = Callable[[onnx.ModelProto], Run]
"""Opens a part of the artifact's graph, and gives a function to run it."""


@dataclass(frozen=True)
class _Opened:
    """A part that is open, as a session."""

    run: Run


def layer_values(tested: ModelUnderTest, traced: Traced) -> dict[str, str]:
    """Return the value of the graph that each layer of a language model returns, by layer.

    Raises:
        UnsupportedModelError: it is not a language model whose layers have names.
    """
    language = tested.loaded.language
    found = (
        {}
        if language is None or traced.translated is None
        else returned_by(traced.translated, language.layers)
    )
    if not found:
        raise UnsupportedModelError(
            "--proof layers is for language models of Hugging Face folders, whose layers are known "
            f"by name; found {tested.loaded.source.description}. Leave out --proof."
        )
    return found


@dataclass
class _Layer:
    """A layer with the worst of its comparisons."""

    name: str
    error: float = 0.0
    passed: bool = True


@dataclass
class _Outcome:
    """The worst comparison of each trial."""

    layers: list[_Layer] = field(default_factory=list)
    worst: dict[int, CaseRecord] = field(default_factory=dict)

    def add(
        self, number: int, trial: Trial, layer: str, result: Comparison, rounding: float | None
    ) -> None:
        """Take in what was found for a layer."""
        own = next((found for found in self.layers if found.name == layer), None)
        if own is None:
            self.layers.append(own := _Layer(layer))
        own.error = max(own.error, result.max_relative_error)
        own.passed &= result.passed
        sizes = trial.case.sizes
        record = case_record(
            trial.case, result, sizes[BATCH], sizes[SEQUENCE], "float32", layer, rounding
        )
        before = self.worst.get(number)
        if before is None or _severity(record) > _severity(before):
            self.worst[number] = record


def _severity(record: CaseRecord) -> tuple[bool, float]:
    return not record.passed, largest_error([record.max_relative_error])


@memory.low_memory()
def check_layers(
    tested: ModelUnderTest,
    values: Mapping[str, str],
    graph: onnx.ModelProto,
    open_graph: OpenGraph,
    seed: int = 0,
    advance: Callable[[int, str], None] = lambda done, note: None,
) -> tuple[Parity, StreamingRecord]:
    """Compare every layer of a graph with the original's on the original's inputs.

    Args:
        tested: the converted model; it is not opened.
        values: see ``layer_values``.
        graph: of the converted model.
        open_graph: opens a part of it.
        seed: of the prompts.
        advance: shown the number of layers done, and the name of the last.

    Returns:
        The outcome, one case a trial, that of its worst layer; and that of the trials in pieces.

    Raises:
        UnsupportedModelError: outputs of the original are not finite anywhere.
    """
    language = tested.loaded.language
    assert language is not None
    continued, lengths = bool(tested.states), ChosenSizes(LAYER_LENGTHS)
    trials = plan_prompts(tested.dims, language.context, seed, lengths, continued)
    prompts = [trial.prompt(language.vocabulary) for trial in trials]
    single = Reference(tested.loaded, torch.float32)
    double = cache(lambda: Reference(tested.loaded, torch.float64))
    expected = [observe(single.module, prompt, list(values)) for prompt in prompts]
    finite = any(np.isfinite(found[AFTER]).any() for found in expected)
    require_compared(tested.output_names, tested.output_names if finite else (), [NOT_FINITE])
    parity, outcome = Parity(tested.tolerance), _Outcome()
    logits = [prompt.real(x[AFTER]) for prompt, x in zip(prompts, expected, strict=True)]
    parity.add_padded(padded_error(trials, prompts, logits, single, double))
    original = _Original(single.module, lambda: double().module, list(values), prompts, expected)
    names = [*values, AFTER]
    states = {s.past: s.present for s in tested.states}
    for index, segment in enumerate(cut(graph, list(values.values()), states)):
        before = {name: values[name] for name in names[:index]}
        part = _Part(tested, open_graph, segment, open_graph(segment.model), names[index], before)
        for number, trial in enumerate(trials):
            result, rounding = _compared(part, original, number, trial, parity)
            parity.counts += np.asarray(result.counts)
            outcome.add(number, trial, part.layer, result, rounding)
            memory.trim_memory()
        del part  # two parts are never open at a time
        advance(index + 1, names[index])
    parity.notes.extend(notes(parity.ties))
    parity.cases = [outcome.worst[number] for number in range(len(trials))]
    parity.layers = [
        LayerRecord(x.name, values.get(x.name), x.error, x.passed) for x in outcome.layers
    ]
    split = [(t, c) for t, c in zip(trials, parity.cases, strict=True) if len(t.pieces) > 1]
    return parity, StreamingRecord(
        all(case.passed for _, case in split),
        None,
        largest_error(case.max_relative_error for _, case in split),
        tuple(trial.pieces for trial, _ in split),
    )


@dataclass(frozen=True)
class _Original:
    """The original, run on all prompts.

    Attributes:
        module: in float32.
        double: gives it in float64, which takes as much memory again.
        layers: their names.
        prompts: what it was run on.
        expected: what every layer gave, and the logits, for each prompt.
    """

    module: torch.nn.Module
    double: Callable[[], torch.nn.Module]
    layers: list[str]
    prompts: Sequence[Prompt]
    expected: Sequence[Mapping[str, np.ndarray]]

    @cached_property
    def exact(self) -> list[dict[str, np.ndarray]]:
        """Every layer in float64 on its inputs of float32, for each prompt."""
        module = self.double()
        return [
            observe(module, prompt, self.layers, given)
            for prompt, given in zip(self.prompts, self.expected, strict=True)
        ]

    def with_choices(
        self, number: int, layer: str, chosen: Sequence[np.ndarray], tolerance: Tolerance
    ) -> Decided[np.ndarray] | None:
        """Return a layer with choices of the artifact, where rounding decides them."""
        alone = self._is_alone(number, layer)
        runs = [
            partial(self._again, module, number, layer, alone)
            for module in (self.module, self.double())
        ]
        return decide(runs, choices_by_row(chosen, self.prompts[number]), tolerance)

    def _again(
        self,
        module: torch.nn.Module,
        number: int,
        layer: str,
        alone: bool,
        deciding: AbstractContextManager[object],
    ) -> np.ndarray:
        """Run a layer in a context, on its inputs; returns what it gives of tokens.

        Every other layer is run as well, unless the layer is run alone.
        """
        prompt, given = self.prompts[number], self.expected[number]
        found = observe(module, prompt, self.layers, given, (layer, deciding), alone)
        return prompt.real(found[layer])

    def _is_alone(self, number: int, layer: str) -> bool:
        """Return whether a layer that is run alone gives what it gives among all others.

        It does not where layers share more than what they hand on, such as keys and values. A model
        of many layers takes as many times as long as one.
        """
        try:
            found = self._again(self.module, number, layer, True, nullcontext())
        except Exception as error:  # whatever the module raises without what the others share
            log.debug("%s cannot be run alone: %r", layer, error)
            return False
        return np.array_equal(found, self.prompts[number].real(self.expected[number][layer]))


@dataclass(frozen=True)
class _Part:
    """A part of the artifact that ends with a layer, open to be run.

    Attributes:
        tested: the artifact.
        open_graph: opens a graph like its own.
        segment: its graph.
        run: runs it.
        layer: its name.
        before: the value that each layer before it gives, by layer.
    """

    tested: ModelUnderTest
    open_graph: OpenGraph
    segment: Segment
    run: Run
    layer: str
    before: Mapping[str, str]

    def outputs(
        self, prompt: Prompt, trial: Trial, expected: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """Return the layer of a trial, whose layers before are the original's."""
        return self._in_pieces(self.run, prompt, trial, expected)

    def choices(
        self, prompt: Prompt, trial: Trial, expected: Mapping[str, np.ndarray]
    ) -> list[np.ndarray]:
        """Return what the part chooses in a trial."""

        def open_changed(change: Change) -> _Opened:
            model = onnx.ModelProto()
            model.CopyFrom(self.segment.model)
            change(model)
            return _Opened(self.open_graph(model))

        session = recording(open_changed)
        if session is None:
            return []
        self._in_pieces(session.run, prompt, trial, expected)
        return [*session.choices(len(prompt.tokens)).values()]

    def _in_pieces(
        self, run: Run, prompt: Prompt, trial: Trial, expected: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """Return what the part computes of a prompt's tokens that are not padding."""
        begins = {value: expected[layer] for layer, value in self.before.items()}
        tested, segment = self.tested, self.segment
        result = segment.ends or tested.output_names[0]
        pasts = {s.present: s.past for s in tested.states}
        initial = tested.initial_state(prompt.tokens.shape[0])
        axes = {s.past: s.growing_axis for s in tested.states}
        state: dict[str, np.ndarray] = {}
        parts, start = [], 0
        for size in trial.pieces:
            others = {name: stand_in(x, axes[name], start) for name, x in initial.items()}
            before = {**(others if start else initial), **state}
            fed = {**prompt.part(start, start + size), **before}
            given = {name: values[:, start : start + size] for name, values in begins.items()}
            own = {name: fed[name] for name in segment.inputs}
            outputs = run({**own, **{name: given[name] for name in segment.begins}})
            state |= {pasts[name]: outputs[name] for name in segment.outputs if name in pasts}
            parts.append(outputs[result])
            start += size
        return prompt.real(parts[0] if len(parts) == 1 else np.concatenate(parts, 1))


def _compared(
    part: _Part, original: _Original, number: int, trial: Trial, parity: Parity
) -> tuple[Comparison, float | None]:
    """Compare a layer with the original's in a trial; ties are added to ``parity``.

    Returns:
        The comparison, and what the original loses to rounding, where that was found out.
    """
    layer, tolerance = part.layer, parity.tolerance
    prompt, expected = original.prompts[number], original.expected[number]
    got = part.outputs(prompt, trial, expected)
    target = prompt.real(expected[layer])
    result = compare_arrays(target, got, tolerance)
    if result.passed:
        return result, None
    chosen = part.choices(prompt, trial, expected) if layer in original.layers else []
    if chosen:
        decided = original.with_choices(number, layer, chosen, tolerance)
        if decided is None:
            return result, None
        target = decided.outputs[0]
        rounding = apart(target, decided.outputs[-1])
        result = compare_arrays(target, got, tolerance, rounding)
        parity.ties.extend([(trial.case, decided.ties)] if result.passed else [])
        return result, rounding
    # An error that is NaN, or larger than any rounding may explain, needs no second opinion.
    explicable = result.max_relative_error <= tolerance.most
    if not explicable:
        return result, None
    rounding = apart(target, prompt.real(original.exact[number][layer]))
    return compare_arrays(target, got, tolerance, rounding), rounding
