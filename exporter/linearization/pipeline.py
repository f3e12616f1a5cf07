"""The whole way from a module and data to its linear form and a report."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

import linexport
from linexport.errors import UnsupportedModelError, UsageError
from linexport.linearization import compare_models, cost, find_softmax
from linexport.linearization import distil as distillation
from linexport.linearization.auto import (
    AutoSearch,
    FoundForms,
    SearchSettings,
    check_options,
    find_forms,
    names_of,
    parts_of,
)
from linexport.linearization.calibration import (
    Calibration,
    Rows,
    as_taken,
    calibration,
    checked_rows,
    first_batches,
)
from linexport.linearization.choose_forms import EVERY, MapConfig, local
from linexport.linearization.default_score import default_score
from linexport.linearization.feed_forward import FeedForwardConfig, replace_feed_forward
from linexport.linearization.fit_forms import (
    FittedForms,
    leave_out,
    replace_attention,
    searched_forms,
)
from linexport.linearization.projected_errors import projected_errors
from linexport.linearization.quality import judged_no_better
from linexport.linearization.replace import inference_copy, shared_copy, with_forms, without
from linexport.linearization.save import save
from linexport.linearization.verdict import Measurements, verdict
from linexport.manifest.linearization_records import (
    AttentionRow,
    CalibrationRecord,
    DistillationRecord,
    FeedForwardRow,
    FormCosts,
    LinearizationReport,
    OriginalRecord,
)
from linexport.manifest.proof import MetricRecord
from linexport.manifest.records import SoftmaxOriginal, StageRecord
from linexport.models.feed_forward import MAX_COST
from linexport.models.registry import ReferenceModel
from linexport.sources.default_dims import default_dims
from linexport.sources.loaded_model import LoadedModel, Source
from linexport.sources.metric import Evaluate, Metric, as_metric
from linexport.sources.weights import parameter_summary
from linexport.system import environment
from linexport.system.json_object import JsonObject
from linexport.system.progress import Progress, Silent, Stopwatch

MAP = "favor+"
EXAMPLES = 2
FITTED, JUDGED, MORE = 4, 8, 120
"""Batches that maps and memories are fitted to, that errors are measured on, and more for errors
where these do not tell whether a form is better than the mean of the values."""


@dataclass(frozen=True)
class Linearization:
    """A module in linear form, and the report on it.

    Attributes:
        module: in linear form, in inference mode; what was not learned is shared with the original.
        report: what was replaced, how far it errs and what it costs. Units are in the names; what
            was not measured is None. ``dataclasses.asdict`` gives its JSON.
    """

    module: nn.Module
    report: LinearizationReport
    loaded: LoadedModel

    @property
    def replaced(self) -> bool:
        """A layer is not what it was."""
        report = self.report
        reasons = [*(r.reason for r in report.layers), *(r.reason for r in report.feed_forward)]
        return None in reasons

    def save(self, path: str | Path) -> None:
        """Write what ``linexport convert`` reads: a checkpoint of a reference model, else a .pt2.

        Raises:
            LinexportError: see ``save.save``.
        """
        report = self.report
        timed = (report.latency or ()) if report.over == "tokens" else ()
        original = SoftmaxOriginal(
            description=report.source.description,
            cpu=str(report.environment["cpu"]),
            lengths=tuple(row.length for row in timed),
            milliseconds=tuple(row.best_original_ms for row in timed),
        )
        save(self.loaded, Path(path), original)


def linearize(
    module: nn.Module | LoadedModel,
    calibration_data: Tensor | Sequence[Tensor],
    *,
    map: str | Mapping[str, str] | Sequence[str] | None = None,
    features: int | Mapping[str, int] | None = None,
    map_options: Mapping[str, object] | None = None,
    locality: float | None = None,
    memory_keys: int | None = None,
    feed_forward: str | Mapping[str, str] | None = None,
    target_error: float | None = None,
    max_cost: int = MAX_COST,
    distil: int = 0,
    auto: AutoSearch | None = None,
    evaluate: Metric | Evaluate | None = None,
    max_drop: float | None = None,
    bench: bool = True,
    lengths: Sequence[int] | None = None,
    threads: int = 0,
    seed: int = 0,
    force: bool = False,
    progress: Progress | None = None,
) -> Linearization:
    """Replace softmax attention by linear forms, calibrated on data, and measure what that costs.

    Args:
        module: with softmax attention, or a loaded model. It is not changed.
        calibration_data: its arguments in order, one row a sample; a quarter is held out.
        map: a feature map or "keep" for every layer, or by patterns of layer names; None: favor+.
        features: number of features M, likewise; None: the map's own choice.
        map_options: further options of the maps, by name.
        locality: attend only to keys within this L1 distance; see ``locality``.
        memory_keys: pseudo-keys in place of keys that never change; None: one for each 16.
        feed_forward: form of y = f(W x + b), "low-rank", "chebyshev", "least-squares", "bernstein",
            "taylor" or "keep", of every linear layer whose output goes into an activation, or by
            patterns of their names; None: they stay.
        target_error: of these layers, for one token; see ``linearize_feed_forward``.
        max_cost: multiply-adds for one token that such a layer may have.
        distil: steps of learning the original's layer outputs at most.
        auto: search for the cheapest form of every layer within ``max_drop``; ``map`` then is
            a list of candidates, None for the usual ones.
        evaluate: gives a score of a module; higher is better, unless a ``Metric`` says otherwise.
            None: that of ``default_score``, for the kinds of models it knows.
        max_drop: by how much that may get worse; None: by any amount.
        bench: measure latency and memory.
        lengths: to measure at.
        threads: of ONNX Runtime, 0 for its own choice.
        seed: of the split, of random maps and of distillation.
        force: also replace attention by a form that is not better than the mean of its values, and
            do not decline feed-forward layers that do not pay.
        progress: shown the stages.

    Returns:
        The linear form with its report. Where no layer was better than the mean of its values,
        nothing is replaced, and the report's status is "declined".

    Raises:
        UsageError: data or options that do not fit, or ``evaluate`` fails or gives no number.
        UnsupportedModelError: the module has no softmax attention or feed-forward layer that can be
            replaced.
        ParityError: a denominator vanishes on the data, or the module is not the same with nothing
            replaced.
    """
    if target_error is not None and feed_forward is None:
        raise UsageError("A target error is of feed-forward layers: name a form of these, too.")
    watch = Stopwatch(progress or Silent())
    rows = checked_rows(calibration_data)
    if isinstance(module, LoadedModel):
        rows = as_taken(rows, module.args, module.integer_ranges)
    data, parts = calibration(rows, seed), None
    if auto is not None:
        named = (features, locality, memory_keys, feed_forward, distil, evaluate)
        check_options(auto, max_drop, named)
        parts = parts_of(rows, auto.labels, seed)
        data = Calibration(parts.fit.rows, parts.search.rows)
    loaded = _as_called(module, rows) if isinstance(module, LoadedModel) else _loaded(module, data)
    evaluate = as_metric(evaluate)
    with watch.stage("find"):
        original = _Original.of(loaded, data, required=feed_forward is None)
    rest_error = original.rest_error()
    found: FoundForms | None = None
    distilled: DistillationRecord | None = None
    if auto is not None and parts is not None and max_drop is not None:
        with watch.stage("search-forms"), watch.shown.steps("search", auto.seconds) as advance:
            wish = SearchSettings(
                auto, max_drop, names_of(map), map_options or {}, lengths, threads, seed
            )
            found = find_forms(loaded, original.module, original.sites, parts, wish, advance)
        made = original.searched(found)
        linear = found.module
        lengths = found.timed_lengths
    else:
        config = _map_config(map, features, map_options, locality, seed)
        with watch.stage("fit"):
            made = original.fitted(config, memory_keys, bool(force or distil))
            if feed_forward is None:
                _check_any(made)
        linear = with_forms(original.module, made.forms)
    if distil and (original.replaced(made) or feed_forward is None):
        with watch.stage("distil"), watch.shown.steps("distil", distil) as advance:
            replaced = original.replaced(made)
            distilled = distillation.distil(
                original.module, linear, replaced, data, distil, seed, advance
            )
        linear = original.judged_again(linear, made, force)
    dense: list[FeedForwardRow] = []
    if feed_forward is not None:
        feed_forward_config = FeedForwardConfig(
            _rules(feed_forward), target_error, max_cost, seed, bench, threads
        )
        with watch.stage("feed-forward"):
            dense = replace_feed_forward(
                linear, original.fit, feed_forward_config, watch.shown.note
            )
    with watch.stage("compare"):
        errors = original.errors(linear, made)
        scores = found.metric if found is not None else None
        scores = scores or original.scores(linear, evaluate)
        result = replace(loaded, module=linear, program=None, decode_module=None, language=None)
        numbers, result = cost.parameters(loaded.module, result)
    measured = FormCosts()
    if bench and (original.replaced(made) or dense):
        with watch.stage("measure"):
            measured = cost.curves(
                replace(loaded, decode_module=None, language=None), result, lengths, threads, seed
            )
    layers = _attention_rows(made, original.sites, errors.layers, _timed_lengths(measured))
    search = None if found is None else found.record
    status, sentence = verdict(
        Measurements(
            layers=layers,
            feed_forward=dense,
            output_error=errors.output,
            uniform_output_error=None if dense else errors.uniform_output,
            costs=measured,
            metric=scores,
            max_drop=max_drop,
            forced=force,
            search=search,
        )
    )
    report = LinearizationReport(
        linexport=linexport.__version__,
        source=OriginalRecord(
            loaded.source.kind,
            loaded.source.location,
            loaded.source.sha256,
            loaded.source.description,
        ),
        seed=seed,
        calibration=CalibrationRecord(len(data.fit[0]), len(data.held_out[0])),
        layers=layers,
        feed_forward=tuple(dense),
        output_error=errors.output,
        uniform_output_error=errors.uniform_output,
        forced=force,
        rest_error=rest_error,
        distillation=distilled,
        metric=scores,
        max_drop=max_drop,
        parameters=numbers,
        **vars(measured),
        environment=environment.describe(),
        stages=tuple(StageRecord(**stage) for stage in watch.stages),
        search=search,
        status=status,
        verdict=sentence,
    )
    return Linearization(linear, report, result)


@dataclass(frozen=True)
class _Errors:
    """How far a linear form is from the original on data that it was not fitted to.

    Attributes:
        layers: by the index of the layer.
        output: of the model.
        uniform_output: of the model whose replaced layers give the mean of their values.
    """

    layers: Mapping[int, float]
    output: float
    uniform_output: float | None


@dataclass(frozen=True)
class _Original:
    """A model with softmax attention, and the data that its forms are fitted to and judged on.

    Attributes:
        loaded: the model.
        module: a copy of it that shares its weights.
        sites: its softmax attention.
        data: to fit on, and held out.
        fit, held_out: the first batches of each.
    """

    loaded: LoadedModel
    module: nn.Module
    sites: Sequence[find_softmax.Site]
    data: Calibration
    fit: Sequence[Rows]
    held_out: Sequence[Rows]

    @classmethod
    def of(cls, loaded: LoadedModel, data: Calibration, required: bool) -> _Original:
        """Return a model with the softmax attention that it has on the data.

        Raises:
            UnsupportedModelError: it has none, and that is required.
        """
        module = shared_copy(loaded.module)
        fit, _ = first_batches(data.fit, FITTED)
        held_out, _ = first_batches(data.held_out, JUDGED)
        sites = find_softmax.find_sites(module, [*fit, *held_out], required=required)
        return cls(loaded, module, sites, data, fit, held_out)

    def rest_error(self) -> float:
        """Return the error of the model with nothing replaced."""
        unchanged = with_forms(self.module, {})
        return compare_models.rest_error(self.loaded.module, unchanged, self.held_out)

    def searched(self, found: FoundForms) -> FittedForms:
        """Return the forms that a search has found."""
        return searched_forms(self.module, self.sites, self.held_out, found.transferred)

    def fitted(self, config: MapConfig, memory_keys: int | None, all_of_them: bool) -> FittedForms:
        """Return forms of the requested maps, without those no better than the mean.

        Args:
            config: the maps.
            memory_keys: see ``linearize``.
            all_of_them: those no better than the mean stay as well.
        """
        if not self.sites:
            return FittedForms()
        _, unused = first_batches(self.data.fit, FITTED)
        _, more = first_batches(self.data.held_out, JUDGED)
        rest = [*more, *unused][:MORE]
        made = replace_attention(
            self.module, self.sites, self.fit, self.held_out, rest, config, memory_keys
        )
        if not all_of_them:
            leave_out(made, self.sites)
        return made

    def replaced(self, made: FittedForms) -> list[find_softmax.Site]:
        """Return the attention that has a form."""
        return [site for site in self.sites if site.index in made.forms]

    def judged_again(self, linear: nn.Module, made: FittedForms, force: bool) -> nn.Module:
        """Measure distilled forms; softmax is back in layers that are no better than the mean."""
        judged = projected_errors(self.module, linear, self.replaced(made), self.held_out)
        for at, site in enumerate(self.sites):
            if site.index in judged:
                sums = judged[site.index]
                made.records[at] = replace(
                    made.records[at],
                    distilled_error=sums.error,
                    distilled_uniform_error=sums.uniform_error,
                    margin=sums.margin,
                )
        dropped = [] if force else leave_out(made, self.sites)
        if not dropped:
            return linear
        owners = {site.name for site in dropped}
        owners |= {site.projection.rpartition(".")[0] for site in dropped if site.projection}
        return without(self.module, linear, made.forms, owners)

    def errors(self, linear: nn.Module, made: FittedForms) -> _Errors:
        """Return how far a linear form is from the model."""
        replaced = self.replaced(made)
        return _Errors(
            compare_models.layer_errors(self.module, linear, replaced, self.held_out),
            compare_models.output_error(self.module, linear, self.held_out),
            compare_models.uniform_output_error(self.module, replaced, self.held_out),
        )

    def scores(self, linear: nn.Module, metric: Metric | None) -> MetricRecord | None:
        """Return the scores of the model and of a linear form; None where no metric fits."""
        metric = metric or default_score(self.loaded.module, self.sites, self.held_out)
        return None if metric is None else metric.compared(self.loaded.module, linear)


def _check_any(made: FittedForms) -> None:
    """Check that a layer is replaced, or declined as no better than the mean of its values.

    Raises:
        UnsupportedModelError: none is.
    """
    if not made.forms and not judged_no_better(made.records):
        why = "; ".join(f"{row.name}: {row.reason}" for row in made.records)
        raise UnsupportedModelError(f"No softmax attention was replaced. {why}")


def _timed_lengths(costs: FormCosts) -> set[int]:
    """Return the numbers of tokens that latency was measured at."""
    return {row.length for row in costs.latency or ()} if costs.over == "tokens" else set()


def _map_config(
    map: object,
    features: object,
    options: Mapping[str, object] | None,
    locality: float | None,
    seed: int,
) -> MapConfig:
    """Return the maps that are requested, see ``linearize``."""
    config = MapConfig(_rules(map or MAP), _rules(features), options or {}, seed)
    return config if locality is None else local(config, locality)


def _rules(value: object) -> JsonObject:
    if value is None:
        return {}
    return dict(value) if isinstance(value, Mapping) else {EVERY: value}


def _attention_rows(
    made: FittedForms,
    sites: Sequence[find_softmax.Site],
    layer_errors: Mapping[int, float],
    lengths: Collection[int],
) -> tuple[AttentionRow, ...]:
    """Add what each layer errs in the model, and its multiply-adds at several lengths.

    These are the length of the calibration data and those timed.
    """
    return tuple(
        replace(
            record,
            layer_error=layer_errors.get(site.index),
            multiply_adds=tuple(
                cost.multiply_adds(site, made.forms.get(site.index), length)
                for length in sorted({site.length, *lengths})
            ),
        )
        for site, record in zip(sites, made.records, strict=True)
    )


def _as_called(loaded: LoadedModel, rows: Rows) -> LoadedModel:
    """Return the model with the arguments that the data has.

    Layers that were calibrated without a mask are exported without one: an input for it would not
    be looked at.
    """
    count = len(rows)
    if loaded.program is not None or loaded.kwargs or count >= len(loaded.args):
        return loaded
    return replace(
        loaded,
        args=loaded.args[:count],
        dynamic_shapes=tuple(loaded.dynamic_shapes)[:count],
        integer_ranges={at: found for at, found in loaded.integer_ranges.items() if at < count},
    )


def _loaded(module: nn.Module, data: Calibration) -> LoadedModel:
    """Wrap a module in memory as the loaders would; it may be in training mode."""
    module = inference_copy(module)
    source = Source(
        "module", type(module).__qualname__, None, parameter_summary(type(module).__name__, module)
    )
    if isinstance(module, ReferenceModel):
        return LoadedModel(
            module,
            module.example_inputs(EXAMPLES, data.fit[0].shape[1], 0),
            {},
            module.dynamic_shapes(),
            source,
            integer_ranges=module.integer_ranges(),
        )
    found = default_dims(tuple(x[:EXAMPLES] for x in data.fit))
    return LoadedModel(
        module, found.args, {}, found.dynamic_shapes, source, warnings=found.warnings
    )
