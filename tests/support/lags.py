"""Modules that reach back by a constant, in many notations, beside linear attention.

Each is converted as a user converts it. Either it streams as the module computes the whole sequence
in float64, or it is exported without states and the manifest says why.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linexport
from linexport.errors import LinexportError
from linexport.sources.factory import load_module

WIDTH, LENGTH, FARTHEST = 8, 4_000, 3_000
LIMIT = 1e-3
"""Error of a stream, of the largest value, from which on it is wrong."""

Notation = Callable[[Tensor, int], Tensor]
"""Gives x (B, T, C) as far back as a number says, zeros before the first token."""

NOTATIONS: dict[str, tuple[Notation, int]] = {}
"""Notations, with the largest number that each is tried with."""


def notation(most: int = FARTHEST) -> Callable[[Notation], Notation]:
    """Register a notation."""

    def register(function: Notation) -> Notation:
        NOTATIONS[function.__name__] = function, most
        return function

    return register


def behind(x: Tensor) -> Tensor:
    """The distance from each key (column) to each query."""
    i = torch.arange(x.shape[1])
    return i[:, None] - i


@notation()
def padded(x: Tensor, k: int) -> Tensor:
    return F.pad(x, (0, 0, k, 0))[:, : x.shape[1]]


@notation()
def padded_and_cut_behind(x: Tensor, k: int) -> Tensor:
    return F.pad(x, (0, 0, k, 0))[:, :-k]


@notation()
def padded_channels_first(x: Tensor, k: int) -> Tensor:
    return F.pad(x.mT, (k, 0))[..., : x.shape[1]].mT


@notation()
def concatenated(x: Tensor, k: int) -> Tensor:
    return torch.cat([x.new_zeros(x.shape[0], k, x.shape[2]), x], 1)[:, : x.shape[1]]


@notation()
def gathered(x: Tensor, k: int) -> Tensor:
    place = torch.arange(x.shape[1]) - k
    return x[:, place.clamp(min=0)] * (place >= 0)[:, None]


@notation()
def chosen(x: Tensor, k: int) -> Tensor:
    place = torch.arange(x.shape[1]) - k
    found = x.index_select(1, place.clamp(min=0))
    return torch.where(place[:, None] >= 0, found, torch.zeros(()))


@notation()
def rolled(x: Tensor, k: int) -> Tensor:
    return torch.roll(x, k, 1) * (torch.arange(x.shape[1]) >= k)[:, None]


@notation(32)
def unfolded(x: Tensor, k: int) -> Tensor:
    return F.pad(x, (0, 0, k, 0)).unfold(1, k + 1, 1).mean(-1)


@notation(32)
def largest_unfolded(x: Tensor, k: int) -> Tensor:
    return F.pad(x, (0, 0, k, 0)).unfold(1, k + 1, 1).amax(-1)


@notation(FARTHEST // 3)
def dilated(x: Tensor, k: int) -> Tensor:
    weight = torch.tensor([0.5, -0.25, 0.125, 1.0]).to(x).expand(x.shape[2], 1, 4)
    return F.conv1d(F.pad(x.mT, (3 * k, 0)), weight, dilation=k, groups=x.shape[2]).mT


@notation()
def two_taps(x: Tensor, k: int) -> Tensor:
    weight = torch.tensor([1.0, -1.0]).to(x).expand(x.shape[2], 1, 2)
    return F.conv1d(x.mT, weight, padding=k, dilation=k, groups=x.shape[2])[..., : x.shape[1]].mT


@notation()
def triangle(x: Tensor, k: int) -> Tensor:
    old = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril(-k)
    return old @ x / (old.sum(-1, keepdim=True) + 1)


@notation()
def shifted_linear_attention(x: Tensor, k: int) -> Tensor:
    scores = (x.relu() @ (x + 0.5).relu().mT).tril(-k)
    return scores @ x / (scores.sum(-1, keepdim=True) + 1)


@notation()
def band_of_linear_attention(x: Tensor, k: int) -> Tensor:
    distance = behind(x)
    scores = (x.relu() @ (x + 0.5).relu().mT) * ((distance >= 0) & (distance <= k))
    return scores @ x / (scores.sum(-1, keepdim=True) + 1)


@notation()
def softmax_window(x: Tensor, k: int) -> Tensor:
    distance = behind(x)
    seen = (distance >= 0) & (distance <= k)
    scores = (x @ x.mT).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ x


@notation()
def near_softmax_and_far(x: Tensor, k: int) -> Tensor:
    distance = behind(x)
    near = (x @ x.mT / 4).tanh().exp() * ((distance >= 0) & (distance < k))
    far = (x.relu() @ (x + 0.5).relu().mT) * (distance >= k)
    return (near + far) @ x / (near + far).sum(-1, keepdim=True)


@notation(200)
def averaged(x: Tensor, k: int) -> Tensor:
    return F.avg_pool1d(F.pad(x.mT, (k, 0)), k + 1, 1).mT


@notation()
def differences_of_sums(x: Tensor, k: int) -> Tensor:
    total = x.cumsum(1)
    return (total - F.pad(total, (0, 0, k, 0))[:, : x.shape[1]]) / k


@notation(1000)
def of_two_distances(x: Tensor, k: int) -> Tensor:
    return padded(x, k) - concatenated(padded(x, 2 * k), 3)


@notation()
def ahead(x: Tensor, k: int) -> Tensor:
    """Later tokens: nothing that may stream."""
    return F.pad(x, (0, 0, 0, k))[:, k:]


@notation()
def of_the_length(x: Tensor, k: int) -> Tensor:
    """Positions from the end: nothing that may stream."""
    last = (x.shape[1] - 1 - torch.arange(x.shape[1])).clamp(max=k)
    return x * last[:, None].to(x) / k


class Lagging(nn.Module):
    """Linear attention with a notation before it, behind it, or in parallel."""

    def __init__(self, name: str, constant: int, place: str) -> None:
        super().__init__()
        self.name, self.constant, self.place = name, constant, place
        self.inside, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def lag(self, x: Tensor) -> Tensor:
        return NOTATIONS[self.name][0](x, self.constant)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.inside(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        scores = (q @ k.mT).tril()
        return (scores @ v) / (scores.sum(-1, keepdim=True) + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH)."""
        if self.place == "before":
            return self.out(self.attention(x - self.lag(x)))
        if self.place == "behind":
            return self.out(self.lag(self.attention(x)) + x)
        return self.out(self.attention(x)) - self.lag(self.out(x))


