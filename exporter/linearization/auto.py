"""Forms of all layers found by a search, in the place of those that a user names.

fit      half of the distinct rows, trained on
search   a quarter, which choices are made by
confirm  a quarter, which is looked at once, at the end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import linexport
from linexport.errors import UnsupportedModelError, UsageError
from linexport.linearization import search_record
from linexport.linearization.calibration import Rows
from linexport.linearization.confidence import CONFIDENCE, upper_bound
from linexport.linearization.find_softmax import Site
from linexport.linearization.forms import KernelAttention
from linexport.linearization.search import MARGIN, Choice, FormPoint, FormSearch, confirmed
from linexport.linearization.search_candidates import find_candidates, known_form, measure_costs
from linexport.linearization.search_record import digest_of, digest_of_module
from linexport.linearization.task_loss import TaskLoss, TaskRows, find_task, with_labels
from linexport.manifest.linearization_records import SearchPoint, SearchRecord
from linexport.manifest.proof import MetricRecord
from linexport.sources.loaded_model import LoadedModel
from linexport.system import environment
from linexport.system.progress import Advance

LENGTHS = (1024, 8192, 32768)
COSTS_UNTIL = 0.4
"""Share of the time budget by which costs are measured."""
FEWEST = 32
"""Distinct rows that a search needs."""


@dataclass(frozen=True)
class AutoSearch:
    """Options of a search.

    Attributes:
        minutes: time budget of the search. A measurement that has begun is ended; confirming the
            result, timing and saving it come after.
        labels: a class of each row of the data; the score is then the share of right answers. None:
            bits per token of a language model, agreement with the original's classes of a known
            classifier, else the relative error of the outputs.
        record: folder of what was measured, by which an interrupted search goes on; None: none.
    """

    minutes: float = 10.0
    labels: Tensor | None = None
    record: Path | None = None

    @property
    def seconds(self) -> int:
        """Return the time budget in whole seconds."""
        return max(1, round(60 * self.minutes))


@dataclass(frozen=True)
class SearchSettings:
    """All that a search is asked for.

    Attributes:
        auto: options of the search.
        max_drop: that the score may have.
        maps: names of candidates; none: the usual ones.
        options: of maps.
        lengths: that time counts at; None: those of ``LENGTHS`` that the model takes.
        threads: of ONNX Runtime.
        seed: of everything random.
    """

    auto: AutoSearch
    max_drop: float
    maps: Sequence[str]
    options: Mapping[str, object]
    lengths: Sequence[int] | None
    threads: int
    seed: int


@dataclass(frozen=True)
class RowParts:
    """The user's rows in three parts, and how many equal to others were left out."""

    fit: TaskRows
    search: TaskRows
    confirm: TaskRows
    repeated: int


@dataclass(frozen=True)
class FoundForms:
    """Result of a search.

    Attributes:
        module: in linear form.
        forms: of the replaced sites, fine-tuned.
        transferred: the same after attention transfer alone.
        metric: on rows the search never saw.
        record: for the report.
        timed_lengths: at which softmax attention could be measured.
    """

    module: nn.Module
    forms: dict[int, KernelAttention]
    transferred: dict[int, KernelAttention]
    metric: MetricRecord
    record: SearchRecord
    timed_lengths: tuple[int, ...]


def check_options(auto: AutoSearch, max_drop: float | None, named: Sequence[object]) -> None:
    """Check that a search has a limit, and that nothing is named that it chooses itself.

    Raises:
        UsageError: see above.
    """
    if max_drop is None or not 0 < max_drop < float("inf"):
        raise UsageError(
            f"The drop that a search may have is {max_drop}; expected a number above 0, such as "
            "--max-drop 0.02."
        )
    if not 0 < auto.minutes < float("inf"):
        raise UsageError(f"The time budget is {auto.minutes:g} minutes; expected a number above 0.")
    if any(named):
        raise UsageError(
            "A search chooses and trains forms by itself, on losses of rows: leave --features, "
            "--locality, --memory-keys, --feed-forward, --distil and --evaluate out. --labels "
            "gives the class of each row."
        )


