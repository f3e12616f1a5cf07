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
    original = shared_copy(loaded.module)
    with watch.stage("find"):
        fit, _ = first_batches(data.fit, FITTED)
        held_out, _ = first_batches(data.held_out, JUDGED)
        sites = find_softmax.find_sites(original, [*fit, *held_out], required=feed_forward is None)
    rest_error = compare_models.rest_error(loaded.module, with_forms(original, {}), held_out)
    found: FoundForms | None = None
    distilled: DistillationRecord | None = None
    if auto is not None and parts is not None and max_drop is not None:
        with watch.stage("search-forms"), watch.shown.steps("search", auto.seconds) as advance:
            wish = SearchSettings(
                auto, max_drop, names_of(map), map_options or {}, lengths, threads, seed
            )
            found = find_forms(loaded, original, sites, parts, wish, advance)
        made = searched_forms(original, sites, held_out, found.transferred)
        linear = found.module
        lengths = found.timed_lengths
    else:
        config = MapConfig(_rules(map or MAP), _rules(features), map_options or {}, seed)
        if locality is not None:
            config = local(config, locality)
        with watch.stage("fit"):
            made = _fitted(original, sites, data, config, memory_keys, bool(force or distil))
            if feed_forward is None and not made.forms and not judged_no_better(made.records):
                why = "; ".join(f"{row.name}: {row.reason}" for row in made.records)
                raise UnsupportedModelError(f"No softmax attention was replaced. {why}")
        linear = with_forms(original, made.forms)
    replaced = _replaced(sites, made)
    if distil and (replaced or feed_forward is None):
        with watch.stage("distil"), watch.shown.steps("distil", distil) as advance:
            distilled = distillation.distil(original, linear, replaced, data, distil, seed, advance)
        linear = _judged_again(original, linear, sites, made, held_out, force)
        replaced = _replaced(sites, made)
    dense: list[FeedForwardRow] = []
    if feed_forward is not None:
        feed_forward_config = FeedForwardConfig(
            _rules(feed_forward), target_error, max_cost, seed, bench, threads
        )
        with watch.stage("feed-forward"):
            dense = replace_feed_forward(linear, fit, feed_forward_config, watch.shown.note)
    with watch.stage("compare"):
        layer_errors = compare_models.layer_errors(original, linear, replaced, held_out)
        output_error = compare_models.output_error(original, linear, held_out)
        alike = compare_models.uniform_output_error(original, replaced, held_out)
        scores = None if found is None else found.metric
        if scores is None:
            metric = evaluate or default_score(loaded.module, sites, held_out)
            scores = None if metric is None else metric.compared(loaded.module, linear)
        result = replace(loaded, module=linear, program=None, decode_module=None, language=None)
        numbers, result = cost.parameters(loaded.module, result)
    measured = FormCosts()
    if bench and (replaced or dense):
        with watch.stage("measure"):
            measured = cost.curves(
                replace(loaded, decode_module=None, language=None), result, lengths, threads, seed
            )
    timed = (measured.latency or ()) if measured.over == "tokens" else ()
    lengths_timed = {row.length for row in timed}
    layers = _attention_rows(made, sites, layer_errors, lengths_timed)
    status, sentence = verdict(
        Measurements(
            layers=layers,
            feed_forward=dense,
            output_error=output_error,
            uniform_output_error=None if dense else alike,
            costs=measured,
            metric=scores,
            max_drop=max_drop,
            forced=force,
            search=None if found is None else found.record,
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
        output_error=output_error,
        uniform_output_error=alike,
        forced=force,
        rest_error=rest_error,
        distillation=distilled,
        metric=scores,
        max_drop=max_drop,
        parameters=numbers,
        **vars(measured),
        environment=environment.describe(),
        stages=tuple(StageRecord(**stage) for stage in watch.stages),
        search=None if found is None else found.record,
        status=status,
        verdict=sentence,
    )
    return Linearization(linear, report, result)


def _fitted(
    original: nn.Module,
    sites: Sequence[find_softmax.Site],
    data: Calibration,
    config: MapConfig,
    memory_keys: int | None,
    all_of_them: bool,
) -> FittedForms:
    """Forms of the requested maps, without those no better than the mean unless all stay."""
    if not sites:
        return FittedForms()
    fit, unused = first_batches(data.fit, FITTED)
    held_out, more = first_batches(data.held_out, JUDGED)
    rest = [*more, *unused][:MORE]
    made = replace_attention(original, sites, fit, held_out, rest, config, memory_keys)
    if not all_of_them:
        leave_out(made, sites)
    return made


def _replaced(sites: Sequence[find_softmax.Site], made: FittedForms) -> list[find_softmax.Site]:
    return [site for site in sites if site.index in made.forms]


def _judged_again(
    original: nn.Module,
    linear: nn.Module,
    sites: Sequence[find_softmax.Site],
    made: FittedForms,
    held_out: Sequence[Rows],
    force: bool,
) -> nn.Module:
    """Measure distilled forms; softmax is back in layers that are no better than the mean."""
    judged = projected_errors(original, linear, _replaced(sites, made), held_out)
    for at, site in enumerate(sites):
        if site.index in judged:
            sums = judged[site.index]
            made.records[at] = replace(
                made.records[at],
                distilled_error=sums.error,
                distilled_uniform_error=sums.uniform_error,
                margin=sums.margin,
            )
    dropped = [] if force else leave_out(made, sites)
    if not dropped:
        return linear
    owners = {site.name for site in dropped}
    owners |= {site.projection.rpartition(".")[0] for site in dropped if site.projection}
    return without(original, linear, made.forms, owners)


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
