"""All feature maps with what they say of themselves."""

from __future__ import annotations

import warnings
from dataclasses import asdict

import torch

from linexport.errors import UsageError
from linexport.manifest.map_records import MapDescription
from linexport.models import feature_maps


def catalogue(d: int) -> list[MapDescription]:
    """One entry per map, by name; ``features`` is M with default options at head width d.

    Raises:
        UsageError: d is not positive.
    """
    if d < 1:
        raise UsageError(f"Head width {d}; expected at least 1.")
    return [_entry(kind, d) for kind in feature_maps.kinds()]


def _entry(kind: str, d: int) -> MapDescription:
    found = feature_maps.find_map(kind)
    features, note = None, None
    # Only M is needed: on the meta device nothing is drawn for wide heads.
    with warnings.catch_warnings(record=True) as said, torch.device("meta"):
        warnings.simplefilter("always")
        try:
            features = feature_maps.make(kind, d).features
        except UsageError as error:
            note = str(error)
    return MapDescription(
        map=kind,
        kernel=found.kernel,
        exactness=found.exactness,
        features=features,
        positive=found.positive,
        kernel_positive=found.kernel_positive,
        causal=not found.over_time,
        error=found.error,
        regime=found.regime,
        failure=found.failure,
        options=asdict(found.Options()),
        note=note or (str(said[0].message) if said else None),
    )
