"""Each layer's form: of the requested map, or of every map that a search may try."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from linexport.errors import UsageError
from linexport.linearization.find_softmax import Site
from linexport.linearization.forms import KernelAttention
from linexport.linearization.locality import LOCAL
from linexport.linearization.samples import SiteSamples
from linexport.linearization.window_forms import (
    MOST_TOKENS,
    SINKS,
    WindowForm,
    joined_name,
    split_name,
)
from linexport.models import feature_maps
from linexport.system.json_object import JsonObject

KEEP = "keep"
"""In place of a map: leave the layer as it is."""

EVERY = "*"
SIZES = (16, 64)
"""Numbers of features that are tried where a map has the choice."""


@dataclass(frozen=True)
class MapConfig:
    """Requested maps by patterns of layer names.

    Patterns are such as ``*`` or ``blocks.0.*``; later ones overrule earlier ones.

    Attributes:
        maps: names of feature maps, or ``keep``.
        features: numbers of features M.
        options: of all maps that have them.
        seed: of random maps.
    """

    maps: Mapping[str, str]
    features: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def map_of(self, name: str) -> str:
        """The map of one layer, by its own name, with its window."""
        given = last(self.maps, name) or KEEP
        if given == KEEP:
            return KEEP
        if given == "auto":
            raise UsageError(
                "auto is not a map. A search chooses the forms of layers: --auto in a shell, "
                "auto=linexport.AutoSearch() in Python, with the drop that is allowed."
            )
        window, kind = split_name(given)
        return joined_name(window, feature_maps.find_map(kind.replace("-", "_")).kind)

    def features_of(self, name: str) -> int | None:
        """Return M of one layer; None if it was not requested.

        Where layers get different maps, M for all of them is of those that have the choice.
        """
        found: int | None = last(self.features, name)
        kind = self.map_of(name)
        mixed = len(set(self.maps.values())) > 1 and kind != KEEP
        return None if mixed and not _sized(kind) else found

    def check(self, sites: Sequence[Site]) -> None:
        """Before anything is computed.

        Raises:
            UsageError: a pattern that fits no layer, or an unknown map.
        """
        names = [site.name for site in sites]
        check_patterns((*self.maps, *self.features), names)
        for name in names:
            self.map_of(name)


def local(config: MapConfig, delta: float) -> MapConfig:
    """The configuration with every map that is not kept multiplied by a mask of nearness.

    Raises:
        UsageError: delta is not positive, or a requested map is not favor+.
    """
    if not 0 < delta < float("inf"):
        raise UsageError(f"The locality is {delta:g}; expected a distance above 0.")
    others = sorted({kind for kind in config.maps.values() if kind not in ("favor+", LOCAL, KEEP)})
    if others:
        raise UsageError(
            f"Locality is built on favor+, not on {', '.join(others)}: a product of maps needs "
            "draws on both sides."
        )
    maps = {pattern: kind if kind == KEEP else LOCAL for pattern, kind in config.maps.items()}
    return replace(config, maps=maps, options={**config.options, "delta": float(delta)})


def check_patterns(patterns: Iterable[str], names: Sequence[str]) -> None:
    """Refuse a pattern of layer names that fits none.

    Raises:
        UsageError: names it, and the layers.
    """
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise UsageError(f"No layer is called {pattern!r}; found {', '.join(names)}.")


def last(rules: Mapping[str, object], name: str) -> Any:
    """The value of the last pattern that fits a name; None where none does."""
    found = [value for pattern, value in rules.items() if fnmatch.fnmatchcase(name, pattern)]
    return found[-1] if found else None


def requested(site: Site, config: MapConfig, samples: SiteSamples) -> KernelAttention:
    """The form of a site whose map was named.

    Raises:
        UsageError: options that the map does not have, or that it does not fit the attention.
    """
    return made_form(site, config.map_of(site.name), config.features_of(site.name), config, samples)


def every_form(site: Site, config: MapConfig, samples: SiteSamples) -> Iterator[KernelAttention]:
    """Yield the forms of all maps whose kernel is positive, which no denominator can vanish for."""
    for kind in feature_maps.kinds():
        found = feature_maps.find_map(kind)
        if not found.kernel_positive or (found.over_time and site.causal):
            continue
        sized = _sized(kind)
        for size in SIZES if sized else (None,):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    yield made_form(site, kind, size, config, samples)
            except UsageError:  # too few distinct keys, or too large a state: not for this layer
                continue


def _sized(name: str) -> bool:
    """The map has the choice of M."""
    kind = split_name(name)[1]
    return "features" in {f.name for f in fields(feature_maps.find_map(kind).Options)}


def made_form(
    site: Site, name: str, features: int | None, config: MapConfig, samples: SiteSamples
) -> KernelAttention:
    """Return the form of a site with a map, with a window or not.

    Raises:
        UsageError: options that the map does not have, or that it does not fit the attention.
    """
    window, kind = split_name(name)
    known = {f.name for f in fields(feature_maps.find_map(kind).Options)}
    options = dict(config.options)
    sinks = 0 if window is None else _sinks(options)
    if "seed" in known:
        options.setdefault("seed", config.seed)
    if features is not None:
        options["features"] = features
    try:
        feature_map = feature_maps.make(kind, site.head_dim, options)
    except UsageError as error:
        if window is None:
            raise
        raise UsageError(
            f"{error} A window has the option {SINKS}, a number of first tokens that remain exact."
        ) from None
    fit = getattr(feature_map, "fit", None)
    if fit is not None:
        fit(*(x.reshape(-1, site.head_dim) for x in (samples.queries, samples.keys)))
    if window is None:
        return KernelAttention(site, feature_map)
    return WindowForm(site, feature_map, window, sinks)


def _sinks(options: JsonObject) -> int:
    """Take the number of sinks out of the options.

    Raises:
        UsageError: it is not one.
    """
    found = options.pop(SINKS, 0)
    if type(found) is not int or not 0 <= found <= MOST_TOKENS:
        raise UsageError(
            f"The option {SINKS} is {found!r}; expected a number of tokens from 0 to "
            f"{MOST_TOKENS:,}."
        )
    return found
