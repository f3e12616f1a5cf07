"""Every map at the ends of its options: an error that says what is expected, or right numbers."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any

import numpy as np
import pytest
import torch

from linexport.errors import UsageError
from linexport.models import feature_maps
from linexport.models.feature_maps.base import EXACT

TINY = (-1.0, 0.0, 1e-300, 1e-45, 1e-30, 1e-10, 1e-6)
HUGE = (1e3, 1e6, 1e10, 1e30, 1e38, 1e300, float("inf"), float("nan"))
WHOLE = (-1, 0, 1, 2, 3, 20, 21, 32, 33, 64, 2**31, 10**12)
CHOICES: dict[type, tuple[object, ...]] = {
    bool: (True, False),
    int: WHOLE,
    float: (*TINY, *HUGE),
    list: ([], [1.0], [0.0, 1e-45], [1.0, 1e-45], [1e38, 1e38], [1.0] * 16, [1.0] * 33, [1.0] * 40),
    str: ("", "other"),
}


def default(field: Field[Any]) -> object:
    """Return the default of an option; a number for one that may be left to a fit."""
    made = field.default_factory() if field.default_factory is not MISSING else field.default
    return 1.0 if made is None else made


CASES = [
    (kind, field.name, value)
    for kind in feature_maps.kinds()
    for field in fields(feature_maps.find_map(kind).Options)
    for value in CHOICES[type(default(field))]
]


def products_are_right(module: feature_maps.FeatureMap, width: int) -> None:
    """Features of float32 are finite, and of an exact map their products are its kernel."""
    random = torch.Generator().manual_seed(0)
    heads = module.heads or 1
    q, k = (torch.randn(1, 6, heads * width, generator=random) for _ in range(2))
    phi_q, phi_k = module(q, heads, "query"), module(k, heads, "key")
    assert phi_q.isfinite().all() and phi_k.isfinite().all()
    if heads > 1 or module.over_time:
        return
    wide = [x[0].double().numpy() for x in (q, k)]
    kernel = module.kernel_value(*wide)
    assert np.isfinite(kernel).all()
    if module.exactness == EXACT:
        got = (phi_q.double() * phi_k.double()).sum(-1)[0].numpy()
        size = (phi_q.double() * phi_k.double()).abs().sum(-1)[0].numpy()
        assert (np.abs(got - kernel) <= 1e-5 * size).all()


@pytest.mark.parametrize("kind", feature_maps.kinds())
@pytest.mark.parametrize("width", [-1, 0, 1, 2])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_heads_of_any_width(kind: str, width: int) -> None:
    if width < 1:
        with pytest.raises(UsageError, match=f"heads of width {width}; expected at least 1"):
            feature_maps.make(kind, width)
    else:
        products_are_right(feature_maps.make(kind, width), width)


@pytest.mark.parametrize("kind", feature_maps.kinds())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_options_of_any_size(kind: str) -> None:
    for _, name, value in (case for case in CASES if case[0] == kind):
        try:
            module = feature_maps.make(kind, 2, {name: value})
        except UsageError as error:
            advice = ("expected", "GiB", "Use heads")
            assert any(word in str(error) for word in advice), (name, value)
            continue
        products_are_right(module, 2)


@pytest.mark.parametrize("delta", [1e-40, 1e-7, 1e7])
def test_a_scale_out_of_range_is_named(delta: float) -> None:
    with pytest.raises(UsageError, match=r"'delta' is .*; expected float >= 1e-06 and <= 1e\+06"):
        feature_maps.make("laplace", 4, {"delta": delta})


def test_powers_of_the_width_that_float32_does_not_hold_are_refused() -> None:
    products_are_right(feature_maps.make("random_monomials", 64, {"degree": 42}), 64)
    with pytest.raises(UsageError, match=r"'degree' is 43; expected at most 42 for heads of width"):
        feature_maps.make("random_monomials", 64, {"degree": 43})
