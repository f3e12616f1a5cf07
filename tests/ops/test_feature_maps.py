"""Every feature map there is, against the contract of ``linexport.models.feature_maps.base``.

A map added to the folder is tested here without a line added to this file.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from linexport.errors import OpError, UsageError
from linexport.models.feature_maps import FeatureMap, base, find_map, kinds, make
from linexport.plugins.ops import feature_map as op
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.registry import attach_functions
from tests.support import runtimes
from tests.support.layouts import ELEMENT, one_op_model

pytestmark = pytest.mark.filterwarnings("ignore:Feature map")

KINDS = kinds()
EXACT = [kind for kind in KINDS if find_map(kind).exactness == base.EXACT]
SCALAR = [kind for kind in KINDS if find_map(kind).kappa_onnx is not None]
RANDOM = [kind for kind in KINDS if "seed" in {f.name for f in fields(find_map(kind).Options)}]
WIDTH = 4
SIDES = ("query", "key")


def small(kind: str, width: int = WIDTH, **options: Any) -> FeatureMap:
    """A map with few features, where it has a choice."""
    known = {f.name for f in fields(find_map(kind).Options)}
    return make(kind, width, {"features": 12, **options} if "features" in known else options)


def rows(count: int, scale: float = 1.0, seed: int = 0, width: int = WIDTH) -> np.ndarray:
    """Random vectors of the width all maps are tried at."""
    return np.random.default_rng(seed).normal(size=(count, width)) * scale


def apply(module: FeatureMap, x: np.ndarray, side: str = "query") -> np.ndarray:
    """phi of float64 rows."""
    phi = module.phi if side == "query" else module.phi_key
    return phi(torch.from_numpy(x), *module.double().frozen()).detach().numpy()


def variants(kind: str) -> list[dict[str, Any]]:
    """Options under which an exact map is another map."""
    return [{}, {"c": 0.5}, {"c": 3.0}] if kind == "quadratic" else [{}]


@pytest.mark.smoke
@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("width", [1, 2, 8, 33])
def test_inner_products_are_the_kernel(kind: str, scale: float, width: int) -> None:
    q, k = rows(40, scale, 0, width), rows(40, scale, 1, width)
    for options in variants(kind):
        module = make(kind, width, options).double()
        phi_q, phi_k = apply(module, q), apply(module, k, "key")
        want = module.kernel_value(q, k)
        assert want.shape == (40,)
        assert module.theoretical_error(q, k) is None
        terms = np.abs(phi_q * phi_k).sum(-1)
        assert (np.abs((phi_q * phi_k).sum(-1) - want) <= 1e-12 * terms).all()


@pytest.mark.parametrize("kind", KINDS)
def test_declared_properties(kind: str) -> None:
    cls = find_map(kind)
    module = small(kind)
    assert cls.kind == kind
    for text in (cls.kernel, cls.error, cls.regime, cls.failure):
        assert text
    assert cls.exactness in (base.EXACT, base.UNBIASED, base.FITTED)
    x = np.concatenate([rows(200, 2.0), np.zeros((1, WIDTH)), np.full((1, WIDTH), -3.0)])
    both = [apply(module, x, side) for side in SIDES]
    for phi in both:
        assert phi.shape == (202, module.features)
        assert np.isfinite(phi).all()
    if cls.positive:
        assert min(phi.min() for phi in both) >= 0
    else:
        assert min(phi.min() for phi in both) < 0, "a map never negative may as well say so"
    if cls.kernel_positive:
        assert (both[0] @ both[1].T).min() >= -1e-9
    if cls.elementwise:
        assert module.features == WIDTH
        single = apply(cls(1), x[:, :1])
        np.testing.assert_allclose(single, both[0][:, :1], rtol=1e-14)
    if module.theoretical_error(x, x) is not None:
        assert cls.error != "0"
        assert (module.theoretical_error(x, x) >= 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str) -> None:
    module = small(kind).double()
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for phi in (module.phi, module.phi_key):
        given = x.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda t, phi=phi: phi(t, *module.frozen()), [given])


def one_map_model(
    module: FeatureMap, heads: int, kind: int, opset: int = 18, **attributes: Any
) -> onnx.ModelProto:
    """The FeatureMap op on packed heads, dynamic batch and length, its parameters initializers."""
    frozen = [p.detach().numpy() for p in module.frozen()]
    names = [f"frozen_{i}" for i in range(len(frozen))]
    settings = {"kind": module.kind, "num_heads": heads, **attributes}
    nodes = [
        helper.make_node("Cast", ["x"], ["x_cast"], to=kind),
        helper.make_node("FeatureMap", ["x_cast", *names], ["z"], domain="linexport", **settings),
        helper.make_node("Cast", ["z"], ["y"], to=TensorProto.FLOAT),
    ]
    wide, shape = TensorProto.FLOAT, ("B", "T", heads * module.head_dim)
    model = one_op_model(
        nodes,
        [helper.make_tensor_value_info("x", wide, shape)],
        [helper.make_tensor_value_info("y", wide, ("B", "T", heads * module.features))],
        [helper.make_tensor_value_info("x_cast", kind, shape)],
    )
    model.opset_import[0].version = opset
    model.graph.initializer.extend(
        numpy_helper.from_array(a, n) for n, a in zip(names, frozen, strict=True)
    )
    attach_functions(model)
    onnx.checker.check_model(model, full_check=True)
    return model


def forms(kind: str) -> list[dict[str, Any]]:
    """Attributes of all the formulas a kind has."""
    logs = (0, 1) if find_map(kind).exponential else (0,)
    return [{"side": side, "log": log} for side, log in product(SIDES, logs)]


@pytest.mark.smoke
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_onnx_body_equals_pytorch(kind: str, heads: int) -> None:
    for options, form in product(variants(kind), forms(kind)):
        module = small(kind, **options)
        exact = small(kind, **options).double()
        model = one_map_model(module, heads, TensorProto.FLOAT, **form)
        for runtime in (runtimes.on_onnxruntime, runtimes.on_reference):
            run = runtime(model)
            for batch, length, scale in ((2, 5, 1.0), (1, 1, 2.0), (1, 0, 1.0), (3, 2, 0.0)):
                x = rows(batch * length * heads, scale).reshape(batch, length, heads * WIDTH)
                x = x.astype(np.float32)
                (got,) = run({"x": x})
                wide = torch.from_numpy(x.astype(np.float64))
                want = exact(wide, heads, form["side"], bool(form["log"])).numpy()
                assert got.shape == want.shape == (batch, length, heads * module.features)
                rounding = 3e-6 * np.abs(want).max(initial=0)
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 + rounding)
                twin = module(torch.from_numpy(x), heads, form["side"], bool(form["log"]))
                np.testing.assert_allclose(twin, want, rtol=1e-5, atol=1e-6 + rounding)


def test_softplus_keeps_its_digits() -> None:
    """Where exp(x) is far below 1, too: log(1 + exp(x)) as it stands is 0 for x < -17."""
    model = one_map_model(make("softplus", 1), 1, TensorProto.FLOAT)
    x = np.linspace(-80, 80, 20_001, dtype=np.float32).reshape(1, -1, 1)
    want = np.logaddexp(0, x.astype(np.float64))
    for runtime in (runtimes.on_onnxruntime, runtimes.on_reference):
        (got,) = runtime(model)({"x": x})
        np.testing.assert_allclose(got, want, rtol=2.0**-21)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_do_not_mix(kind: str) -> None:
    module = small(kind)
    x = torch.from_numpy(rows(2 * 5 * 3).reshape(2, 5, 3 * WIDTH)).float()
    for side in SIDES:
        whole = module(x, 3, side).unflatten(-1, (3, module.features))
        for head in range(3):
            alone = module(x[..., head * WIDTH : (head + 1) * WIDTH], 1, side)
            torch.testing.assert_close(whole[:, :, head], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("opset", [18, 20, 23])
@pytest.mark.parametrize("kind", KINDS)
def test_bodies_mean_the_same_at_every_opset(kind: str, opset: int) -> None:
    x = rows(12).reshape(2, 3, 2 * WIDTH).astype(np.float32)
    module = small(kind)
    for form in forms(kind):
        (want,) = runtimes.on_onnxruntime(one_map_model(module, 2, 1, 19, **form))({"x": x})
        model = one_map_model(module, 2, 1, opset, **form)
        assert {n.domain for f in model.functions for n in f.node} == {""}
        (got,) = runtimes.on_onnxruntime(model)({"x": x})
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("runtime", ["on_onnxruntime", "on_reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind: str, runtime: str, dtype: str) -> None:
    """Inputs and features are rounded; exponents of half-precision inputs are not."""
    narrow, element = ELEMENT[dtype]
    rounding = 2.0**-11 if dtype == "float16" else 2.0**-8
    x = rows(20, 0.5).reshape(2, 5, 2 * WIDTH).astype(narrow).astype(np.float32)
    for form in forms(kind):
        module = small(kind)
        model = one_map_model(module, 2, element, **form)
        try:
            run = getattr(runtimes, runtime)(model)
        except Exception as error:
            if dtype == "bfloat16" and "NOT_IMPLEMENTED" in str(error):
                pytest.skip(f"ONNX Runtime CPU lacks a bfloat16 kernel: {str(error)[-60:]}")
            raise
        (got,) = run({"x": x})
        want = module(torch.from_numpy(x), 2, form["side"], bool(form["log"])).detach().numpy()
        eps = 1e-6 if form["log"] else rounding
        np.testing.assert_allclose(got, want, rtol=8 * eps, atol=4 * eps * np.abs(want).max())


@pytest.mark.parametrize("kind", SCALAR)
def test_kappa_is_the_kernel_of_the_inner_product(kind: str) -> None:
    """So that scores inside a chunk need no features."""
    for options in variants(kind):
        module = small(kind, **options)
        b = Body()
        frozen = [p.numpy() for p in module.frozen()]
        parameters = [op.Parameter(f"p{i}", a.shape) for i, a in enumerate(frozen)]
        value = op.formulas(kind).kappa(b, "t", WIDTH, *parameters)
        b.nodes.append(helper.make_node("Identity", [value], ["y"]))
        infos = [helper.make_tensor_value_info(n, 1, None) for n in ("t", "y")]
        model = one_op_model(b.nodes, infos[:1], infos[1:])
        model.graph.initializer.extend(
            numpy_helper.from_array(a, p.name) for a, p in zip(frozen, parameters, strict=True)
        )
        q, k = rows(30), rows(30, seed=1)
        (got,) = runtimes.on_onnxruntime(model)({"t": (q * k).sum(-1).reshape(2, 15)})
        want = module.kernel_value(q, k).reshape(2, 15)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_polynomial_maps_have_kappa() -> None:
    assert {"identity", "taylor2", "quadratic"} <= set(SCALAR)


# Draws -------------------------------------------------------------------------------------------

DIGESTS = {
    ("favor+", 16): "d15dc16fd099197b91a2a8098dabdebc6c0e1e8ee058d1707c899b41083f4975",
    ("favor+*gaussian", 16): "875ee3f7c070f4b935ca9aac79126e1a3c174e9d2735c7648e0762013b192a77",
    ("favor+*laplace", 16): "b941658bc703519b04a479fe7b04a6e42e359ec65003013c4aaad9ef98cb5aed",
    ("favor+*local", 3): "765acdb70b3c968fcacc39a73dec294441b9929bf4543900fc1f74b02f517155",
    ("favor+flat", 16): "59ae853b71109cba7b43188e48e040cb64a50c0294ae6e6456e6762005bd7753",
    ("favor+hyperbolic", 16): "d67c1971b23110645318bca05a8408c5208240c8c079f559660e94fd56a11c75",
    ("gaussian", 16): "be924c6aada4b9119064fa0eaa1f56d00c27632ffc3ebfe6b75ab3c496a69906",
    ("laplace", 16): "94b5e38ec9a1748710fc25784b4cd00d7633aeb6ea7f7f774a7bf94dbf1d8541",
    ("local", 3): "6a8872846129883f162fb7a50855564522a329a7e1361d4869f6b606c91c8265",
    ("pseudo_keys", 16): "53063d2ec3cc4c4f99f61de2ac9316a15e101e5d40e24df03529a7a13620d840",
    ("random_monomials", 16): "0b2be1edd3d557625062b75ab79647e25f0eb251e7b79392bc44da789d76a51b",
    ("rfa", 16): "d67c1971b23110645318bca05a8408c5208240c8c079f559660e94fd56a11c75",
    ("tensor_sketch", 16): "34908c72fbd1d4fd4478e02a4fa9a3c96ecad7cf9dd93074bfcaaff244e48b51",
    ("trigonometric", 16): "d67c1971b23110645318bca05a8408c5208240c8c079f559660e94fd56a11c75",
}


def digest(module: FeatureMap) -> str:
    """Of the bytes of all frozen tensors."""
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in module.frozen())).hexdigest()


def test_every_random_map_has_a_digest() -> None:
    assert sorted(kind for kind, _ in DIGESTS) == RANDOM


@pytest.mark.parametrize(("kind", "width"), DIGESTS)
def test_the_same_seed_gives_the_same_bytes(kind: str, width: int) -> None:
    """On any machine: these were taken on one."""
    assert digest(make(kind, width, {"features": 48, "seed": 7})) == DIGESTS[kind, width]


@pytest.mark.parametrize("kind", RANDOM)
def test_draws_depend_on_the_seed_alone(kind: str) -> None:
    torch.manual_seed(1)
    first = small(kind, seed=3)
    torch.manual_seed(2)
    np.random.seed(2)
    state = torch.random.get_rng_state()
    assert digest(small(kind, seed=3)) == digest(first)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert digest(small(kind, seed=4)) != digest(first)
    saved = first.state_dict()
    assert saved, "frozen draws belong in the checkpoint"
    other = small(kind, seed=4)
    other.load_state_dict(saved)
    assert digest(other) == digest(first)


@pytest.mark.parametrize("kind", RANDOM)
def test_draws_stay_in_single_precision(kind: str) -> None:
    module = small(kind)
    before = digest(module)
    for convert in (torch.Tensor.half, torch.Tensor.bfloat16):
        assert digest(module._apply(convert)) == before
    assert digest(module.to(torch.float16)) == before
    assert digest(module.double().float()) == before
    broken = [t.half() for t in module.frozen() if t.is_floating_point()]
    if broken:
        with pytest.raises(OpError, match=r"in torch\.float16; expected float32"):
            find_map(kind).apply_packed(torch.zeros(1, 1, WIDTH), broken, 1)


@pytest.mark.parametrize("kind", RANDOM)
def test_nothing_is_drawn_without_memory(kind: str) -> None:
    """A checkpoint's config may ask for more features than its weights hold."""
    with torch.device("meta"):
        module = small(kind)
    assert all(t.is_meta for t in module.frozen())
    assert [t.shape for t in module.frozen()] == [t.shape for t in small(kind).frozen()]


