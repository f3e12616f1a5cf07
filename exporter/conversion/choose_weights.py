"""Weights of a float32 artifact -> their values in fewer bits, and what led to them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from linexport.artifact.text.language_interface import LanguageInterface
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
) -> tuple[ChosenWeights, LayerChain | None]:
    """Keep the integers of a checkpoint where they mean exactly the weights of the model.

    Args:
        stored: the checkpoint.
        model: the float32 model that was made of it.
        quantiser: of its weights.
        portable: standard operators must hold them.
        inputs: to see whether a router gives negative weights.
        watch: shown the stages.

    Returns:
        See ``choose``.

    Raises:
        UnsupportedModelError: no weight can be kept.
    """
    total = len(quantiser.weights)
    with watch.stage("quantise"), watch.shown.steps("quantise", total) as advance:
        exact = _proven_layers(model, quantiser, inputs)
        if exact is None:
            quantiser.check_routers(inputs.calibration[0])
        found = keep_integers(stored, quantiser.groups(), model.values, portable, advance)
    if not found.chosen:
        reasons = "; ".join(f"{k.name}: {k.reason}" for k in found.left[:3])
        raise UnsupportedModelError(
            f"No weights of {model.artifact.manifest.source.location} can be kept as they are "
            f"stored ({reasons}). Pass --weights int8 or int4."
        )
    record = CheckpointRecord(str(stored.title), len(found.chosen))
    return ChosenWeights(list(found.chosen), {}, left=found.left, checkpoint=record), exact


def _proven_layers(
    model: FloatModel, quantiser: Quantiser, inputs: CalibrationInputs
) -> LayerChain | None:
    """Run the float32 layers on what is compared, where they were proven one by one.

    Experts whose router gives negative weights are then read by products.
    """
    if inputs.language is None or inputs.windows is None or not _by_layers(model):
        return None
    values = _cuts(model, quantiser, inputs.language)
    windows = inputs.windows
    exact = LayerChain(model, inputs.language, values, windows.calibration[:1], windows.compared)
    for index in range(len(exact.segments)):
        shares = quantiser.shares & exact.computes(index)
        for piece in exact.values(index, shares) if shares else ():
            quantiser.leave_kernel({name: float(share.min()) for name, share in piece.items()})
        exact.leave(index)
    return exact


def _by_layers(model: FloatModel) -> bool:
    """Return whether the float32 model was proven layer by layer."""
    parity = model.artifact.manifest.parity
    return parity is not None and bool(parity.layers)


def _cuts(model: FloatModel, quantiser: Quantiser, language: LanguageInterface) -> list[str]:
    """Return the values that layers hand on."""
    inputs = model.artifact.manifest.inputs
    sequence = next(i.shape[1] for i in inputs if i.name == language.tokens)
    read = {use.weight for weight in quantiser.weights for use in weight.uses}
    return bottlenecks(model.graph, read, str(sequence))


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
    windows, proven = inputs.windows, _by_layers(model)
    compared = windows.compared if proven else ()
    begun = partial(LayerChain, model, inputs.language, _cuts(model, quantiser, inputs.language))
    exact, made = begun(windows.calibration, compared), begun(windows.calibration)
    total = len(quantiser.weights)
    with watch.stage("quantise"), watch.shown.steps("quantise", total) as advance:
        found = ChosenWeights(quantiser.by_layers(exact, made, BITS[weights], advance), {})
    return found, exact if proven else None
