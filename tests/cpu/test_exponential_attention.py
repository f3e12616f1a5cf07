"""Maps, stabilised exponentials and attention as one node, against the float64 oracles."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from linexport.plugins.ops import feature_map
from linexport.plugins.ops.linear_attention import LinearAttentionSpec, linear_attention
from linexport.plugins.ops.stabilized_exp import stabilized_exp
from linexport.targets.base import OrtSession
from linexport.targets.cpu_fusion import with_programs
from linexport.targets.cpu_fusion.exponentials import KINDS, OP
from tests.support.exponentials import EPS, PAST, Sizes, features_of, four_nodes, shapes
from tests.support.native import check_in_place, on_library, session
from tests.support.runtimes import Arrays

HEADS = ((2, 2), (4, 2), (2, 4), (1, 1), (6, 3))


def fused(model: onnx.ModelProto) -> onnx.ModelProto:
    made = with_programs(model)
    assert [n.op_type for n in made.graph.node if n.domain] == [OP]
    return made


def draw(
    sizes: Sizes, features: int, optional: set[str], batch: int, length: int, scale: float
) -> Arrays:
    """Random inputs; the past is one that tokens could have left, the first of them masked."""
    rng, free = np.random.default_rng(length), {"B": batch, "T": length}
    x = {}
    for name, shape in shapes(sizes, features, optional).items():
        drawn = rng.normal(size=[free.get(d, d) for d in shape])  # type: ignore[call-overload]
        x[name] = np.float32(drawn * (scale if name in ("query", "key") else 1))
    if "past_normalizer" in x:
        x["past_normalizer"] = np.abs(x["past_normalizer"]) + 1
    if "key_mask" in x:
        x["key_mask"] = x["key_mask"] > -0.5
        x["key_mask"][:, :3] = False
    return x


def oracle(
    kind: str, sizes: Sizes, x: Arrays, value: np.ndarray | None = None
) -> tuple[list[np.ndarray], float]:
    """What the four nodes compute, in float64, and the largest exponent."""
    (queries, heads), width, _, features = sizes
    phi, wide = features_of(kind, width, features), {n: np.float64(a) for n, a in x.items()}
    parameters = {n: t.numpy() for n, t in zip(feature_map.NAMES, phi.frozen(), strict=False)}
    exponents = [
        feature_map.OP.oracle(  # type: ignore[misc]
            {"kind": kind, "side": side, "log": 1, "num_heads": count},
            {"x": wide[side], **parameters},
        )[0]
        for side, count in (("query", queries), ("key", heads))
    ]
    mask = x.get("key_mask")
    q, k, decay, top = stabilized_exp(
        queries, heads, True, *exponents, wide.get("past_key_max"), mask
    )
    spec = LinearAttentionSpec(max(queries, heads), heads, "gated", normalize=True, eps=EPS)
    given_ = {
        "query": q,
        "key": k,
        "value": wide["value"] if value is None else value,
        "decay": decay,
    }
    states = {n: wide[n] for n in PAST[:2] if n in wide}
    if value is not None and states:
        states["past_state"] = np.abs(states["past_state"])
    masked = {} if mask is None else {"key_mask": mask}
    found = linear_attention(spec, **given_, **states, **masked)
    return [*found, top], max((np.abs(e).max(initial=0) for e in exponents), default=0)


def check(got: list[np.ndarray], kind: str, sizes: Sizes, x: Arrays) -> None:
    """Exponents carry a rounding of their size, and with it features and what is summed of them."""
    want, largest = oracle(kind, sizes, x)
    bounds, _ = oracle(kind, sizes, x, np.abs(np.float64(x["value"])))
    rounding = 2e-6 + 8 * 2.0**-24 * largest
    bounds[3] = np.maximum(1, np.abs(want[3]))
    for one, expected, bound in zip(got, want, bounds, strict=True):
        assert (one.shape, one.dtype) == (expected.shape, np.float32)
        assert (np.abs(one - expected) <= rounding * (np.abs(bound) + 1e-6)).all()


@pytest.mark.smoke
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(
    kind=st.sampled_from(KINDS),
    heads=st.sampled_from(HEADS),
    width=st.one_of(st.integers(1, 20), st.sampled_from([64, 65])),
    channels=st.one_of(st.integers(1, 20), st.sampled_from([64, 129])),
    features=st.one_of(st.integers(2, 20), st.sampled_from([64, 128, 130])),
    optional=st.sets(st.sampled_from(("past", "mask"))),
    batch=st.integers(0, 2),
    length=st.sampled_from([0, 1, 2, 15, 16, 17, 64, 65, 130]),
    scale=st.sampled_from([1e-3, 1.0, 3.0, 30.0]),
    threads=st.integers(1, 4),
)
def test_equals_oracle(
    kind: str,
    heads: tuple[int, int],
    width: int,
    channels: int,
    features: int,
    optional: set[str],
    batch: int,
    length: int,
    scale: float,
    threads: int,
) -> None:
    sizes = heads, width, channels, features
    count = features_of(kind, width, features).features
    x = draw(sizes, count, optional, batch, length, scale)
    check(on_library(fused(four_nodes(kind, sizes, optional)), threads)(x), kind, sizes, x)


@pytest.mark.parametrize("kind", KINDS)
def test_maxima_that_grow_with_every_token(kind: str) -> None:
    """Exponents of smaller and smaller keys grow by more than a chunk may hold, then by less."""
    sizes = (2, 2), 8, 8, 12
    x = draw(sizes, features_of(kind, 8, 12).features, set(), 1, 60, 1.0)
    x["key"] = x["key"][:, :1] * np.linspace(25, 0, 60, dtype=np.float32)[None, :, None]
    tops = [oracle(kind, sizes, {n: a[:, :t] for n, a in x.items()})[0][3] for t in (1, 2, 59, 60)]
    assert (tops[1] - tops[0]).max() > 20 > (tops[3] - tops[2]).max()
    check(on_library(fused(four_nodes(kind, sizes)))(x), kind, sizes, x)


@pytest.mark.parametrize("heads", HEADS)
def test_same_bits_whatever_the_threads(heads: tuple[int, int]) -> None:
    sizes = heads, 16, 200, 40
    x, model = draw(sizes, 40, {"past"}, 1, 100, 1.0), fused(four_nodes("favor+", sizes, {"past"}))
    alone, *others = (on_library(model, threads)(x) for threads in (1, 2, 3, 5))
    for other in others:
        for one, two in zip(alone, other, strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("length", [1, 40])
def test_states_in_place(length: int) -> None:
    """Past and present bound to the same memory, one head divided among threads."""
    sizes = (1, 1), 16, 300, 40
    x = draw(sizes, 40, {"past"}, 1, length, 1.0)
    check_in_place(fused(four_nodes("favor+", sizes, {"past"})), x, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_runs_without_the_library(kind: str) -> None:
    sizes = (4, 2), 8, 5, 12
    optional = {"past", "mask"}
    x = draw(sizes, features_of(kind, 8, 12).features, optional, 2, 20, 1.0)
    model = fused(four_nodes(kind, sizes, optional))
    check([*OrtSession(model.SerializeToString(), 1).run(x).values()], kind, sizes, x)


@pytest.mark.parametrize("activation", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_half_precision_is_widened_first(activation: int) -> None:
    sizes = (2, 2), 16, 16, 24
    x = draw(sizes, 24, set(), 1, 20, 1.0)
    for name in ("query", "key"):  # of few digits, which both types have
        x[name] = np.round(x[name] * 16) / 16
    check(on_library(fused(four_nodes("favor+", sizes, set(), activation)))(x), "favor+", sizes, x)


def changed(model: onnx.ModelProto, edit: Any) -> onnx.ModelProto:
    edit({n.op_type + n.output[0][:1]: n for n in model.graph.node})
    return model


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    return next(a for a in node.attribute if a.name == name)


OTHERS = {
    "without a normaliser": lambda n: setattr(
        attribute(n["LinearAttentiono"], "normalize"), "i", 0
    ),
    "both ways": lambda n: setattr(attribute(n["StabilizedExpq"], "causal"), "i", 0),
    "another map": lambda n: setattr(attribute(n["FeatureMapk"], "kind"), "s", b"exp"),
    "features": lambda n: setattr(attribute(n["FeatureMapq"], "log"), "i", 0),
    "a mask of one": lambda n: n["StabilizedExpq"].input.extend(["", "key_mask"]),
    "a decay": lambda n: n["StabilizedExpq"].input.extend(["", "", "g"]),
    "queries for keys": lambda n: n["LinearAttentiono"].input.__setitem__(1, "query_features"),
}


@pytest.mark.parametrize("edit", OTHERS.values(), ids=OTHERS)
def test_other_nodes_are_left(edit: Any) -> None:
    model = changed(four_nodes("favor+", ((2, 2), 8, 8, 12)), edit)
    assert with_programs(model) is model


def test_features_that_are_read_elsewhere_are_left() -> None:
    model = four_nodes("favor+", ((2, 2), 8, 8, 12))
    model.graph.output.append(helper.make_tensor_value_info("key_features", 1, None))
    assert with_programs(model) is model


def test_wrong_shapes_are_refused() -> None:
    sizes = (4, 2), 3, 5, 6
    optional = {"past", "mask"}
    model = fused(four_nodes("favor+", sizes, optional))
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_param = f"{value.name}_{id(dim)}"
    x, opened = draw(sizes, 6, optional, 1, 5, 1.0), session(model)
    opened.run(None, x)
    for name, array in x.items():
        for axis in range(1, array.ndim):
            longer = np.concatenate([array, array[(slice(None),) * axis + (slice(1),)]], axis)
            with pytest.raises(Exception, match=OP):
                opened.run(None, {**x, name: longer})


def test_unknown_maps_are_refused() -> None:
    model = fused(four_nodes("favor+", ((2, 2), 3, 5, 6)))
    attribute(next(n for n in model.graph.node if n.domain), "feature_map").s = b"other"
    with pytest.raises(Exception, match="unknown feature map other"):
        session(model)
