"""Forms for the requested sites of softmax attention, and reasons where there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from linexport.errors import UsageError
from linexport.linearization.calibration import Rows
from linexport.linearization.choose_forms import KEEP, MapConfig, requested
from linexport.linearization.find_softmax import Site
from linexport.linearization.forms import KernelAttention
from linexport.linearization.judge import ErrorSums, Forms, judge_forms, refuse_vanishing
from linexport.linearization.quality import no_better, undecided, why_kept
from linexport.linearization.replace import rebuildable
from linexport.linearization.samples import sample
from linexport.linearization.static_memory import MemoryErrors, fit_memory
from linexport.linearization.window_forms import fit_far_gains
from linexport.manifest.linearization_records import AttentionRow


@dataclass
class FittedForms:
    """One call of softmax attention with its tensors.

    Attributes:
        forms: by the index of their sites.
        records: one for every site, as in the report.
    """

    forms: dict[int, nn.Module] = field(default_factory=dict)
    records: list[AttentionRow] = field(default_factory=list)


def replace_attention(
    module: nn.Module,
    sites: Sequence[Site],
    fit: Sequence[Rows],
    held_out: Sequence[Rows],
    more: Sequence[Rows],
    config: MapConfig,
    memory_keys: int | None,
) -> FittedForms:
    """Make and judge forms of all requested sites that can be replaced.

    Maps and memories are fitted to the batches ``fit``, errors measured on ``held_out``, and on
    ``more`` where these do not tell whether a form is better than the mean of the values.

    Raises:
        UsageError: a configuration that does not fit.
        ParityError: a denominator vanishes on the data.
    """
    config.check(sites)
    targets = [s for s in sites if s.replaceable and config.map_of(s.name) != KEEP]
    samples = sample(module, fit, targets, config.seed)
    made = FittedForms()
    reasons = {s.index: s.reason for s in sites if s.reason}
    details: dict[int, MemoryErrors] = {}
    kernel = []
    for site in targets:
        if not site.memory or rebuildable(module):
            kernel.append(site)
            continue
        try:
            form, details[site.index] = fit_memory(
                site, samples[site.index], memory_keys, config.seed
            )
            made.forms[site.index] = form
        except UsageError as error:
            reasons[site.index] = str(error)
    for site in kernel:
        made.forms[site.index] = requested(site, config, samples[site.index])
    fit_far_gains(module, fit[0], made.forms)
    forms = {index: [form] for index, form in made.forms.items()}
    judged, local = _judged(module, held_out, more, forms, config.options.get("delta"))
    _record(made, sites, judged, local, reasons, details)
    return made


def searched_forms(
    module: nn.Module,
    sites: Sequence[Site],
    held_out: Sequence[Rows],
    forms: Mapping[int, nn.Module],
) -> FittedForms:
    """Record forms that a search has chosen, with their errors on ``held_out``."""
    made = FittedForms(dict(forms))
    judged = judge_forms(module, held_out, {i: [form] for i, form in forms.items()}, binned=True)
    reasons = {site.index: site.reason or "the search keeps its softmax" for site in sites}
    _record(made, sites, judged, {}, reasons, {})
    return made


def leave_out(made: FittedForms, sites: Sequence[Site]) -> list[Site]:
    """Take out forms that are no better than the mean of the values; returns their sites."""
    found = []
    for at, (site, row) in enumerate(zip(sites, made.records, strict=True)):
        if site.index in made.forms and no_better(row):
            del made.forms[site.index]
            made.records[at] = replace(row, reason=why_kept(row))
            found.append(site)
    return found


def _judged(
    module: nn.Module,
    held_out: Sequence[Rows],
    more: Sequence[Rows],
    forms: Forms,
    locality: float | None,
) -> tuple[dict[int, list[ErrorSums]], dict[int, list[ErrorSums]]]:
    """Errors from softmax attention and, with a locality, from exact masked attention."""
    judged = judge_forms(module, held_out, forms, binned=True)
    local = {} if locality is None else judge_forms(module, held_out, forms, locality)
    close = {i: forms[i] for i, (sums,) in (local or judged).items() if undecided(sums.margin)}
    if close:
        judge_forms(module, more, close, binned=True, found=judged)
        if local:
            judge_forms(module, more, close, locality, found=local)
    return judged, local


def _record(
    made: FittedForms,
    sites: Sequence[Site],
    judged: Mapping[int, Sequence[ErrorSums]],
    local: Mapping[int, Sequence[ErrorSums]],
    reasons: dict[int, Any],
    details: dict[int, MemoryErrors],
) -> None:
    for site in sites:
        form = made.forms.get(site.index)
        described = {k: v for k, v in asdict(site).items() if k not in ("index", "reason")}
        record = AttentionRow(
            **described,
            options={},
            reason=None if form else reasons.get(site.index, "left as it is, as requested"),
        )
        if site.index in details:
            record = replace(record, **vars(details[site.index]))
        if form is not None:
            sums = judged[site.index][0]
            record = replace(
                record,
                attention_error=sums.error,
                uniform_error=sums.uniform_error,
                margin=(local if local else judged)[site.index][0].margin,
                local_error=local[site.index][0].error if local else None,
                local_uniform_error=local[site.index][0].uniform_error if local else None,
                by_position=sums.by_position.records(),
                by_sharpness=sums.by_sharpness.records(),
            )
        if isinstance(form, KernelAttention):
            refuse_vanishing(site, form, judged[site.index][0])
            record = replace(
                record,
                map=form.name,
                options=form.options(),
                features=form.feature_map.features,
            )
        made.records.append(record)