@dataclass(frozen=True)
class Drawn:
    """A module that was drawn, and what it is made of."""

    module: Lagging
    name: str
    constant: int
    place: str


def draw(seed: int, name: str | None = None) -> Drawn:
    """Draw a notation, unless it is given, a number, and where the notation is."""
    choose = random.Random(seed)
    name = name or choose.choice(sorted(NOTATIONS))
    most = NOTATIONS[name][1]
    constant = min(most, round(most ** choose.uniform(0.0, 1.0)))
    place = choose.choice(["before", "behind", "in parallel"])
    torch.manual_seed(seed)
    return Drawn(Lagging(name, constant, place).eval(), name, constant, place)


@dataclass(frozen=True)
class Outcome:
    """What became of a module: "streams", "refused", "failed" (not converted) or "wrong"."""

    kind: str
    reason: str
    error: float = 0.0


def outcome_of(drawn: Drawn, folder: Path, length: int = LENGTH) -> Outcome:
    """Convert a module, and feed the artifact with a long sequence in pieces."""
    example, dims = (
        torch.randn(2, 16, WIDTH),
        ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},),
    )
    try:
        loaded = load_module((drawn.module, (example,), dims), f"lags:{drawn.name}")
        manifest = linexport.convert(loaded, folder, bench=False, threads=1)
    except LinexportError as error:
        return Outcome("failed", str(error))
    if manifest.status != "ok":
        return Outcome("failed", "its parity check failed")
    if not manifest.states:
        return Outcome("refused", manifest.why_stateless)
    x = np.random.default_rng(0).standard_normal((1, length, WIDTH)).astype(np.float32)
    with torch.no_grad():
        expected = drawn.module.double()(torch.from_numpy(x).double()).numpy()
    stream = linexport.load(folder, threads=1).stream()
    k, got, start = drawn.constant, [], 0
    ends = sorted({1, 3, k - 1, k, k + 1, k + 2, 2 * k, 2 * k + 1, 2 * k + 2, 1500, length})
    for end in (end for end in ends if 0 < end <= length):
        got.append(stream.step(x[:, start:end])["output"])
        start = end
    error = float(np.abs(np.concatenate(got, 1) - expected).max() / np.abs(expected).max())
    return Outcome("streams" if error < LIMIT else "wrong", "", error)
