"""Records of a linearisation: what was replaced, how far it errs, and what it costs by length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from linexport.manifest.proof import MetricRecord
from linexport.manifest.records import StageRecord

Status = Literal["ok", "declined"]

SOFTMAX = "softmax"
"""In place of the name of a form: attention that is kept."""


@dataclass(frozen=True)
class OriginalRecord:
    """The module with softmax attention.

    Attributes:
        kind: what was loaded, or "module".
        location: its path, its class, or ``package.module:callable``.
        sha256: of its files; None where there are none.
        description: one line for people.
    """

    kind: str
    location: str
    sha256: str | None
    description: str


@dataclass(frozen=True)
class CalibrationRecord:
    """Rows that forms were fitted to, and rows that they were judged by."""

    rows: int
    held_out: int


@dataclass(frozen=True)
class MultiplyAdds:
    """Multiply-adds of the attention of one layer at one length, before and after."""

    length: int
    original: int
    linear: int


@dataclass(frozen=True, kw_only=True)
class AttentionSite:
    """One call of softmax attention.

    Attributes:
        name: path of the module that calls; ``#2`` and so on where one calls more than once.
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: width of a query.
        value_dim: width of a value.
        scale: factor of q . k.
        causal: a token sees only those up to it.
        masked: a mask says which keys there are.
        cross: queries and keys are of different lengths.
        length: tokens of the calibration data.
        keys: keys of it.
        memory: keys and values are the same for every row.
        projection: name of the parameter that the output is multiplied with next, if any is.
        reason: why it is kept; None where it was, or can be, replaced.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    causal: bool
    masked: bool
    cross: bool
    length: int
    keys: int
    memory: bool = False
    projection: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class ErrorBin:
    """Errors of some of the queries.

    Attributes:
        low: lower bound of the quantity that they are binned by.
        high: likewise.
        queries: how many there are.
        error: of the form; None where the attention's own output is zero.
        uniform_error: of attending to all keys alike.
    """

    low: float
    high: float
    queries: int
    error: float | None
    uniform_error: float | None


@dataclass(frozen=True, kw_only=True)
class AttentionRow(AttentionSite):
    """A call, and the form that took its place, or one not better than the mean.

    Attributes:
        map: feature map of the form; None for other forms, and where none was made.
        options: of the map.
        features: M.
        attention_error: of the form alone, on the inputs the attention has in the original.
        uniform_error: of attending to all keys alike.
        local_error: of a map with a locality, from exact masked attention.
        local_uniform_error: of attending to all keys alike, from exact masked attention.
        distilled_error: of the distilled form after its output projection, on the inputs the
            attention has in the original; None without distillation or projection.
        distilled_uniform_error: of attending to all keys alike, after the original's projection.
        margin: 1 - f / a in standard errors over held-out rows; f is the squared error that the
            layer is judged by, a that of attending to all keys alike. None of a single row, or
            where no row differs.
        by_position: errors by the position of the query, from 0, bounds included.
        by_sharpness: errors by the share of its keys that a query attends to, e^entropy over their
            number: 0 is one of very many, 1 all alike.
        layer_error: as it runs, errors of earlier layers included.
        pseudo_keys: number of them in a static memory.
        held_out_error: of a static memory, on queries that it was not fitted to.
        mean_of_values_error: of answering the mean of its values every time.
        multiply_adds: by length.
    """

    map: str | None = None
    options: dict[str, Any]
    features: int | None = None
    attention_error: float | None = None
    uniform_error: float | None = None
    local_error: float | None = None
    local_uniform_error: float | None = None
    distilled_error: float | None = None
    distilled_uniform_error: float | None = None
    margin: float | None = None
    by_position: tuple[ErrorBin, ...] = ()
    by_sharpness: tuple[ErrorBin, ...] = ()
    layer_error: float | None = None
    pseudo_keys: int | None = None
    held_out_error: float | None = None
    mean_of_values_error: float | None = None
    multiply_adds: tuple[MultiplyAdds, ...] = ()

    @property
    def judged_errors(self) -> tuple[float, float] | None:
        """Errors of the form and of attending to all keys alike that it is judged by.

        After distillation those of what was learned, with a locality those against exact masked
        attention. None where no form was made.
        """
        pairs = (
            (self.distilled_error, self.distilled_uniform_error),
            (self.local_error, self.local_uniform_error),
            (self.attention_error, self.uniform_error),
        )
        return next((pair for pair in pairs if None not in pair), None)  # type: ignore[return-value]


