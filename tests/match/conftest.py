"""The formulations, exported once each, and an independent float64 reference for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import onnx
import pytest

from linexport import passes
from linexport.passes import Rewritten
from tests.support import formulations
from tests.support.packed import Packed, exported

FUSED = ("canonicalise", "fuse")


TABLES = {
    "causal": formulations.CAUSAL,
    "bidirectional": formulations.BIDIRECTIONAL,
    "other": formulations.OTHER,
    "separate": formulations.SEPARATE,
    "formulation": {**formulations.CAUSAL, **formulations.BIDIRECTIONAL},
}


NEAR_ANOTHER = {
    "cumsum_column_vectors",
    "cumsum_value_first",
    "ones_column",
    "retnet",
    "flat_batch_heads",
    "multi_query",
    "normalised_scores",
    "ones_tril_product",
    "masked_fill",
    "trilbuffer",
    "plain_unnormalised",
    "matmul_ones",
    "taylor_features",
    "taylor_scores_doubled",
    "even_polynomial",
    "squared_scores",
    "squared_scores_and_one",
    "fourth_power",
    "cube_of_positive_scores",
    "squared_scores_of_all",
    "einsum_katharopoulos",
    "galerkin",
    "quadratic_unnormalised",
    "sharedprojection",
    "min_lstm",
    "quotient_of_products",
    "moving_average",
    "powers_of_channels",
    "running_mean_of_exponents",
    "real_part_of_complex_features",
    "four_products_of_unlike_weight",
    "a_sum_of_two_outputs",
    "a_sum_of_scores_that_decays",
    "two_widths",
    "hedgehog_halves_of_all",
}
"""Formulations that differ little from one that every run has."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for ``causal`` runs once for every causal formulation, and so on."""
    for name, table in TABLES.items():
        if name in metafunc.fixturenames:
            cases = [pytest.param(n, marks=_marks(n)) for n in table]
            metafunc.parametrize(name, cases)


def _marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.slow,) if name in NEAR_ANOTHER else ()


@pytest.fixture(scope="session")
def export() -> Callable[[str], tuple[Packed, onnx.ModelProto]]:
    """``export(name)``: the module and its graph."""
    return exported


@cache
def fused(name: str) -> Rewritten:
    """The graph of a formulation after the passes that fuse."""
    return passes.rewrite(exported(name)[1], FUSED)


@pytest.fixture(scope="session")
def rewrite() -> Callable[[str], Rewritten]:
    """``rewrite(name)``: its graph, fused, and what was found; made once, not to be changed."""
    return fused


@pytest.fixture(scope="package", autouse=True)
def alone(one_thread: None) -> None:
    """Tensors of these tests are tiny."""