def names_of(map: str | Mapping[str, str] | Sequence[str] | None) -> list[str]:
    """Return the names of candidates; none for the usual ones.

    Raises:
        UsageError: they are by layer.
    """
    if isinstance(map, Mapping):
        raise UsageError(
            "A search chooses the map of every layer: give the names of candidates alone, such as "
            "--map window64+elu1 --map taylor2."
        )
    return [map] if isinstance(map, str) else list(map or ())


def parts_of(data: Rows, labels: Tensor | None, seed: int) -> RowParts:
    """Split the distinct rows.

    Raises:
        UsageError: too few, or labels that are not of the rows.
    """
    examples = with_labels(TaskRows(data), labels)
    kept = distinct(data)
    if len(kept) < FEWEST:
        raise UsageError(
            f"The data has {len(kept)} distinct rows; expected at least {FEWEST} for a search, "
            "which trains on half of them, chooses by a quarter and confirms by a quarter. Some "
            "hundreds are usual."
        )
    order = kept[torch.randperm(len(kept), generator=torch.Generator().manual_seed(seed))]
    quarter = len(kept) // 4
    fit, search, confirm = order[2 * quarter :], order[:quarter], order[quarter : 2 * quarter]
    repeated = len(examples) - len(kept)
    return RowParts(examples.take(fit), examples.take(search), examples.take(confirm), repeated)


def distinct(data: Rows) -> Tensor:
    """Return the places of rows that no earlier row is equal to."""
    first: dict[bytes, int] = {}
    for at in range(len(data[0])):
        row = b"".join(x[at].contiguous().numpy().tobytes() for x in data)
        first.setdefault(row, at)
    return torch.tensor(list(first.values()))


def find_forms(
    loaded: LoadedModel,
    original: nn.Module,
    sites: Sequence[Site],
    parts: RowParts,
    settings: SearchSettings,
    advance: Advance,
) -> FoundForms:
    """FormSearch, confirm, and build the result.

    Args:
        loaded: the model.
        original: a ``shared_copy`` of it.
        sites: its calls of softmax attention.
        parts: of the data.
        settings: of the search.
        advance: told the seconds of the budget that are spent, and what is done.

    Raises:
        UsageError: options or labels that do not fit, or a record of another search, or in use.
        UnsupportedModelError: no layer can be replaced.
    """
    auto, seed = settings.auto, settings.seed
    targets = [site for site in sites if site.replaceable and not site.memory]
    if not targets:
        why = "; ".join(f"{s.name}: {s.reason or 'its keys never change'}" for s in sites)
        raise UnsupportedModelError(f"No softmax attention can be replaced by a search. {why}")
    maps = [known_form(name) for name in settings.maps]
    task = find_task(original, sites, parts.search)
    _check_rows(task, parts, settings.max_drop)
    lengths = list(settings.lengths or _lengths(loaded, targets))
    key = _key(loaded, parts, task.name, lengths, settings)
    with search_record.opened(auto.record, key) as file:

        def say(text: str) -> None:
            advance(min(int(file.seconds), auto.seconds), text)

        say("candidates")
        forms = find_candidates(original, targets, parts.fit, maps, settings.options, seed)
        say("costs")
        candidates = measure_costs(
            targets, forms, lengths, settings.threads, file,
            lambda: COSTS_UNTIL - file.seconds / auto.seconds,
        )  # fmt: skip
        data = (parts.fit, parts.search)
        search = FormSearch(
            original, candidates, task, data, file, auto.seconds, settings.max_drop, seed, say
        )
        path, passing = search.run()
        file.save()
        spent, exhausted = file.seconds, search.left() <= 0 or candidates.skipped > 0
        say("confirming")
        result = confirmed(search, passing, parts.confirm)
        module, found = search.build(result.point)
        lost = result.after - result.before
        scores = (task.score(result.before), task.score(result.after))
        record = SearchRecord(
            minutes=auto.minutes,
            seconds=round(spent, 1),
            exhausted=exhausted,
            resumed=file.resumed,
            measured=len(file.kept.losses),
            loss=task.name,
            max_drop=settings.max_drop,
            confidence=CONFIDENCE,
            fit_rows=len(parts.fit),
            search_rows=len(parts.search),
            confirm_rows=len(parts.confirm),
            repeated_rows=parts.repeated,
            length=targets[0].length,
            costs=tuple(file.kept.costs),
            points=_points(search, path, passing, result.point),
            drop=float(lost.mean()),
            bound=upper_bound(lost, task.counted) if result.after is not result.before else 0.0,
        )
        measured = [row.length for row in search.costs_of(search.softmax)[0] if not row.computed]
        return FoundForms(
            module,
            found,
            search.forms_of(result.point.choice),
            MetricRecord(task.name, *scores, record.drop, not task.is_share),
            record,
            tuple(measured),
        )


