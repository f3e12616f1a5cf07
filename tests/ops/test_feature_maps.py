"""Every feature map there is, against the contract of ``linexport.models.feature_maps.base``.

A map added to the folder is tested here without a line added to this file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from linexport.errors import UsageError
from linexport.models.feature_maps import FeatureMap, base, find, kinds
from linexport.plugins.ops import feature_map as op
from linexport.plugins.ops.registry import attach_functions

KINDS = kinds()
WIDTH = 8

# One draw for every map with frozen random parameters.
torch.manual_seed(0)


def rows(count: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    """Random vectors of the width all maps are tried at."""
    return np.random.default_rng(seed).normal(size=(count, WIDTH)) * scale


def apply(module: FeatureMap, x: np.ndarray) -> np.ndarray:
    """phi of float64 rows."""
    return module.phi(torch.from_numpy(x), *(p.double() for p in module.frozen())).detach().numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
def test_inner_products_are_the_kernel(kind: str, scale: float) -> None:
    module = find(kind)(WIDTH).double()
    q, k = rows(40, scale), rows(40, scale, seed=1)
    phi_q, phi_k = apply(module, q), apply(module, k)
    want = module.kernel_value(q, k)
    assert want.shape == (40,)
    terms = np.abs(phi_q * phi_k).sum(-1)
    assert (np.abs((phi_q * phi_k).sum(-1) - want) <= 1e-12 * terms).all()


@pytest.mark.parametrize("kind", KINDS)
def test_declared_properties(kind: str) -> None:
    cls = find(kind)
    module = cls(WIDTH).double()
    assert cls.kind == kind
    assert cls.kernel
    x = np.concatenate([rows(200, 3.0), np.zeros((1, WIDTH)), np.full((1, WIDTH), -30.0)])
    phi = apply(module, x)
    assert phi.shape == (202, module.features)
    assert np.isfinite(phi).all()
    if cls.positive:
        assert (phi >= 0).all()
    else:
        assert (phi < 0).any(), "a map that is never negative may as well say so"
    if cls.elementwise:
        assert module.features == WIDTH
        single = apply(cls(1).double(), x[:, :1])
        np.testing.assert_array_equal(single, phi[:, :1])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str) -> None:
    module = find(kind)(4).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: module.phi(t, *module.frozen()), [x])


def one_map_model(ops: Any, module: FeatureMap, heads: int, kind: int) -> onnx.ModelProto:
    """The FeatureMap op on packed heads, dynamic batch and length, its parameters constants."""
    frozen = [p.detach().numpy().astype(np.float32) for p in module.frozen()]
    names = [f"frozen_{i}" for i in range(len(frozen))]
    constants = [helper.make_node("Cast", [n], [f"{n}_cast"], to=kind) for n in names]
    nodes = [
        helper.make_node("Cast", ["x"], ["x_cast"], to=kind),
        *constants,
        helper.make_node(
            "FeatureMap",
            ["x_cast", *(f"{n}_cast" for n in names)],
            ["y_cast"],
            domain="linexport",
            kind=module.kind,
            num_heads=heads,
        ),
        helper.make_node("Cast", ["y_cast"], ["y"], to=TensorProto.FLOAT),
    ]
    wide, shape = TensorProto.FLOAT, ("B", "T", heads * WIDTH)
    infos = [helper.make_tensor_value_info("x_cast", kind, shape)]
    infos += [
        helper.make_tensor_value_info(f"{n}_cast", kind, a.shape)
        for n, a in zip(names, frozen, strict=True)
    ]
    model = ops.one_op_model(
        nodes,
        [helper.make_tensor_value_info("x", wide, shape)],
        [helper.make_tensor_value_info("y", wide, ("B", "T", heads * module.features))],
        infos,
    )
    model.graph.initializer.extend(
        numpy_helper.from_array(a, n) for n, a in zip(names, frozen, strict=True)
    )
    attach_functions(model)
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_onnx_body_equals_pytorch(ops: Any, kind: str, heads: int) -> None:
    module = find(kind)(WIDTH)
    model = one_map_model(ops, module, heads, TensorProto.FLOAT)
    for runtime in (ops.on_onnxruntime, ops.on_reference):
        run = runtime(model)
        for batch, length, scale in ((2, 5, 1.0), (1, 1, 4.0), (1, 0, 1.0), (3, 2, 0.0)):
            x = rows(batch * length * heads, scale).reshape(batch, length, heads * WIDTH)
            x = x.astype(np.float32)
            (got,) = run({"x": x})
            want = module(torch.from_numpy(x), heads).detach().numpy()
            assert got.shape == want.shape == (batch, length, heads * module.features)
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
            # Heads do not mix: each one alone gives its own part.
            split = apply(module, x.astype(np.float64).reshape(-1, WIDTH))
            np.testing.assert_allclose(got.reshape(split.shape), split, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("runtime", ["on_onnxruntime", "on_reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(ops: Any, kind: str, runtime: str, dtype: str) -> None:
    module = find(kind)(WIDTH)
    narrow, element = ops.element[dtype]
    model = one_map_model(ops, module, 2, element)
    try:
        run = getattr(ops, runtime)(model)
    except Exception as error:
        if dtype == "bfloat16" and "NOT_IMPLEMENTED" in str(error):
            pytest.skip(f"ONNX Runtime CPU lacks a bfloat16 kernel: {str(error)[-60:]}")
        raise
    x = rows(20).reshape(2, 5, 2 * WIDTH).astype(narrow).astype(np.float32)
    (got,) = run({"x": x})
    want = module(torch.from_numpy(x), 2).detach().numpy()
    rounding = 2.0**-11 if dtype == "float16" else 2.0**-8
    scale = np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=8 * rounding, atol=4 * rounding * scale)


@pytest.mark.parametrize(
    ("wrong", "meant"), [("rleu", "relu"), ("elu+1", "elu1"), ("Identity", "identity")]
)
def test_unknown_name_suggests_the_nearest(wrong: str, meant: str) -> None:
    with pytest.raises(UsageError) as error:
        find(wrong)
    message = str(error.value)
    assert repr(wrong) in message
    assert f"Did you mean {meant!r}?" in message
    assert all(kind in message for kind in KINDS)


def test_nothing_near_suggests_nothing() -> None:
    with pytest.raises(UsageError) as error:
        find("zzzzzzzz")
    assert "Did you mean" not in str(error.value)


def test_maps_and_formulas_are_the_same_set() -> None:
    assert sorted(KINDS) == KINDS
    assert {"elu1", "identity", "relu"} <= set(KINDS)
    assert set(KINDS) <= set(op._formulas)


def test_a_kind_belongs_to_one_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second definition elsewhere raises and leaves the first in place."""
    monkeypatch.setattr(base, "_maps", dict(base._maps))
    monkeypatch.setattr(op, "_formulas", dict(op._formulas))
    first = find("relu")

    with pytest.raises(ValueError, match="'relu' is defined twice"):
        type("Again", (first,), {"kind": "relu", "__module__": __name__})
    assert find("relu") is first
    assert op.formulas("relu").module == first.__module__
    with pytest.raises(ValueError, match="'relu' is defined twice"):
        op.register("relu", replace(op.formulas("relu"), module=__name__))
    # The module that defined it may do so again, as a reload does.
    op.register("relu", op.formulas("relu"))


def test_a_subclass_without_a_kind_registers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_maps", dict(base._maps))
    type("Steeper", (find("elu1"),), {})
    assert kinds() == KINDS
