"""StabilizedExp of the CPU library against the float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linexport.plugins.ops.stabilized_exp import stabilized_exp
from tests.support.native import check_in_place, on_library, one_node, session
from tests.support.runtimes import Arrays

OUTPUTS = ("query_features", "key_features", "present_decay", "present_key_max")
HEADS = ((2, 2), (4, 2), (2, 4), (1, 1), (6, 3), (37, 37))
OPTIONAL = ("past_key_max", "key_mask", "decay")


def shapes(
    heads: tuple[int, int], features: int, given_: set[str], per_feature: bool = False
) -> dict[str, tuple[int | str, ...]]:
    width = heads[1] * features
    optional = {
        "past_key_max": ("B", heads[1], features),
        "key_mask": ("B", "T"),
        "decay": ("B", "T", width if per_feature else heads[1]),
    }
    found: dict[str, tuple[int | str, ...]]
    found = {"query": ("B", "T", heads[0] * features), "key": ("B", "T", width)}
    return found | {n: s for n, s in optional.items() if n in given_}


def draw(wanted: dict[str, tuple[int | str, ...]], batch: int, length: int, scale: float) -> Arrays:
    rng, sizes = np.random.default_rng(length), {"B": batch, "T": length}
    x = {}
    for name, shape in wanted.items():
        drawn = rng.normal(size=[sizes.get(d, d) for d in shape])  # type: ignore[call-overload]
        x[name] = drawn > -0.5 if name == "key_mask" else np.float32(scale * drawn)
    if "decay" in x:
        x["decay"] = -np.abs(x["decay"])
    return x


def check(got: list[np.ndarray], want: tuple[np.ndarray, ...], scale: float, sums: int) -> None:
    """Exponents of this size carry a rounding of their own, and sums of as many decays."""
    rounding = 4 * (1e-6 + 4 * 2.0**-24 * scale * (1 + sums))
    for one, expected in zip(got, want, strict=True):
        assert (one.shape, one.dtype) == (expected.shape, np.float32)
        np.testing.assert_allclose(one, expected, rtol=1e-6, atol=rounding)


@pytest.mark.smoke
@settings(max_examples=90, derandomize=True, deadline=None, database=None)
@given(
    heads=st.sampled_from(HEADS),
    features=st.one_of(
        st.sampled_from([1, 2, 4, 8]), st.integers(3, 20), st.sampled_from([64, 129])
    ),
    causal=st.booleans(),
    optional=st.sets(st.sampled_from(OPTIONAL)),
    per_feature=st.booleans(),
    batch=st.integers(0, 3),
    length=st.sampled_from([0, 1, 2, 5, 64, 65, 200]),
    scale=st.sampled_from([1e-3, 1.0, 30.0, 1e4]),
    threads=st.integers(1, 4),
)
def test_equals_oracle(
    heads: tuple[int, int],
    features: int,
    causal: bool,
    optional: set[str],
    per_feature: bool,
    batch: int,
    length: int,
    scale: float,
    threads: int,
) -> None:
    wanted = shapes(heads, features, optional if causal else optional & {"key_mask"}, per_feature)
    settings_ = {"q_num_heads": heads[0], "k_num_heads": heads[1], "causal": int(causal)}
    run = on_library(one_node("StabilizedExp", wanted, OUTPUTS, **settings_), threads)
    x = draw(wanted, batch, length, scale)
    want = stabilized_exp(*heads, causal, **x)
    check(run(x), want, scale, length * ("decay" in wanted))


@pytest.mark.parametrize("causal", [0, 1])
def test_same_bits_whatever_the_threads(causal: int) -> None:
    """One head: the sequence is divided."""
    wanted = shapes((1, 1), 96, {"decay"} if causal else set())
    settings_ = {"q_num_heads": 1, "k_num_heads": 1, "causal": causal}
    model = one_node("StabilizedExp", wanted, OUTPUTS, **settings_)
    x = draw(wanted, 1, 700, 3.0)
    alone, *others = (on_library(model, threads)(x) for threads in (1, 2, 3, 5))
    for other in others:
        for one, two in zip(alone, other, strict=True):
            np.testing.assert_array_equal(one, two)


def test_the_maximum_in_place() -> None:
    """Past and present bound to the same memory, the sequence divided among threads."""
    wanted = shapes((1, 1), 96, {"past_key_max"})
    model = one_node("StabilizedExp", wanted, OUTPUTS, q_num_heads=1, k_num_heads=1)
    check_in_place(model, draw(wanted, 1, 700, 1.0), 3)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("query", (1, 5, 7)),
        ("key", (1, 4, 6)),
        ("key", (1, 5, 5)),
        ("past_key_max", (1, 2, 4)),
        ("key_mask", (2, 5)),
        ("decay", (1, 5, 5)),
        ("decay", (1, 4, 2)),
    ],
)
def test_wrong_shapes_are_refused(name: str, shape: tuple[int, ...]) -> None:
    wanted = shapes((4, 2), 3, set(OPTIONAL))
    model = one_node("StabilizedExp", wanted, OUTPUTS, q_num_heads=4, k_num_heads=2)
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_param = f"{value.name}_{id(dim)}"
    x, opened = draw(wanted, 1, 5, 1.0), session(model)
    opened.run(None, x)
    with pytest.raises(Exception, match="StabilizedExp"):
        opened.run(None, {**x, name: np.ones(shape, x[name].dtype)})


@pytest.mark.parametrize(
    "settings_, message",
    [
        ({"q_num_heads": 0, "k_num_heads": 1}, "head counts"),
        ({"q_num_heads": 3, "k_num_heads": 2}, "multiple of the other"),
    ],
)
def test_unknown_attributes_are_refused(settings_: dict[str, int], message: str) -> None:
    wanted = shapes((1, 1), 6, set())
    model = one_node("StabilizedExp", wanted, OUTPUTS, q_num_heads=1, k_num_heads=1)
    for attribute in model.graph.node[0].attribute:
        attribute.i = settings_.get(attribute.name, attribute.i)
    with pytest.raises(Exception, match=message):
        session(model)