def _check_rows(task: TaskLoss, parts: RowParts, max_drop: float) -> None:
    """Check that rows which are right or wrong are enough to show a drop, if none differs.

    Raises:
        UsageError: they are not.
    """
    count = len(parts.search)
    if not task.counted or upper_bound(torch.zeros(count), True) <= MARGIN * max_drop:
        return
    while upper_bound(torch.zeros(count), True) > MARGIN * max_drop:
        count += max(1, count // 16)
    raise UsageError(
        f"The data has {len(parts.search)} distinct rows to choose by, a quarter of all. Each is "
        f"right or wrong, and so few cannot show a drop of {max_drop:g}, even if none changes. "
        f"Give at least {4 * count:,} rows, or allow more with --max-drop."
    )


def _points(
    search: FormSearch, path: Sequence[Choice], passing: Sequence[FormPoint], chosen: FormPoint
) -> tuple[SearchPoint, ...]:
    """Softmax everywhere, and every stop of the path that was judged, with and without tuning."""
    judged = [passing[0], *(p for choice in path[1:] for p in search.judged_points(choice))]
    found = []
    for point in judged:
        times, held = search.costs_of(point.choice)
        found.append(
            SearchPoint(
                forms=point.choice,
                drop=point.losses.drop,
                bound=point.losses.bound,
                steps=point.losses.steps,
                times=times,
                state_bytes=held,
                chosen=(point.choice, point.tuned) == (chosen.choice, chosen.tuned),
            )
        )
    return tuple(found)


def _lengths(loaded: LoadedModel, sites: Sequence[Site]) -> list[int]:
    """Usual lengths that the model takes; else the longest, or that of the data."""
    dims = [
        dim
        for shape in loaded.dynamic_shapes
        for axis, dim in (shape.items() if isinstance(shape, dict) else ())
        if axis > 0
    ]
    if not dims:
        return [sites[0].length]
    limits = [dim.max for dim in dims if isinstance(getattr(dim, "max", None), int)]
    longest = min(limits, default=max(LENGTHS))
    return [n for n in LENGTHS if n <= longest] or [longest]


def _key(
    loaded: LoadedModel,
    parts: RowParts,
    task: str,
    lengths: Sequence[int],
    settings: SearchSettings,
) -> dict[str, str]:
    everything = (parts.fit, parts.search, parts.confirm)
    tensors = [x for part in everything for x in part.rows]
    tensors += [part.labels for part in everything if part.labels is not None]
    options = sorted(settings.options.items())
    return {
        "version": linexport.__version__,
        "model": digest_of_module(loaded.module),
        "data": digest_of(tensors),
        "task": task,
        "maps": ", ".join(settings.maps),
        "options of maps": ", ".join(f"{name}={value}" for name, value in options),
        "lengths": ", ".join(map(str, lengths)),
        "threads": str(settings.threads),
        "seed": str(settings.seed),
        "machine": str(environment.describe()["cpu"]),
    }