@dataclass(frozen=True)
class FeedForwardTimes:
    """Median milliseconds of a feed-forward layer and of what it takes the place of, exported."""

    rows: int
    before_ms: float
    after_ms: float

    @property
    def factor(self) -> float:
        """Time over that of before."""
        return self.after_ms / self.before_ms


@dataclass(frozen=True, kw_only=True)
class FeedForwardRow:
    """One linear layer whose output goes into an activation.

    Attributes:
        name: path of the linear layer.
        reason: why it is kept; None where it was replaced. Fields below are then of its form.
        form: "least-squares", "low-rank", "chebyshev", "bernstein" or "taylor".
        activation: its name.
        degree: of the polynomials.
        folded: the linear layer after the activation is in it; errors and costs are of both.
        rank: of a low-rank form.
        powers: of the feature map of each degree above 1.
        features: M.
        multiply_adds: for one token.
        multiply_adds_before: of the linear layer.
        parameters: numbers stored.
        parameters_before: of the linear layer.
        error: mean squared, on held-out rows.
        relative_error: its root, relative to the root mean square of the output.
        bound: of that error by theory; None where there is none.
        outside: part of held-out values outside the intervals of the calibration data.
        rounding: by how much float32 changes the output, relative.
        table: of the cost, for people.
        times: by the number of rows at once; None where they were not measured.
    """

    name: str
    reason: str | None = None
    form: str | None = None
    activation: str | None = None
    degree: int | None = None
    folded: bool = False
    rank: int | None = None
    powers: tuple[Any, ...] = ()
    features: int | None = None
    multiply_adds: int | None = None
    multiply_adds_before: int | None = None
    parameters: int | None = None
    parameters_before: int | None = None
    error: float | None = None
    relative_error: float | None = None
    bound: float | None = None
    outside: float | None = None
    rounding: float | None = None
    table: str | None = None
    times: tuple[FeedForwardTimes, ...] | None = None

    @property
    def pays(self) -> bool | None:
        """Return whether it is faster at some number of rows or, untimed, has fewer multiply-adds.

        None where the layer is kept.
        """
        if self.times is not None:
            return any(one.factor < 1 for one in self.times)
        return None if self.cost_factor is None else self.cost_factor < 1

    @property
    def cost_factor(self) -> float | None:
        """Multiply-adds over those of before; None where it is kept."""
        if self.multiply_adds is None or not self.multiply_adds_before:
            return None
        return self.multiply_adds / self.multiply_adds_before


