"""Bandwidths of the Gaussian kernel: given, fitted, one a head; and names by frequencies."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from linexport.errors import UsageError
from linexport.maps import cost
from linexport.maps.accuracy import judge, reference
from linexport.maps.attention_samples import random_samples
from linexport.models import feature_maps
from linexport.models.feature_maps.fourier import is_cauchy
from linexport.models.feature_maps.gaussian import Gaussian
from linexport.models.linear_attention_layer import (
    LinearAttentionLayer,
    LinearAttentionLayerConfig,
)
from linexport.models.mapped_attention import check_map
from linexport.plugins.ops.linear_attention.spec import LinearAttentionSpec
from linexport.targets.base import OrtSession


def made(kind: str = "gaussian", width: int = 8, **options: object) -> Gaussian:
    found = feature_maps.make(kind, width, {"features": 64, **options})
    assert isinstance(found, Gaussian)
    return found


def test_a_bandwidth_is_that_of_the_kernel() -> None:
    q, k = np.random.default_rng(0).normal(size=(2, 20, 8))
    for sigma in (0.5, 3.0):
        want = np.exp(-((q - k) ** 2).sum(-1) / (2 * sigma**2))
        np.testing.assert_allclose(made(bandwidth=sigma).kernel_value(q, k), want, rtol=1e-5)
    unset = np.exp(-((q - k) ** 2).sum(-1) / 16)
    np.testing.assert_allclose(made().kernel_value(q, k), unset, rtol=1e-6)


def test_rfa_is_softmax_of_unit_vectors() -> None:
    q, k = np.random.default_rng(0).normal(size=(2, 20, 8))
    unit_q, unit_k = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, k))
    want = np.exp((unit_q * unit_k).sum(-1) / 0.49) / math.exp(1 / 0.49)
    np.testing.assert_allclose(made("rfa", bandwidth=0.7).kernel_value(q, k), want, rtol=1e-5)


@pytest.mark.parametrize(("scale", "features"), [(0.2, 256), (1.0, 256), (1.0, 4)])
def test_a_fit_is_nearer_to_softmax_than_any_other_bandwidth_tried(
    scale: float, features: int
) -> None:
    """In the least mean square error of factor * kernel, estimate's own error included.

    That of few features is the larger part.
    """
    q, k, other_q, other_k = scale * np.random.default_rng(1).normal(size=(4, 4000, 8))

    def error(module: Gaussian) -> float:
        wanted = np.exp((q * k).sum(-1) / math.sqrt(8))
        kernel, noise = module.kernel_value(q, k), module.theoretical_error(q, k)
        power = (kernel**2 + noise).mean()
        return float(1 - (wanted * kernel).mean() ** 2 / power / (wanted**2).mean())

    fitted = made(features=features)
    fitted.fit(other_q, other_k)
    sigma = 1 / float(fitted.inverse_bandwidth)
    best = error(fitted)
    for factor in (0.5, 0.7, 1.5, 2.0):
        assert best < error(made(features=features, bandwidth=sigma * factor)) + 2e-3
    assert best < error(made(features=features, bandwidth=sigma / 4))


def test_a_fit_changes_features_as_it_changes_the_kernel() -> None:
    x = torch.from_numpy(np.random.default_rng(2).normal(size=(2, 3, 8)))
    fitted = made()
    fitted.fit(*np.random.default_rng(3).normal(size=(2, 500, 8)))
    again = made(bandwidth=1 / float(fitted.inverse_bandwidth))
    for module in (fitted, again):
        module.double()
    torch.testing.assert_close(
        fitted.phi(x, *fitted.frozen()), again.phi(x, *again.frozen()), rtol=1e-5, atol=1e-6
    )


def test_every_head_gets_the_bandwidth_that_it_would_alone() -> None:
    q, k = np.random.default_rng(4).normal(size=(2, 2, 3000, 8))
    q[1], k[1] = q[1] * 2, k[1] * 2
    together = made(heads=2)
    together.fit(q, k)
    found = together.inverse_bandwidth[:, 0]
    assert found[0] > 1.5 * found[1]
    for head in range(2):
        alone = made()
        alone.fit(q[head], k[head])
        assert float(alone.inverse_bandwidth) == pytest.approx(float(found[head]), rel=0.25)


def test_a_layer_with_a_bandwidth_for_each_head_exports(tmp_path: Path) -> None:
    config = LinearAttentionLayerConfig(
        num_heads=2,
        head_dim=4,
        feature_map="gaussian",
        feature_map_options={"features": 64, "heads": 2, "bandwidth": 2.0},
        causal=True,
    )
    torch.manual_seed(0)
    path = cost.export(config, tmp_path / "layer")
    layer = LinearAttentionLayer(config)
    fed = cost.inputs(config, 50)
    names = ("query", "key", "value")
    (got,) = OrtSession(path).run(fed).values()
    want = layer.double()(*(torch.from_numpy(fed[n]).double() for n in names)).numpy()
    np.testing.assert_allclose(got, want, atol=2e-4)


def test_heads_of_other_bandwidths_have_kernels_of_their_own() -> None:
    module = made(heads=2, features=20_000, orthogonal=False)
    module.inverse_bandwidth.copy_(torch.tensor([[0.3], [1.1]]))
    q, k = 0.5 * np.random.default_rng(5).normal(size=(2, 6, 2, 8))
    parts = [torch.from_numpy(x).flatten(1)[None] for x in (q, k)]
    phi_q, phi_k = (module.double()(x, 2).unflatten(-1, (2, -1))[0] for x in parts)
    got = (phi_q * phi_k).sum(-1).numpy()
    want, error = module.kernel_value(q, k), module.theoretical_error(q, k)
    assert want.shape == error.shape == (6, 2)
    assert (np.abs(got - want) < 6 * np.sqrt(error) + 1e-9).all()
    assert (want[:, 0] > want[:, 1]).all()


def test_a_fitted_map_attends_better_than_all_keys_alike() -> None:
    """Compared as ``maps compare`` does, which fits every map that can be."""
    samples = random_samples(16, 192, 0)
    against = reference(samples)
    found = made(width=16, features=512)
    found.fit(samples.fit_queries, samples.fit_keys)
    error = judge([found], against).output_error
    assert error is not None and error < against.uniform_error


@pytest.mark.parametrize("wrong", [np.ones((3, 7)), np.ones((0, 8)), np.full((3, 8), np.nan)])
def test_samples_that_do_not_fit_are_refused(wrong: np.ndarray) -> None:
    good = np.ones((3, 8))
    for name, given in (("queries", (wrong, good)), ("keys", (good, wrong))):
        with pytest.raises(UsageError, match=rf"{name} has shape .*; expected \(n, 8\) or \(1, n"):
            made().fit(*given)


@pytest.mark.parametrize("kind", ["gaussian", "rfa"])
def test_given_bandwidths_of_each_head_are_theirs_and_a_fit_leaves_them(kind: str) -> None:
    given = [0.4, 1.3]
    both = made(kind, bandwidth=given)
    width = both.head_dim
    x = torch.randn(3, 5, 2 * width, generator=torch.Generator().manual_seed(0))
    found = both(x, 2).unflatten(-1, (2, -1))
    for head, sigma in enumerate(given):
        alone = made(kind, bandwidth=sigma)
        want = alone(x.unflatten(-1, (2, width))[..., head, :].contiguous(), 1)
        torch.testing.assert_close(found[..., head, :], want, atol=1e-5, rtol=1e-4)
    samples = np.random.default_rng(0).standard_normal((2, 50, width))
    for module in (both, made(kind, bandwidth=0.4)):
        before = [t.clone() for t in module.frozen()]
        module.fit(*(samples if module.heads is None else (samples, samples)))
        assert all(torch.equal(a, b) for a, b in zip(before, module.frozen(), strict=True))


def test_bandwidths_that_do_not_fit_are_refused() -> None:
    for given, more in (([0.4, -1.0], {}), ([0.4, 1.0], {"heads": 3}), ([], {}), (["a"], {})):
        with pytest.raises(
            UsageError, match=r"expected a number from 1e-06 to 1e.06 for each head"
        ):
            made(bandwidth=given, **more)
    spec = LinearAttentionSpec(q_num_heads=4, kv_num_heads=4, causal=True, normalize=True)
    with pytest.raises(UsageError, match="is made for 2 heads; the attention has 4"):
        check_map(made(bandwidth=[0.4, 1.0]), spec)


def test_equal_queries_and_keys_leave_the_bandwidth() -> None:
    same = made()
    same.fit(np.ones((5, 8)), np.ones((5, 8)))
    assert 1 / float(same.inverse_bandwidth) == pytest.approx(math.sqrt(8), rel=1e-6)


@pytest.mark.parametrize("size", [32, 256])
def test_frequencies_are_told_apart(size: int) -> None:
    """Few of 200 draws of so many numbers are taken for the other kind; none of many."""
    wrong = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        scale = 10 ** random.uniform(-2, 2)
        wrong += is_cauchy(scale * random.standard_normal(size))
        wrong += not is_cauchy(scale * random.standard_cauchy(size))
    assert wrong <= (20 if size == 32 else 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not is_cauchy(np.zeros(4))
