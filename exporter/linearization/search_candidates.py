"""Candidates of a search: the forms that each layer may get, and what a call of each costs.

Named by the user, or else

    windows      softmax over the last 16, 64 or 256 tokens and the first four, elu1 for older ones
    maps alone   elu1, and the front of features over error among all maps with a positive kernel

The error of a map alone is that of the attention it would replace, over all layers, on a few rows:
it orders maps before any loss of the task is measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import nn

from linexport.errors import LinexportError, UsageError
from linexport.linearization.choose_forms import MapConfig, every_form, made_form
from linexport.linearization.find_softmax import Site
from linexport.linearization.forms import KernelAttention
from linexport.linearization.judge import judge_forms
from linexport.linearization.layer_costs import CallShape, measure
from linexport.linearization.samples import SiteSamples, sample
from linexport.linearization.search_record import SearchFile
from linexport.linearization.task_loss import TaskRows
from linexport.linearization.window_forms import SINKS, fit_far_gains, split_name
from linexport.manifest.linearization_records import SOFTMAX, AttentionCost, FormCost
from linexport.models.feature_maps import find_map

log = logging.getLogger(__name__)

WINDOWS, FAR, FIRST_TOKENS = (64, 16, 256), "elu1", 4
FITTED = 4096
"""Tokens that maps are fitted to and ordered by."""

Forms = dict[int, dict[str, KernelAttention]]
"""By the index of the site and the name of the form."""


@dataclass
class Candidates:
    """Forms and costs.

    Attributes:
        sites: that a form may replace.
        forms: of each site; without those that cost more than softmax.
        costs: by name of the form, softmax among them, and shape.
        lengths: at which times are known.
        skipped: forms that were not measured, as the time was over.
    """

    sites: list[Site]
    lengths: Sequence[int]
    forms: Forms = field(default_factory=dict)
    costs: dict[tuple[str, CallShape], AttentionCost] = field(default_factory=dict)
    skipped: int = 0

    def cost(self, site: Site, name: str) -> AttentionCost:
        """Return the cost of one form in a site."""
        return self.costs[name, CallShape.of(site)]

    def saved(self, site: Site, name: str) -> float:
        """Return what a form saves: its share of all attention's time, and of all states' bytes.

        The share of time is the mean over the lengths; that of bytes is at the longest.
        """
        pairs = [(self.cost(one, SOFTMAX), one) for one in self.sites]
        own, form = self.cost(site, SOFTMAX), self.cost(site, name)
        shares = [
            (own.times[at].milliseconds - form.times[at].milliseconds)
            / sum(cost.times[at].milliseconds for cost, _ in pairs)
            for at in range(len(self.lengths))
        ]
        longest = max(self.lengths)
        held = sum(cost.bytes_at(longest) for cost, _ in pairs)
        freed = own.bytes_at(longest) - form.bytes_at(longest)
        return float(np.mean(shares)) + (freed / held if held else 0.0)


def find_candidates(
    module: nn.Module,
    sites: Sequence[Site],
    fit: TaskRows,
    names: Sequence[str],
    options: Mapping[str, object],
    seed: int,
) -> Forms:
    """Return forms of all sites, fitted to the first rows.

    Args:
        module: with softmax attention.
        sites: that forms may replace.
        fit: rows to fit to.
        names: of forms, such as window64+elu1; none: those above.
        options: of maps.
        seed: of random maps.

    Raises:
        UsageError: a named form fits no site.
    """
    first = fit.take(slice(max(2, FITTED // max(sites[0].length, 1))))
    samples = sample(module, [first.rows], sites, seed)
    config = MapConfig({}, {}, options, seed)
    if names:
        found = {site.index: dict(_named(site, names, config, samples)) for site in sites}
        if not any(found.values()):
            for name in names:  # raises the reason
                made_form(
                    sites[0],
                    known_form(name),
                    None,
                    _options(config, name),
                    samples[sites[0].index],
                )
    else:
        found = {s.index: dict(_named(s, _usual(s), config, samples)) for s in sites}
        few = first.take(slice(max(2, len(first) // 2)))
        for index, forms in _plain(module, sites, few, config, samples).items():
            found[index] |= forms
    for name in {name for forms in found.values() for name in forms}:
        fit_far_gains(module, first.rows, {i: f[name] for i, f in found.items() if name in f})
    return found


def measure_costs(
    sites: Sequence[Site],
    forms: Forms,
    lengths: Sequence[int],
    threads: int,
    file: SearchFile,
    left: Callable[[], float],
) -> Candidates:
    """Measure a call of every form and of softmax, each shape once; leave out what saves nothing.

    ``left`` is the share of the time that is left: forms whose turn does not come are left out, but
    not the first of a shape, without which there is nothing to search.
    """
    found, begun = Candidates(list(sites), lengths), set[CallShape]()
    for name, site, form in _distinct(sites, forms):
        shape = CallShape.of(site)
        known = {(one.form, one.shape): one for one in file.kept.costs}
        row = known.get((name, str(shape)))
        if row is None and (name == SOFTMAX or shape not in begun or left() > 0):
            row = _measured(name, shape, form, lengths, threads)
            file.kept.costs.append(row)
            file.save()
        found.skipped += row is None
        if row is not None and row.cost is not None:
            found.costs[name, shape] = row.cost
            if name != SOFTMAX:
                begun.add(shape)
    found.sites = [site for site in sites if (SOFTMAX, CallShape.of(site)) in found.costs]
    for site in found.sites:
        found.forms[site.index] = {
            name: form
            for name, form in forms[site.index].items()
            if (name, CallShape.of(site)) in found.costs and found.saved(site, name) > 0
        }
    return found


def _measured(
    name: str,
    shape: CallShape,
    form: KernelAttention | None,
    lengths: Sequence[int],
    threads: int,
) -> FormCost:
    try:
        return FormCost(name, str(shape), measure(shape, form, lengths, threads))
    except LinexportError as error:
        log.info("%s is not measured: %s", name, error)
        return FormCost(name, str(shape), None, str(error).splitlines()[0])


def _distinct(
    sites: Sequence[Site], forms: Forms
) -> Iterator[tuple[str, Site, KernelAttention | None]]:
    """Softmax in every shape first, then each form in every shape."""
    seen = set[tuple[str, CallShape]]()
    everything: list[tuple[str, Site, KernelAttention | None]]
    everything = [(SOFTMAX, site, None) for site in sites]
    everything += [(n, site, form) for site in sites for n, form in forms[site.index].items()]
    for name, site, form in everything:
        if (name, CallShape.of(site)) not in seen:
            seen.add((name, CallShape.of(site)))
            yield name, site, form


def _usual(site: Site) -> list[str]:
    """Windows that the rows of data are twice as long as, and the map alone."""
    causal = site.causal and not site.cross
    windows = [f"window{w}+{FAR}" for w in WINDOWS if causal and 2 * w <= site.length]
    return [*windows, FAR]


def _named(
    site: Site, names: Sequence[str], config: MapConfig, samples: Mapping[int, SiteSamples]
) -> Iterator[tuple[str, KernelAttention]]:
    for given in names:
        name = known_form(given)
        try:
            made = made_form(site, name, None, _options(config, name), samples[site.index])
        except UsageError as error:
            log.info("%s has no form %s: %s", site.name, name, error)
            continue
        yield name, made


def known_form(name: str) -> str:
    """Return the name of a form with that of its map as registered.

    Raises:
        UsageError: there is no such map.
    """
    return MapConfig({"*": name}).map_of("")


def _options(config: MapConfig, name: str) -> MapConfig:
    """The first tokens remain exact beside a window; maps alone do not know the option."""
    options = {k: v for k, v in config.options.items() if k != SINKS}
    if split_name(name)[0] is not None:
        options[SINKS] = config.options.get(SINKS, FIRST_TOKENS)
    return replace(config, options=options)


def _plain(
    module: nn.Module,
    sites: Sequence[Site],
    rows: TaskRows,
    config: MapConfig,
    samples: Mapping[int, SiteSamples],
) -> Forms:
    """Maps alone on the front of features over error, the error over all sites."""
    config = _options(config, FAR)
    tried = {s.index: list(every_form(s, config, samples[s.index])) for s in sites}
    judged = judge_forms(module, [rows.rows], tried)
    sums: dict[str, list[tuple[float, float, float, int]]] = {}
    for index, forms in tried.items():
        for form, found in zip(forms, judged[index], strict=True):
            row = (found.difference, found.size, found.uniform, form.feature_map.features)
            sums.setdefault(plain_name(form), []).append(row)
    errors = {}
    for name, rows_of in sums.items():
        difference, size, alike, features = (sum(column) for column in zip(*rows_of, strict=True))
        if difference < alike and not np.isnan(difference):
            errors[name] = (features / len(rows_of), difference / size)
    kept = front(errors)
    return {
        index: {plain_name(f): f for f in forms if plain_name(f) in kept}
        for index, forms in tried.items()
    }


def plain_name(form: KernelAttention) -> str:
    """Return the name of a map alone, with its features where these are a choice."""
    known = find_map(form.feature_map.kind).Options.__dataclass_fields__
    kind, features = form.feature_map.kind, form.feature_map.features
    return f"{kind} M={features}" if "features" in known else kind


def front(errors: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the cheapest and the best of those that nothing cheaper is as good as.

    Args:
        errors: cost and error by name.
    """
    found: list[str] = []
    for name in sorted(errors, key=lambda one: errors[one]):
        if not found or errors[name][1] < errors[found[-1]][1]:
            found.append(name)
    return list(dict.fromkeys((found[0], found[-1]))) if found else []