def test_orthogonal_blocks() -> None:
    """Columns are orthogonal within each block of d; norms are not all the same."""
    w = make("favor+", 16, {"features": 40}).frozen()[0].double().numpy()
    gram = w.T @ w
    for start in (0, 16, 32):
        block = gram[start : start + 16, start : start + 16]
        off = block - np.diag(np.diag(block))
        assert np.abs(off).max() < 1e-5
        assert np.ptp(np.diag(block)) > 1
    assert np.abs(gram[:16, 16:32]).max() > 1
    loose = make("favor+", 16, {"features": 40, "orthogonal": False}).frozen()[0]
    assert (loose.T @ loose)[0, 1:16].abs().max() > 1


# Names, options, errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "meant"), [("rleu", "relu"), ("elu+1", "elu1"), ("Identity", "identity")]
)
def test_unknown_name_suggests_the_nearest(wrong: str, meant: str) -> None:
    with pytest.raises(UsageError) as error:
        find_map(wrong)
    message = str(error.value)
    assert repr(wrong) in message
    assert f"Did you mean {meant!r}?" in message
    assert all(kind in message for kind in KINDS)


def test_nothing_near_suggests_nothing() -> None:
    with pytest.raises(UsageError) as error:
        find_map("zzzzzzzz")
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("favor+", {"features": 0}, ["'favor+'", "'features' is 0", "int >= 1"]),
        ("favor+", {"features": 2.5}, ["'features' is 2.5", "int"]),
        ("favor+", {"features": True}, ["'features' is True", "int"]),
        ("favor+", {"feature": 8}, ["unknown key 'feature'", "Did you mean 'features'"]),
        ("favor+", {"seed": -1}, ["'seed' is -1", ">= 0"]),
        ("favor+", {"orthogonal": 1}, ["'orthogonal' is 1", "bool"]),
        ("random_monomials", {"degree": 0}, ["'degree' is 0", "int >= 1"]),
        ("random_monomials", {"degree": -2}, ["'degree' is -2", "int >= 1"]),
        ("tensor_sketch", {"degree": 0}, ["'degree' is 0", "int >= 1"]),
        ("tensor_sketch", {"features": 33}, ["'features' is 33", "multiple of 2"]),
        ("trigonometric", {"features": 7}, ["'features' is 7", "multiple of 2"]),
        ("quadratic", {"c": -1.0}, ["'c' is -1.0", "float >= 0"]),
        ("quadratic", {"c": float("nan")}, ["'c' is nan", "float >= 0"]),
        ("relu", {"features": 8}, ["unknown key 'features'", "no options"]),
    ],
)
def test_options_are_checked(kind: str, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        make(kind, 8, options)
    assert [w for w in words if w not in str(error.value)] == []


@pytest.mark.parametrize("kind", ["taylor2", "quadratic"])
def test_heads_too_wide_for_memory(kind: str) -> None:
    with pytest.raises(UsageError) as error:
        make(kind, 1024)
    words = [f"{kind!r} at head_dim 1024", "2 GiB", "memory_limit_gib is 1"]
    assert [w for w in words if w not in str(error.value)] == []
    assert make(kind, 1024, {"memory_limit_gib": 3.0}).features > 500_000


def test_maps_and_formulas_are_the_same_set() -> None:
    assert sorted(KINDS) == KINDS
    assert {"elu1", "identity", "relu"} <= set(KINDS)
    assert set(KINDS) <= set(op._formulas)


def test_a_kind_belongs_to_one_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second definition elsewhere raises and leaves the first in place."""
    monkeypatch.setitem(base.MAPS, "relu", base.MAPS["relu"])
    monkeypatch.setattr(op, "_formulas", dict(op._formulas))
    first = find_map("relu")
    with pytest.raises(UsageError, match="Again defines a feature map 'relu', and so does"):
        type("Again", (first,), {"kind": "relu", "__module__": __name__})
    assert find_map("relu") is first
    assert op.formulas("relu").module == first.__module__
    with pytest.raises(ValueError, match="'relu' is defined twice"):
        op.register("relu", replace(op.formulas("relu"), module=__name__))
    # The module that defined it may do so again, as a reload does.
    op.register("relu", op.formulas("relu"))


def test_a_subclass_without_a_kind_registers_nothing() -> None:
    type("Steeper", (find_map("elu1"),), {})
    assert kinds() == KINDS


def test_only_exponentials_have_a_logarithm() -> None:
    with pytest.raises(OpError, match="no exponential"):
        small("relu")(torch.zeros(1, 1, WIDTH), 1, "key", True)
    with pytest.raises(OpError, match="side 'keys'; expected one of query, key"):
        small("relu")(torch.zeros(1, 1, WIDTH), 1, "keys")
