"""Models of others, from PyPI: what must be fused is, what must not is not, and all are equal."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import linexport
from linexport import passes
from linexport.plugins.ops.registry import attach_functions
from linexport.sources import load_model
from linexport.system.torch_internals.trees import pytree
from linexport.trace import trace

pytestmark = pytest.mark.usefixtures("one_thread")

PACKAGES = {
    "efficientvit": "timm",
    "mobilevitv2": "timm",
    "swiftformer": "timm",
    "sana_attention": "diffusers",
    "sana_transformer": "diffusers",
    "dcae_linear": "diffusers",
    "dcae_quadratic": "diffusers",
    "loftr_attention": "kornia",
    "loftr_transformer": "kornia",
    "performer": "performer_pytorch",
    "linear_transformer": "linear_attention_transformer",
}


@pytest.fixture
def source() -> Callable[[str], str]:
    def find(name: str) -> str:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            pytest.skip(f"{PACKAGES[name]} is not installed (pip install '.[zoo]')")
        return f"zoo:{name}"

    return find


@pytest.mark.parametrize(
    ("name", "attentions"),
    [
        ("sana_attention", 1),
        ("loftr_attention", 1),
        ("performer", 1),
        ("linear_transformer", 2),
    ],
)
def test_attention_is_fused_and_equal(
    source: Callable[[str], str], name: str, attentions: int
) -> None:
    loaded = load_model(source(name))
    rewritten = passes.rewrite(trace(loaded).model)
    assert len(rewritten.findings.matches) >= attentions
    assert not any(match.causal for match in rewritten.findings.matches)
    attach_functions(rewritten.model)
    session = onnxruntime.InferenceSession(rewritten.model.SerializeToString())
    for seed, length in enumerate((1, 37, 150)):
        torch.manual_seed(seed)
        args = [
            torch.rand(3, length) < 0.7 if x.dtype == torch.bool else torch.randn(3, length, 32)
            for x in loaded.args
        ]
        with torch.no_grad():
            expected = loaded.module(*args).numpy()
        names = [i.name for i in session.get_inputs()]
        (got,) = session.run(None, {n: x.numpy() for n, x in zip(names, args, strict=True)})
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attentions"),
    [
        ("efficientvit", 4),
        ("sana_attention", 1),
        ("sana_transformer", 2),
        ("dcae_linear", 1),
        ("dcae_quadratic", 1),
        ("loftr_attention", 1),
        ("loftr_transformer", 4),
        ("performer", 1),
        ("linear_transformer", 2),
        ("mobilevitv2", 0),
        ("swiftformer", 0),
    ],
)
def test_models_convert(
    source: Callable[[str], str], tmp_path: Path, name: str, attentions: int
) -> None:
    manifest = linexport.convert(source(name), tmp_path / "artifact", bench=False, threads=1)
    assert manifest.status == "ok"
    fused = manifest.fused.get("LinearAttention", 0)
    assert fused >= attentions if attentions else manifest.fused == {}


@pytest.mark.parametrize("name", ["mobilevitv2", "swiftformer"])
@pytest.mark.slow
def test_what_is_no_linear_attention_is_left_as_it_was(
    source: Callable[[str], str], name: str
) -> None:
    traced = trace(load_model(source(name))).model
    before, after = passes.run(traced, passes.STATELESS[:1]), passes.run(traced)
    assert Counter(n.op_type for n in before.graph.node) == Counter(
        n.op_type for n in after.graph.node
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dcae_linear", "dcae_quadratic", "sana_attention"])
def test_denominators_of_zero_give_no_nan(
    source: Callable[[str], str], tmp_path: Path, name: str
) -> None:
    """Queries and keys that ReLU removes leave only the epsilon; exporters drop it."""
    linexport.convert(source(name), tmp_path / "artifact", bench=False, threads=1)
    artifact = linexport.load(tmp_path / "artifact", threads=1)
    loaded = load_model(source(name))
    zeros = [np.zeros_like(x.numpy()) for x in pytree.tree_leaves(loaded.args)]
    (got,) = artifact.run(*zeros).values()
    assert np.isfinite(got).all()
    with torch.no_grad():
        expected = loaded.module(*map(torch.from_numpy, zeros)).numpy()
    np.testing.assert_allclose(got, expected, atol=1e-5)
