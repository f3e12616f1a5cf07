"""Every map at several numbers of features: how near to softmax, how fast, how large."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import linexport
from linexport.errors import LinexportError, UsageError
from linexport.manifest.map_records import MapComparison, MapRow
from linexport.maps import accuracy, cost
from linexport.maps.attention_samples import HeadSamples, model_samples, random_samples
from linexport.maps.catalogue import catalogue
from linexport.models import feature_maps
from linexport.models.feature_maps import FeatureMap
from linexport.models.feature_maps.base import UNBIASED
from linexport.models.linear_attention_layer import LinearAttentionLayerConfig
from linexport.system import environment
from linexport.system.json_object import JsonObject
from linexport.system.progress import Progress, Silent

WIDTH, LENGTH, FEATURES = 64, 1024, (64, 128, 256)
DRAWS = 3
Row = TypeVar("Row", bound=MapRow)
LONGEST = 65536


@dataclass(frozen=True)
class MapChoice:
    """One map with options."""

    kind: str
    options: JsonObject

    def draws(self, d: int, samples: HeadSamples, seed: int, most: int = DRAWS) -> list[FeatureMap]:
        """The map, with several seeds where it is random, fitted where it can be."""
        random = feature_maps.find_map(self.kind).exactness == UNBIASED
        found = []
        for draw in range(most if random else 1):
            extra = {"seed": seed + draw} if random else {}
            module = feature_maps.make(self.kind, d, {**self.options, **extra})
            fit = getattr(module, "fit", None)
            if fit is not None:
                fit(samples.fit_queries, samples.fit_keys)
            found.append(module)
        return found


def compare_maps(
    d: int | None = None,
    length: int = LENGTH,
    features: Sequence[int] = FEATURES,
    *,
    data: str | Path | None = None,
    inputs: str | Path | None = None,
    maps: Sequence[str] | None = None,
    threads: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> MapComparison:
    """Measure feature maps and compare them.

    Args:
        d: head width of random queries and keys, 64 by default; of a model it is its own.
        length: tokens.
        features: numbers of features M for the maps that have a choice.
        data: a model, as for ``linexport.convert``, whose queries and keys to use.
        inputs: ``.npz`` of that model's arguments; None: random ones.
        maps: their names; None: all.
        threads: of the timed sessions, 0 for ONNX Runtime's choice.
        seed: of random queries, keys and maps.
        progress: called with the stages.

    Returns:
        ``rows`` has an entry per map and number of features; ``uniform_error`` is what attention
        to all keys alike would reach. Units are in the names; what could not be measured is None,
        with a ``reason``. ``dataclasses.asdict`` gives its JSON.

    Raises:
        UsageError: an unknown map, sizes out of range, a model without such layers, or none of the
            maps can be made for it.
    """
    choices = _choices(maps, features)
    shown = progress or Silent()
    with shown.stage("sample"):
        samples = take_samples(d, length, data, inputs, seed)
        against = accuracy.reference(samples)
    with shown.stage("judge"):
        rows = [judge_choice(choice, against, seed) for choice in choices]
    if not any(row.state_bytes for row in rows):
        reasons = dict.fromkeys(f"{row.map}: {row.reason}" for row in rows)
        raise UsageError(f"None of these maps can be compared here. {' '.join(reasons)}")
    rows = with_costs(rows, samples, threads, shown)
    rows = _with_frontier(rows, against.uniform_error)
    named = {row.map for row in rows}
    return MapComparison(
        rows=tuple(rows),
        maps=tuple(m for m in catalogue(samples.queries.shape[2]) if m.map in named),
        **measured_on(against, threads, seed),
    )


def measured_on(against: accuracy.SoftmaxReference, threads: int, seed: int) -> JsonObject:
    """Return the fields of a ``MapMeasurement`` but its kind."""
    samples = against.samples
    heads, tokens, width = samples.queries.shape
    return {
        "linexport": linexport.__version__,
        "source": samples.source,
        "d": width,
        "value_dim": samples.values.shape[2],
        "length": tokens,
        "heads": heads,
        "layer_heads": samples.layer_heads,
        "causal": samples.causal,
        "seed": seed,
        "draws": DRAWS,
        "threads": threads,
        "uniform_error": against.uniform_error,
        "environment": environment.describe(),
    }


def take_samples(
    d: int | None, length: int, data: str | Path | None, inputs: str | Path | None, seed: int
) -> HeadSamples:
    """Take samples of a model, or random ones of width d.

    Raises:
        UsageError: settings that contradict each other or are out of range; see
            ``attention_samples.model_samples``.
    """
    _check(d, length, data, inputs)
    if data is None:
        return random_samples(d or WIDTH, length, seed)
    return model_samples(data, length, seed, None if inputs is None else Path(inputs))


def _check(d: int | None, length: int, data: Any, inputs: Any) -> None:
    if data is not None and d is not None:
        raise UsageError("Give either a model's data or a head width: a model has its own.")
    if inputs is not None and data is None:
        raise UsageError("Inputs are those of a model: name it as data.")
    if d is not None and d < 1:
        raise UsageError(f"Head width {d}; expected at least 1.")
    if not 1 <= length <= LONGEST:
        raise UsageError(f"Length {length}; expected 1 to {LONGEST} tokens.")


def _choices(maps: Sequence[str] | None, features: Sequence[int]) -> list[MapChoice]:
    """Each map once, or once per number of features where it has the choice."""
    if not features or min(features) < 1:
        raise UsageError(f"Features {list(features)}; expected one or more positive numbers.")
    found = []
    for kind in dict.fromkeys(maps or feature_maps.kinds()):
        sizes: Iterable[dict[str, object]] = [{}]
        if features_field(kind):
            sizes = [{"features": size} for size in sorted(set(features))]
        found += [MapChoice(kind, options) for options in sizes]
    return found


def features_field(kind: str) -> Field[Any] | None:
    """The option for the number of features M, where a map has it."""
    options = fields(feature_maps.find_map(kind).Options)
    return next((f for f in options if f.name == "features"), None)


def judge_choice(choice: MapChoice, against: accuracy.SoftmaxReference, seed: int) -> MapRow:
    """Errors and size of one map; with a reason alone where it cannot be made."""
    found = feature_maps.find_map(choice.kind)
    row = MapRow(
        map=choice.kind,
        options=choice.options,
        features=choice.options.get("features"),
        exactness=found.exactness,
        positive=found.positive,
        kernel=found.kernel,
    )
    if found.over_time and against.samples.causal:
        reason = "it normalises keys over the whole sequence: bidirectional only"
        return replace(row, reason=reason)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            drawn = choice.draws(against.samples.queries.shape[2], against.samples, seed)
    except UsageError as error:
        return replace(row, reason=str(error))
    value_dim = against.samples.values.shape[2]
    size = drawn[0].features
    state = 4 * against.samples.layer_heads * size * (value_dim + 1)
    judged = vars(accuracy.judge(drawn, against))
    return replace(row, features=size, state_bytes=state, **judged)


def with_costs(
    rows: Sequence[Row], samples: HeadSamples, threads: int, progress: Progress
) -> list[Row]:
    """Measure time and memory of every map that could be made."""
    configs = {at: _config(row, samples) for at, row in enumerate(rows) if row.state_bytes}
    models: dict[str, Path] = {}
    found = list(rows)
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        folder = Path(place)
        with progress.stage("export"):
            for at, config in configs.items():
                try:
                    models[str(at)] = cost.export(config, folder / str(at))
                except LinexportError as error:
                    found[at] = replace(found[at], reason=str(error))
        fed = cost.inputs(next(iter(configs.values())), samples.queries.shape[1])
        with progress.stage("memory"):
            for name, path in models.items():
                row = found[int(name)]
                used, reason = cost.memory(path, fed, folder)
                found[int(name)] = replace(row, bytes_per_token=used, reason=row.reason or reason)
        with progress.stage("time"):
            for name, took in cost.times(models, fed, threads).items():
                found[int(name)] = replace(found[int(name)], us_per_token=took)
    return found


def _config(row: MapRow, samples: HeadSamples) -> LinearAttentionLayerConfig:
    return LinearAttentionLayerConfig(
        num_heads=samples.layer_heads,
        head_dim=samples.queries.shape[2],
        value_dim=samples.values.shape[2],
        feature_map=row.map,
        feature_map_options=row.options,
        causal=samples.causal,
    )


def _with_frontier(rows: Sequence[MapRow], uniform_error: float) -> list[MapRow]:
    """Mark rows nearer than a mean that no other row beats in both time and error."""
    placed = sorted(
        (row.us_per_token, row.output_error, at)
        for at, row in enumerate(rows)
        if row.us_per_token is not None and row.output_error is not None
    )
    found, best = list(rows), uniform_error
    for _, error, at in placed:
        found[at] = replace(found[at], frontier=error < best)
        best = min(best, error)
    return found