@dataclass(frozen=True)
class DistillationRecord:
    """Fine-tuning of the forms by the outputs of the original's layers.

    Attributes:
        steps: taken; the weights kept are those of ``best_step``.
        asked: largest number of steps.
        best_step: with the smallest held-out loss.
        before: held-out loss of the forms as they were made.
        after: the smallest.
        parameters: numbers that were learned.
    """

    steps: int
    asked: int
    best_step: int
    before: float
    after: float
    parameters: int


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers stored, buffers included.

    Attributes:
        original: of the original.
        linear: of the linear form.
        not_shared: of the linear form alone.
        exported: of the linear form, that its computation uses: only these reach an artifact. None
            where all of them do.
    """

    original: int
    linear: int
    not_shared: int
    exported: int | None = None


@dataclass(frozen=True)
class FormTimes:
    """Median milliseconds of both forms at one length, exported and in PyTorch.

    The length is in tokens, or in rows; see ``FormCosts``.
    """

    length: int
    original_ms: float
    linear_ms: float
    original_pytorch_ms: float
    linear_pytorch_ms: float

    @property
    def best_original_ms(self) -> float:
        """The original at its fastest."""
        return min(self.original_ms, self.original_pytorch_ms)


@dataclass(frozen=True)
class FormMemory:
    """Peak megabytes of one run of each form at one length; None with a reason."""

    length: int
    original_mb: float | None
    linear_mb: float | None
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class FormCosts:
    """Costs of both forms by length.

    Attributes:
        latency: None where it was not measured.
        memory: None where it was not measured.
        crossover: measured length from which the linear form is the faster one; None: never.
        reason: why nothing was measured.
        lengths_left_out: why requested lengths were not measured.
        over: what lengths are: tokens of a sequence, or rows at once of a model without one.
    """

    latency: tuple[FormTimes, ...] | None = None
    memory: tuple[FormMemory, ...] | None = None
    crossover: int | None = None
    reason: str | None = None
    lengths_left_out: str | None = None
    over: Literal["tokens", "rows"] = "tokens"


@dataclass(frozen=True)
class AttentionTime:
    """Milliseconds of one attention call at one length, measured or computed from shorter ones."""

    length: int
    milliseconds: float
    computed: bool = False


@dataclass(frozen=True)
class AttentionCost:
    """Cost of one attention call of a form.

    Attributes:
        times: by length, of one row.
        state_bytes: of one sequence, whatever its length.
        bytes_for_token: that each token adds to them.
    """

    times: tuple[AttentionTime, ...]
    state_bytes: int
    bytes_for_token: int = 0

    def bytes_at(self, length: int) -> int:
        """Bytes of the state after so many tokens."""
        return self.state_bytes + self.bytes_for_token * length


@dataclass(frozen=True)
class FormCost:
    """Cost of a form, or of softmax, in layers of one shape; ``reason`` where it has none."""

    form: str
    shape: str
    cost: AttentionCost | None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class SearchPoint:
    """One choice of forms for all layers.

    Attributes:
        forms: of each call of softmax attention, in order; "softmax" where it is kept.
        drop: mean on the rows of the search.
        bound: upper confidence bound of it on these rows, to which the choice has been fitted.
        steps: of fine-tuning; 0 for forms after attention transfer alone.
        times: of all attention calls together.
        state_bytes: of all of them, at the longest length.
        chosen: it is the result.
    """

    forms: tuple[str, ...]
    drop: float
    bound: float
    steps: int
    times: tuple[AttentionTime, ...]
    state_bytes: int
    chosen: bool = False


@dataclass(frozen=True, kw_only=True)
class SearchRecord:
    """A search for the cheapest forms within a drop.

    Attributes:
        minutes: time budget.
        seconds: the search took, all runs together.
        exhausted: the budget ended it.
        resumed: measurements that were on record.
        measured: measurements of choices of forms.
        loss: name of the score.
        max_drop: allowed.
        confidence: of bounds.
        fit_rows: that forms were fitted and trained on.
        search_rows: that choices were made by.
        confirm_rows: that the search never saw.
        repeated_rows: equal to others, and left out.
        length: tokens of a row.
        costs: of forms by shape of layer.
        points: choices that were judged, by cost.
        drop: of the result, on rows the search never saw.
        bound: upper confidence bound of that.
    """

    minutes: float
    seconds: float
    exhausted: bool
    resumed: int
    measured: int
    loss: str
    max_drop: float
    confidence: float
    fit_rows: int
    search_rows: int
    confirm_rows: int
    repeated_rows: int
    length: int
    costs: tuple[FormCost, ...]
    points: tuple[SearchPoint, ...]
    drop: float
    bound: float


@dataclass(frozen=True, kw_only=True)
class LinearizationReport(FormCosts):
    """A linearisation.

    Attributes:
        kind: names this kind of report.
        linexport: version that made it.
        source: the original.
        seed: of the split of the data, of random maps and of distillation.
        calibration: how much data there was.
        layers: every call of softmax attention.
        feed_forward: every feed-forward layer that was looked at.
        output_error: relative, of the whole model on held-out data.
        uniform_output_error: likewise, if the replaced layers attended to all keys alike; None
            where none is replaced.
        forced: layers are replaced though they are no better than the mean of their values, or
            do not pay.
        rest_error: of the model with softmax attention left in.
        distillation: None where there was none.
        metric: the score that was given, or that of a kind of model that is known; else None.
        max_drop: by how much that may get worse; None: by any amount.
        parameters: numbers stored.
        environment: machine and versions.
        stages: name and seconds of each.
        search: how the forms were found; None where they were named.
        status: "declined" where no layer is better than the mean of its values, it is never
            faster, the metric gets too bad, or feed-forward layers do not pay.
        verdict: one sentence that says why; three after a search.
    """

    kind: Literal["linearization"] = "linearization"
    linexport: str
    source: OriginalRecord
    seed: int
    calibration: CalibrationRecord
    layers: tuple[AttentionRow, ...]
    feed_forward: tuple[FeedForwardRow, ...]
    output_error: float
    uniform_output_error: float | None
    forced: bool
    rest_error: float
    distillation: DistillationRecord | None
    metric: MetricRecord | None
    max_drop: float | None
    parameters: ParameterCounts
    environment: dict[str, Any]
    stages: tuple[StageRecord, ...]
    search: SearchRecord | None = None
    status: Status
    verdict: str
