"""A feature map is taken for a known one only where it equals it on all of float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from linexport import passes
from linexport.match.forms import exact, functions
from linexport.plugins.ops.registry import attach_functions
from linexport.targets.base import OrtSession
from linexport.trace.graph import to_onnx

Map = Callable[[Tensor], Tensor]
HEADS, D = 2, 8


class Attention(nn.Module):
    """Causal normalised attention with a map of the user's, by cumulative sums."""

    def __init__(self, phi: Map) -> None:
        super().__init__()
        self.phi = phi

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, T, H, d) each."""
        q, k = self.phi(q), self.phi(k)
        state = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1)
        numerator = (q.unsqueeze(-2) @ state).squeeze(-2)
        return numerator / (q * k.cumsum(1)).sum(-1, keepdim=True)


def rewritten(phi: Map) -> tuple[nn.Module, passes.Rewritten]:
    module = Attention(phi).eval()
    example = tuple(torch.randn(2, 16, HEADS, D) for _ in range(3))
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},) * 3
    program = torch.export.export(module, example, dynamic_shapes=dynamic, strict=False)
    return module, passes.rewrite(to_onnx(program, {}), ("canonicalise", "fuse"))


def worst(module: nn.Module, model: onnx.ModelProto, magnitude: float, shift: float) -> float:
    """The largest difference from the original in float64, relative to its largest value."""
    attached = onnx.ModelProto()
    attached.CopyFrom(model)
    attach_functions(attached)
    drawn = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 9, HEADS, D, generator=drawn) for _ in range(3))
    q, k = (magnitude * x + shift for x in (q, k))
    with torch.no_grad():
        expected = module(q.double(), k.double(), v.double()).numpy()
    names = [i.name for i in model.graph.input]
    fed = dict(zip(names, (x.numpy() for x in (q, k, v)), strict=True))
    (got,) = OrtSession(attached.SerializeToString()).run(fed).values()
    assert np.isfinite(expected).all()
    return float(np.abs(got - expected).max() / np.abs(expected).max())


BOUNDED: dict[str, tuple[Map, float, float]] = {
    "relu below 1e4": (lambda x: F.relu(x).clamp(max=1e4), 1e6, 1e6),
    "relu below 65504": (lambda x: F.relu(x).clamp(max=65504), 1e6, 1e6),
    "relu, and 3 below -100": (lambda x: torch.where(x < -100, 3.0, F.relu(x)), 1.0, -200.0),
    "exp + 1e-8": (lambda x: x.exp() + 1e-8, 1.0, -30.0),
    "elu + 1 + 1e-7": (lambda x: F.elu(x) + 1 + 1e-7, 1.0, -30.0),
    "relu above 1e-6": (lambda x: F.relu(x).clamp(min=1e-6), 1.0, -30.0),
    "exp of at most 50": (lambda x: x.clamp(max=20).exp(), 1.0, 25.0),
}
"""A map, and the magnitude and mean of inputs on which it is not the map it resembles."""


QUICK = {"relu below 1e4", "relu, and 3 below -100", "exp + 1e-8", "relu", "softplus"}
"""One of each kind; others are exported and compared in the slow tier."""


def quick_first(names: Iterable[str]) -> list[Any]:
    return [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", quick_first(BOUNDED))
def test_a_map_with_a_bound_or_a_constant_of_its_own_stays_in_front(name: str) -> None:
    phi, magnitude, shift = BOUNDED[name]
    module, found = rewritten(phi)
    (match,) = found.findings.matches
    assert match.query_map is match.key_map is match.map_proven_to is None
    assert worst(module, found.model, magnitude, shift) <= 1e-5
    assert worst(module, found.model, 1.0, 1.0) <= 1e-5


SAME: dict[str, tuple[str, Map]] = {
    "relu": ("relu", lambda x: x.clamp(min=0)),
    "elu": ("elu1", lambda x: torch.where(x > 0, x + 1, x.exp())),
    "softplus": ("softplus", lambda x: (1 + x.exp()).log()),
    "softplus with torch's threshold": ("softplus", F.softplus),
    "square": ("squared_relu", lambda x: F.relu(x) ** 2),
    "exp": ("exp", lambda x: (2 * (x / 2)).exp()),
}


@pytest.mark.parametrize("name", quick_first(SAME))
def test_a_known_map_is_found_and_the_range_is_stated(name: str) -> None:
    kind, phi = SAME[name]
    _, found = rewritten(phi)
    (match,) = found.findings.matches
    assert (match.query_map, match.key_map) == (kind, kind)
    assert match.map_proven_to == exact.LARGEST


def taylor(x: Tensor, bound: float = float("inf"), added: float = 0.0) -> Tensor:
    x = x * D**-0.25
    pairs = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2) / 2**0.5
    features = torch.cat([torch.ones_like(x[..., :1]), x, pairs], -1)
    return features if bound == float("inf") else features.clamp(max=bound) + added


def test_a_map_of_several_components_is_compared_at_large_magnitudes() -> None:
    (match,) = rewritten(taylor)[1].findings.matches
    assert match.query_map == "taylor2" and match.map_proven_to >= 1e8
    (match,) = rewritten(lambda x: taylor(x, bound=1e6))[1].findings.matches
    assert match.query_map is None


def test_a_constant_added_to_softmax_is_not_lost() -> None:
    (match,) = rewritten(lambda x: x.softmax(-1))[1].findings.matches
    assert match.query_map == "softmax"
    (match,) = rewritten(lambda x: x.softmax(-1) + 1e-8)[1].findings.matches
    assert match.query_map is None


@pytest.mark.parametrize("count", [8, 32])
@pytest.mark.parametrize(
    ("kind", "draw"),
    [
        ("gaussian", lambda random, shape: random.standard_normal(shape) / 2.5),
        ("laplace", lambda random, shape: random.standard_cauchy(shape) / D),
    ],
)
def test_fourier_features_are_named_by_their_frequencies(
    kind: str, draw: Callable[..., np.ndarray], count: int
) -> None:
    w = torch.from_numpy(draw(np.random.default_rng(4), (D, count))).float()

    def fourier(x: Tensor) -> Tensor:
        angle = x @ w
        return torch.cat([angle.cos(), angle.sin()], -1) * count**-0.5

    (match,) = rewritten(fourier)[1].findings.matches
    assert (match.query_map, match.key_map) == (kind, kind)


@pytest.mark.parametrize(
    ("normalised", "kind"),
    [
        (lambda x: F.normalize(x, dim=-1), "rfa"),
        (lambda x: x / x.norm(dim=-1, keepdim=True), "rfa"),
        # Another function of small x: the Gaussian kernel of what it gives.
        (lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), "gaussian"),
        (lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=0.5), "gaussian"),
        (lambda x: x / x.norm(dim=-1, keepdim=True).clamp(max=30.0), "gaussian"),
    ],
)
def test_fourier_features_of_unit_vectors_are_rfa(
    normalised: Callable[[Tensor], Tensor], kind: str
) -> None:
    w = torch.from_numpy(np.random.default_rng(4).standard_normal((D, 16))).float()

    def fourier(x: Tensor) -> Tensor:
        angle = normalised(x) @ w
        return torch.cat([angle.cos(), angle.sin()], -1) * 0.25

    (match,) = rewritten(fourier)[1].findings.matches
    assert (match.query_map, match.key_map) == (kind, kind)


@pytest.mark.parametrize("bound", [0.3, 1e4, 3e30, -7.7e-12])
def test_both_neighbours_of_the_place_where_a_comparison_turns_are_probed(bound: float) -> None:
    halved = ("Mul", (), ("x",), ("const", 0.5, "float32"))
    function = ("Min", (), halved, ("const", bound, "float32"))
    probes = functions._exact(function).probes()
    edge = np.float32(2) * np.float32(bound)
    sides = {np.float32(edge), np.nextafter(edge, np.float32(np.inf))}
    assert sides <= {np.float32(x) for x in probes}


def test_a_narrow_exception_is_found_by_its_constant() -> None:
    distance = ("Abs", (), ("Sub", (), ("x",), ("const", 53.25, "float32")))
    narrow = ("Less", (), distance, ("const", 1e-3, "float32"))
    relu = ("Relu", (), ("x",))
    assert functions.kind_of(("Where", (), narrow, ("const", 1.0, "float32"), relu)) is None
    assert functions.kind_of(relu) == "relu"


@pytest.mark.parametrize(
    "outer",
    [
        torch.sin,
        *(pytest.param(f, marks=pytest.mark.slow) for f in (torch.cos, torch.floor, torch.round)),
    ],
)
def test_a_map_of_numbers_beyond_float32_is_judged_without_all_their_digits(outer: Map) -> None:
    """The sine of exp(1e30) would take a remainder of pi to 1e30 digits."""
    _, found = rewritten(lambda x: outer(x.exp()) + 2)
    (match,) = found.findings.matches
    assert match.query_map is None
