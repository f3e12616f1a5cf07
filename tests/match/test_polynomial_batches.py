"""Polynomials of the scores, exported as ``convert`` does, on many fresh batches.

Where the original in float32 is within 2e-5 of float64, the artifact is within 5e-5: whatever keys
happen to come first, and however small their weights are beside |q|^n |k|^n.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from linexport import targets, trace
from linexport.sources.loaded_model import LoadedModel, Source
from linexport.timing import export as timing

HEADS, TOKENS, BATCHES = 2, 48, 60
GOOD, ALLOWED = 2e-5, 5e-5

Kernel = Callable[[Tensor], Tensor]
KERNELS: dict[str, tuple[Kernel, bool]] = {
    "(q.k)^2": (lambda t: t**2, False),
    "(q.k + 1)^2": (lambda t: (t + 1) ** 2, False),
    "(q.k)^3 of relu": (lambda t: t**3, True),
    "(q.k)^4": (lambda t: t**4, False),
    "(q.k + 1)^4": (lambda t: (t + 1) ** 4, False),
}
"""A polynomial, and whether its scores are made positive first.

Not (q.k)^3 itself: its sums change sign, it is left as it is, and a quotient near a zero of its
denominator has other digits in every order of summation.
"""


class Polynomial(nn.Module):
    """Weights that are a polynomial of the scores over their sum."""

    def __init__(self, kernel: Kernel, positive: bool, causal: bool) -> None:
        super().__init__()
        self.kernel, self.positive, self.causal = kernel, positive, causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, T, H, d) each."""
        if self.positive:
            q, k = q.relu(), k.relu()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        weights = self.kernel(q @ k.mT)
        if self.causal:
            weights = weights * torch.ones(q.shape[2], q.shape[2]).tril()
        return (weights @ v / weights.sum(-1, keepdim=True)).transpose(1, 2)


def drawn(seed: int, d: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, TOKENS, HEADS, d, generator=generator) for _ in range(3))


CASES = [
    pytest.param(name, masked, d, marks=pytest.mark.slow)
    for name, masked, d in itertools.product(KERNELS, (True, False), (8, 16, 32))
]


@pytest.mark.parametrize(("name", "masked", "d"), CASES)
def test_an_artifact_is_as_good_as_the_original(
    name: str, masked: bool, d: int, tmp_path: Path
) -> None:
    module = Polynomial(*KERNELS[name], masked).eval()
    loaded = LoadedModel(
        module=module,
        args=drawn(1, d),
        kwargs={},
        dynamic_shapes=({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},) * 3,
        source=Source("factory", "tests", None, name),
    )
    path = timing.export(trace.trace(loaded), tmp_path / "layer")
    session = targets.find_target(timing.TARGET).open(path)
    compared = 0
    for seed in range(100, 100 + BATCHES):
        given = drawn(seed, d)
        with torch.no_grad():
            want = module(*(x.double() for x in given)).numpy()
            original = module(*given).numpy()
        (got,) = session.run({n: x.numpy() for n, x in zip("qkv", given, strict=True)}).values()
        good = np.abs(original - want) <= GOOD
        compared += int(good.sum())
        assert np.abs(got - want)[good].max(initial=0.0) <= ALLOWED
    assert compared > 0.5 * BATCHES * want.size, "the check would see nothing"
