"""Records of quantised weights: how they are stored, and what that changes."""

from __future__ import annotations

from dataclasses import dataclass, field

from linexport.manifest.proof import MetricRecord

DIVERGENCE = "mean KL divergence"


@dataclass(frozen=True)
class PositionDivergence:
    """Mean divergence over a range of positions.

    Attributes:
        first, last: positions, that of the first token being 0; ``last`` is not included.
        mean: nats.
        standard_error: of the mean over windows; None for a single window.
    """

    first: int
    last: int
    mean: float
    standard_error: float | None


@dataclass(frozen=True)
class TokenDivergenceRecord:
    """Next-token distributions of a quantised language model against those of the float32 one.

    Attributes:
        tokens: positions compared.
        windows: separate pieces of text.
        mean, standard_error, median, p99, p999, maximum: KL divergence, nats.
        same_top: share of positions at which both have the same argmax.
        perplexity, reference_perplexity: of the quantised and of the float32 model.
        perplexity_ratio, perplexity_ratio_error: the first over the second.
        by_position: means along the sequence.
    """

    tokens: int
    windows: int
    mean: float
    standard_error: float | None
    median: float
    p99: float
    p999: float
    maximum: float
    same_top: float
    perplexity: float
    reference_perplexity: float
    perplexity_ratio: float
    perplexity_ratio_error: float | None
    by_position: tuple[PositionDivergence, ...]


@dataclass(frozen=True)
class DriftRecord:
    """Largest relative errors, each over the largest magnitude of the value it is compared with.

    Attributes:
        streaming: outputs and states of split sequences against whole ones, activations in float32.
        streaming_integer: the same with activations rounded to int8, as the artifact runs.
        tolerance: largest error allowed of split sequences with activations in float32.
        states: by name, states of the quantised model against those of the float32 one.
        split_states: by name, states after a split sequence against those after the whole one, as
            the artifact runs. Earlier versions did not write them.
    """

    streaming: float
    streaming_integer: float
    tolerance: float
    states: dict[str, float]
    split_states: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class QuantisedTensorRecord:
    """A weight (outputs, inputs) in blocks along its inputs.

    Attributes:
        name: of the initializer it replaces.
        outputs, inputs: its shape.
        bits: of a value.
        block: values that share a scale and a zero point; None in half precision, without either.
        method: how its values were rounded.
        bytes: values, scales and zero points.
        divergence: of the model with this weight alone quantised; None if not measured.
    """

    name: str
    outputs: int
    inputs: int
    bits: int
    block: int | None
    method: str
    bytes: int
    divergence: float | None


@dataclass(frozen=True)
class KeptTensorRecord:
    """A weight that is kept as it was, and why."""

    name: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class ParetoPoint:
    """One choice of bits for all weights.

    Attributes:
        bytes: of all quantised weights.
        predicted: divergence predicted for them, nats.
        measured: divergence measured, nats; None where it was not.
        step_ms: median time of a decode step, in turns with the other measured points; None where
            it was not measured.
        chosen: the artifact has it.
    """

    bytes: int
    predicted: float
    measured: float | None = None
    step_ms: float | None = None
    chosen: bool = False


@dataclass(frozen=True)
class TextRecord:
    """The user's text: the file or folder, as it was named, and the SHA-256 of what was read."""

    location: str
    sha256: str


@dataclass(frozen=True)
class AlternativeRecord:
    """Another choice of weights, and its mean divergence on the same text in nats."""

    weights: str
    divergence: float


@dataclass(frozen=True)
class CheckpointRecord:
    """Integers, scales and zero points that are those of the checkpoint.

    Attributes:
        format: of the checkpoint.
        matrices: weights whose integers were kept; the numbers that they mean were compared with
            the float32 weights, and all of them are equal.
    """

    format: str
    matrices: int


@dataclass(frozen=True)
class QuantisationLimit:
    """A number of the comparison that has a limit.

    Attributes:
        name: of the number, in words.
        found, allowed: the number, and the largest one that passes.
        whose: whose the limit is, in words that follow it.
    """

    name: str
    found: float
    allowed: float
    whose: str = "allowed"

    @property
    def passed(self) -> bool:
        """True within the limit; NaN is not."""
        return self.found <= self.allowed


@dataclass(frozen=True)
class QuantisationRecord:
    """Weights in fewer bits, and the proof of what that changes.

    Attributes:
        weights: the choice of the user: fp16, bf16, int8, int4, auto or keep.
        data: the text or inputs that were used, in words.
        reference: the model compared with, in words.
        tensors: quantised weights.
        kept: weights of products and tables that were not.
        bits_per_weight: of the quantised weights, scales and zero points included.
        model_bytes, float32_bytes: size of the model's files, and of those before, which are in
            float32 or, for a target on GPUs, in the half precision of the artifact.
        max_kld: largest mean divergence the user allows; None: no limit.
        divergence: of a language model's distributions; None for other models.
        output_error: relative root mean square error of other models' outputs.
        drift: of states and streams; None where the model has no states.
        pareto: sizes and predicted divergences that ``auto`` went through.
        original_divergence: of the original computed in the half precision of the weights; None
            for other weights, where it was not run, and for other models than language models.
        original_output_error: the same for other models.
        metric: the user's own score of the float32 artifact and of this one; None if none was
            requested.
        max_drop: by how much that score may be worse; None: no limit.
        alternatives: where the divergence is past ``max_kld``, finer choices of weights, measured
            until one is within it.
        text: the text that the user gave last; ``validate`` takes it again. None for other inputs.
        checkpoint: whose integers were kept; None for other weights than ``keep``.
    """

    weights: str
    data: str
    reference: str
    tensors: tuple[QuantisedTensorRecord, ...]
    kept: tuple[KeptTensorRecord, ...]
    bits_per_weight: float
    model_bytes: int
    float32_bytes: int
    max_kld: float | None
    divergence: TokenDivergenceRecord | None
    output_error: float | None
    drift: DriftRecord | None
    pareto: tuple[ParetoPoint, ...] = ()
    original_divergence: TokenDivergenceRecord | None = None
    original_output_error: float | None = None
    metric: MetricRecord | None = None
    max_drop: float | None = None
    alternatives: tuple[AlternativeRecord, ...] = ()
    text: TextRecord | None = None
    checkpoint: CheckpointRecord | None = None

    @property
    def limits(self) -> tuple[QuantisationLimit, ...]:
        """Every number that has a limit: splits, half precision, the user's score, divergence."""
        found = []
        if self.drift is not None:
            name = "relative error of split sequences with activations in float32"
            found.append(QuantisationLimit(name, self.drift.streaming, self.drift.tolerance))
        own = f"of the original itself in {self.weights}"
        ours, theirs = self.divergence, self.original_divergence
        if ours is not None and theirs is not None:
            found.append(QuantisationLimit(DIVERGENCE, ours.mean, theirs.mean, own))
        if self.output_error is not None and self.original_output_error is not None:
            both = self.output_error, self.original_output_error
            found.append(QuantisationLimit("relative output error", *both, own))
        if self.metric is not None and self.max_drop is not None:
            name = f"drop of {self.metric.name}"
            found.append(QuantisationLimit(name, self.metric.drop, self.max_drop))
        if self.max_kld is not None and ours is not None:
            found.append(QuantisationLimit(DIVERGENCE, ours.mean, self.max_kld))
        return tuple(found)

    @property
    def passed(self) -> bool:
        """True if every number is within its limit."""
        return all(limit.passed for limit in self.limits)
