"""Weights of a float32 artifact -> their values in fewer bits, and what led to them."""

from __future__ import annotations

from dataclasses import dataclass

from linexport.conversion.automatic_bits import within
from linexport.errors import UnsupportedModelError
from linexport.graph.bottlenecks import bottlenecks
from linexport.manifest.quantisation import CheckpointRecord, ParetoPoint
from linexport.quantization.calibration_inputs import CalibrationInputs
from linexport.quantization.choose_bits import AUTO, BITS, Chosen, Quantiser
from linexport.quantization.keep import keep_integers
from linexport.quantization.layer_chain import LayerChain
from linexport.quantization.opened import FloatModel
from linexport.quantization.quantisable import KeptWeight
from linexport.quantization.sensitivity import divergences
from linexport.sources.packed import StoredWeights
from linexport.system.progress import Stopwatch


@dataclass(frozen=True)
class ChosenWeights:
    """Weights in few bits, and what led to them.

    Attributes:
        chosen: the weights.
        divergences: of each alone, where it was measured.
        pareto: sizes that ``auto`` went through.
        left: weights that ``keep`` leaves in float32.
        checkpoint: whose integers ``keep`` took.
    """

    chosen: list[Chosen]
    divergences: dict[str, float]
    pareto: tuple[ParetoPoint, ...] = ()
    left: tuple[KeptWeight, ...] = ()
    checkpoint: CheckpointRecord | None = None


def choose(
    weights: str,
    limit: float | None,
    model: FloatModel,
    quantiser: Quantiser,
    inputs: CalibrationInputs,
    watch: Stopwatch,
) -> tuple[ChosenWeights, LayerChain | None]:
    """Choose the values of all weights, which are to be integers.

    Args:
        weights: int8, int4 or auto.
        limit: of divergence, nats, for auto.
        model: the float32 model.
        quantiser: of its weights.
        inputs: to choose by.
        watch: shown the stages.

    Returns:
        What was found, and the float32 layers, run on what is compared, where layers were proven.
    """
    if weights != AUTO and inputs.windows is not None:
        return _one_after_another(weights, model, quantiser, inputs, watch)
    with watch.stage("calibrate"), watch.shown.steps("calibrate", quantiser.measured) as advance:
        quantiser.calibrate(inputs.calibration, advance)
    if weights == AUTO:
        return _automatic(limit, model, quantiser, inputs, watch), None
    total = len(quantiser.weights)
    with watch.stage("quantise"), watch.shown.steps("quantise", total) as advance:
        return ChosenWeights(quantiser.uniform(BITS[weights], advance), {}), None


def keep(
    stored: StoredWeights,
    model: FloatModel,
    quantiser: Quantiser,
    portable: bool,
    inputs: CalibrationInputs,
    watch: Stopwatch,
) -> ChosenWeights:
    """Keep the integers of a checkpoint where they mean exactly the weights of the model.

    Args:
        stored: the checkpoint.
        model: the float32 model that was made of it.
        quantiser: of its weights.
        portable: standard operators must hold them.
        inputs: to see whether a router gives negative weights.
        watch: shown the stages.

    Raises:
        UnsupportedModelError: no weight can be kept.
    """
    total = len(quantiser.weights)
    with watch.stage("quantise"), watch.shown.steps("quantise", total) as advance:
        quantiser.check_routers(inputs.calibration[0])
        found = keep_integers(stored, quantiser.groups(), model.values, portable, advance)
    if not found.chosen:
        reasons = "; ".join(f"{k.name}: {k.reason}" for k in found.left[:3])
        raise UnsupportedModelError(
            f"No weights of {model.artifact.manifest.source.location} can be kept as they are "
            f"stored ({reasons}). Pass --weights int8 or int4."
        )
    record = CheckpointRecord(str(stored.title), len(found.chosen))
    return ChosenWeights(list(found.chosen), {}, left=found.left, checkpoint=record)


def _automatic(
    limit: float | None,
    model: FloatModel,
    quantiser: Quantiser,
    inputs: CalibrationInputs,
    watch: Stopwatch,
) -> ChosenWeights:
    assert inputs.language is not None and inputs.windows is not None and limit is not None
    total = len(quantiser.weights)
    with watch.stage("sensitivity"), watch.shown.steps("sensitivity", total) as advance:
        alone = divergences(
            model,
            quantiser.weights,
            lambda weight: quantiser.quantise(weight, 4).quantised.matrix(),
            inputs.windows.calibration,
            inputs.language.logits,
            advance,
        )
    with watch.stage("choose"):
        chosen, points = within(limit, alone, model, quantiser, inputs)
    return ChosenWeights(chosen, alone, points)


def _one_after_another(
    weights: str,
    model: FloatModel,
    quantiser: Quantiser,
    inputs: CalibrationInputs,
    watch: Stopwatch,
) -> tuple[ChosenWeights, LayerChain | None]:
    assert inputs.language is not None and inputs.windows is not None
    manifest, windows = model.artifact.manifest, inputs.windows
    proven = manifest.parity.layers if manifest.parity else ()
    sequence = next(i.shape[1] for i in manifest.inputs if i.name == inputs.language.tokens)
    read = {use.weight for weight in quantiser.weights for use in weight.uses}
    values = bottlenecks(model.graph, read, str(sequence))
    exact = LayerChain(model, values, windows.calibration, windows.compared if proven else ())
    made = LayerChain(model, values, windows.calibration)
    total = len(quantiser.weights)
    with watch.stage("quantise"), watch.shown.steps("quantise", total) as advance:
        found = ChosenWeights(quantiser.by_layers(exact, made, BITS[weights], advance), {})
    return found, exact if proven else None
