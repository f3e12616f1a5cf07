"""Verdicts of ``linearize`` on ten trained layers of different sharpness, on data of their own.

    python tools/bench_linearize.py [--steps 300] [--json FILE]

Ten layers of softmax attention are trained to look things up: a query is a noisy copy of one key of
its sequence, and the answer is that key's value. The sharper the noise allows, the sharper they
become; a factor on the scores, which stays fixed, takes them further apart. Each is then linearised
with ``favor+`` as a user does.

The verdict, linear or softmax, is held against the errors of the form and of the mean of the values
on rows that ``linearize`` never saw, computed in float64 from the definitions: linear if the form
is better there by three standard errors. Exits 1 where a verdict does not agree.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import measurement
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linexport
from linexport.linearization.quality import MARGIN
from linexport.models import feature_maps

TOKENS, WIDTH, HEADS, FEATURES = 32, 32, 2, 64
CALIBRATION, FRESH, BATCH = 4096, 8192, 32
TASKS = tuple((noise, factor) for factor in (1.0, 2.5) for noise in (4.0, 2.0, 1.0, 0.5, 0.1))
"""Noise on the queries, and the fixed factor on the scores."""


class Lookup(nn.Module):
    """One layer of attention: half of the width says what a token is, half what it carries."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.query, self.key = (nn.Linear(WIDTH // 2, WIDTH, bias=False) for _ in "qk")
        self.value, self.output = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, (B, H, T, d)."""
        asked, tokens = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
        packed = (
            self.factor * self.query(asked),
            self.key(tokens[..., : WIDTH // 2]),
            self.value(tokens),
        )
        return tuple(y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in packed)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH // 2) of (B, T, 3 * WIDTH // 2)."""
        found = F.scaled_dot_product_attention(*self.heads(x))
        answer: Tensor = self.output(found.transpose(1, 2).flatten(2))
        return answer


@dataclass(frozen=True)
class Row:
    """One layer: its task, what ``linearize`` said and measured, and what holds on fresh rows.

    Margins are by how much the form is better than the mean of the values, in standard errors.
    """

    noise: float
    factor: float
    sharpness: float
    replaced: bool
    error: float
    uniform_error: float
    margin: float
    fresh_error: float
    fresh_uniform_error: float
    fresh_margin: float

    @property
    def agrees(self) -> bool:
        """The verdict is right on rows it never saw."""
        return self.replaced == (self.fresh_margin >= MARGIN)


def rows(count: int, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs (B, T, 3 * WIDTH // 2) and the answers they ask for, (B, T, WIDTH // 2)."""
    keys, carried = torch.randn(2, count, TOKENS, WIDTH // 2, generator=generator)
    at = torch.randint(TOKENS, (count, TOKENS, 1), generator=generator).expand(keys.shape)
    asked = keys.gather(1, at) + noise * torch.randn(keys.shape, generator=generator)
    return torch.cat([asked, keys, carried], -1), carried.gather(1, at)


def trained(noise: float, factor: float, steps: int, seed: int) -> Lookup:
    """A layer that has learned to look up."""
    torch.manual_seed(seed)
    model, generator = Lookup(factor), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        x, y = rows(BATCH, noise, generator)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def squares(model: Lookup, x: Tensor, seed: int) -> Tensor:
    """Squared differences of favor+ and of the mean, and squares of the true output; (3, B)."""
    q, k, v = (y.double() for y in model.heads(x))
    phi = feature_maps.make("favor+", WIDTH // HEADS, {"features": FEATURES, "seed": seed})
    frozen = [t.double() for t in phi.frozen()]
    scores = phi.phi(q, *frozen) @ phi.phi_key(k, *frozen).mT
    want = (q @ k.mT / (WIDTH // HEADS) ** 0.5).softmax(-1) @ v
    got, mean = scores @ v / scores.sum(-1, keepdim=True), v.mean(2, keepdim=True)
    return torch.stack([y.square().sum((1, 2, 3)) for y in (got - want, mean - want, want)])


def measure(noise: float, factor: float, steps: int, seed: int) -> Row:
    """Train one layer, linearise it, and look at fresh rows."""
    model = trained(noise, factor, steps, seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    data, _ = rows(CALIBRATION, noise, generator)
    fresh, _ = rows(FRESH, noise, generator)
    form, mean, size = torch.cat([squares(model, x, seed) for x in fresh.split(BATCH)], 1)
    ratio = form.sum() / mean.sum()
    deviation = (form - ratio * mean).std() * FRESH**0.5 / mean.sum()
    report = linexport.linearize(
        model, data, map="favor+", features=FEATURES, bench=False, seed=seed
    ).report
    (row,) = report.layers
    queries = sum(one.queries for one in row.by_sharpness)
    middle = sum(one.queries * (one.low + one.high) / 2 for one in row.by_sharpness) / queries
    assert row.attention_error is not None and row.uniform_error is not None and row.margin
    return Row(
        noise,
        factor,
        middle,
        row.reason is None,
        row.attention_error,
        row.uniform_error,
        row.margin,
        *(float((x.sum() / size.sum()).sqrt()) for x in (form, mean)),
        float((1 - ratio) / deviation),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="of training, each layer")
    parser.add_argument("--seed", type=int, default=0)
    measurement.add_option(parser)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = [measure(*task, chosen.steps, chosen.seed + at) for at, task in enumerate(TASKS)]
    print("noise  factor  sharpness  verdict   error  alike  margin  fresh error  alike  margin")
    for row in found:
        print(
            f"{row.noise:5.1f}  {row.factor:6.1f}  {row.sharpness:9.3f}  "
            f"{'linear ' if row.replaced else 'softmax'}  {row.error:6.3f}  "
            f"{row.uniform_error:5.3f}  {row.margin:6.1f}  {row.fresh_error:11.3f}  "
            f"{row.fresh_uniform_error:5.3f}  {row.fresh_margin:6.1f}"
            f"{'' if row.agrees else '  DISAGREES'}"
        )
    right = sum(row.agrees for row in found)
    print(f"{right} of {len(found)} verdicts agree with {FRESH:,} rows that linearize never saw")
    numbers = [{**asdict(row), "agrees": row.agrees} for row in found]
    measurement.write(chosen.json, {"load": round(os.getloadavg()[0], 1), "rows": numbers})
    return int(right < len(found))


if __name__ == "__main__":
    sys.exit(main())
