"""Compare a quantised model with its float32 one: distributions, outputs, states, streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from linexport.artifact.runtime import Artifact
from linexport.artifact.temporary import Arrays, Run
from linexport.artifact.text.language_interface import LanguageInterface
from linexport.manifest.quantisation import DriftRecord, QuantisationRecord, TokenDivergenceRecord
from linexport.parity.language import split
from linexport.parity.tolerances import TOLERANCES
from linexport.quantization import drift
from linexport.quantization.calibration_inputs import CalibrationInputs
from linexport.quantization.divergence import ComparedLogits, compare
from linexport.quantization.layer_chain import LayerChain
from linexport.quantization.window_pieces import (
    Outputs,
    Window,
    has_few_logits,
    outputs_at,
    outputs_of,
    pieces,
    whole_outputs,
)
from linexport.system import memory
from linexport.targets.base import DTYPES


@dataclass(frozen=True)
class Runs:
    """Models to compare; each maps inputs of the graph to its outputs.

    Attributes:
        reference: the model in float32; may lack states among its outputs.
        quantised: the artifact as it is deployed.
        exact: opens the same weights with activations in float32, when they are compared: it is a
            further copy in memory. It is given the name of the logits where hidden states are to
            take their place. None where the artifact rounds no activations.
        name: the reference in words.
        half: the original in the half precision of the weights; None for other weights, and where
            it is not at hand.
        layers: the layers of the reference where it is never run as a whole.
        streams: the reference carries states from call to call, as the artifact does.
        at_positions: opens the reference to compute the named logits at positions; returns None
            where it cannot. None where it is not the float32 artifact.
    """

    reference: Run
    quantised: Run
    exact: Callable[[str | None], Run] | None
    name: str
    half: Run | None = None
    layers: LayerChain | None = None
    streams: bool = True
    at_positions: Callable[[str], Run | None] | None = None

    def reference_outputs(self, artifact: Artifact, language: LanguageInterface) -> Outputs:
        """Return what yields the reference's outputs of a window, in the artifact's pieces."""
        if self.layers is not None:
            return self.layers.outputs
        if self.at_positions and artifact.manifest.states and has_few_logits(language):
            run = self.at_positions(language.logits)
            if run is not None:
                return outputs_at(artifact, language, run)
        found = outputs_of if self.streams else whole_outputs
        return found(artifact, language, self.reference)


def divergence(
    artifact: Artifact,
    language: LanguageInterface,
    reference: Outputs,
    quantised: Outputs,
    windows: Sequence[Window],
) -> tuple[TokenDivergenceRecord, dict[str, float]]:
    """Compare distributions on windows of text, and states after the longest of them.

    Args:
        artifact: names inputs and states.
        language: names tokens and logits.
        reference: yields outputs of the float32 model for a window.
        quantised: yields those of the other one, in the same pieces.
        windows: token ids, (T,) each.
    """
    longest = max(range(len(windows)), key=lambda index: len(windows[index]))
    states: dict[str, float] = {}

    def logits(index: int) -> Iterator[ComparedLogits]:
        ids = windows[index]
        cut = pieces(ids, language.vocabulary)
        for piece, expected, got in zip(cut, reference(ids), quantised(ids), strict=True):
            both = (given[language.logits][0] for given in (expected, got))
            yield ComparedLogits(piece.positions, *both)
        if index == longest:
            states.update(drift.states(artifact, got, expected))

    return compare((ids, logits(index)) for index, ids in enumerate(windows)), states


def output_error(
    artifact: Artifact, reference: Run, quantised: Run, inputs: Sequence[Arrays]
) -> float:
    """Return the root mean square error of all outputs, relative to theirs.

    Args:
        artifact: names states, which are left out.
        reference: the float32 model.
        quantised: the other one.
        inputs: of each run, by name.
    """
    presents = {s.present for s in artifact.manifest.states}
    wrong = total = 0.0
    for feeds in inputs:
        expected, got = reference(feeds), quantised(feeds)
        for name in expected.keys() - presents:
            wrong += float(((got[name] - expected[name]).astype(np.float64) ** 2).sum())
            total += float((expected[name].astype(np.float64) ** 2).sum())
    return float(np.sqrt(wrong / total)) if total else float(np.sqrt(wrong))


def with_proof(
    record: QuantisationRecord, artifact: Artifact, runs: Runs, inputs: CalibrationInputs, seed: int
) -> QuantisationRecord:
    """Return the record with what a comparison found.

    Args:
        record: how weights are stored.
        artifact: names inputs and states.
        runs: the models.
        inputs: to compare on.
        seed: of the places to split sequences at.
    """
    record = replace(
        record,
        data=inputs.description,
        text=inputs.text or record.text,
        reference=runs.name,
        alternatives=(),
    )
    if inputs.language is None or inputs.windows is None:
        error = output_error(artifact, runs.reference, runs.quantised, inputs.compared)
        record = replace(record, output_error=error)
        if runs.half is None:
            return record
        own = output_error(artifact, runs.reference, runs.half, inputs.compared)
        return replace(record, original_output_error=own)
    windows = inputs.windows.compared
    quantised = outputs_of(artifact, inputs.language, runs.quantised)
    reference = runs.reference_outputs(artifact, inputs.language)
    found, states = divergence(artifact, inputs.language, reference, quantised, windows)
    record = replace(record, divergence=found)
    if runs.half is not None:
        half = whole_outputs(artifact, inputs.language, runs.half)
        theirs, _ = divergence(artifact, inputs.language, reference, half, windows)
        record = replace(record, original_divergence=theirs)
    if not artifact.manifest.states:
        return record
    memory.trim_memory()  # of logits, before another session is opened
    language = inputs.language
    many = language.logits if language.vocabulary >= split.MIN_VOCABULARY else None
    exactly = runs.quantised if runs.exact is None else runs.exact(many)
    exact, _ = drift.streaming(artifact, exactly, windows[0], seed)
    del exactly
    memory.trim_memory()
    rounded, after_split = drift.streaming(artifact, runs.quantised, windows[0], seed)
    tolerance = TOLERANCES[DTYPES[artifact.manifest.precision]].relative
    return replace(record, drift=DriftRecord(exact, rounded, tolerance, states, after_split))
