"""The search of ``linearize --auto`` beside points chosen by hand, on a model trained here.

    python tools/bench_linearize_search.py MODEL [--train 2400] [--minutes 5] [--json FILE]

MODEL is a folder; where there is none, a llama of 0.8 M parameters is trained on the standard
library's source text, bytes as tokens, and written there: four layers, width 128, four heads, two
of keys and values, 256 tokens at once, for ``--train`` steps.

The grid has 60 points: one of four forms for each set of layers, distilled as by a user. Its drop
is measured on text that neither it nor the search saw, with the same upper bound, and what it costs
by the same measurement of one attention call. The search should end at a point whose bound is
within the drop and which saves as much as every such point of the grid, in a tenth of the time,
which is that of the processor. Exits 1 where it does not.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import measurement
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train_text import Training

import linexport
from linexport.linearization.confidence import upper_bound
from linexport.linearization.find_softmax import find_sites
from linexport.linearization.layer_costs import CallShape, measure
from linexport.linearization.replace import shared_copy
from linexport.manifest.linearization_records import SOFTMAX, AttentionCost, LinearizationReport
from linexport.models import data
from linexport.sources import load_model
from linexport.sources.loaded_model import LoadedModel

LENGTH, BATCH = 256, 6
ROWS, FRESH = 700, 256
FORMS = ("window16+elu1", "window64+elu1", "window32+elu1", "elu1")
LAYERS = 4
AT = 8192
"""Tokens at which time is compared."""


@dataclass(frozen=True)
class Point:
    """A point of the grid, or the search's.

    Attributes:
        forms: of each layer.
        seconds: of the processor that finding it took.
        drop: in bits per token, on fresh text.
        bound: of that, upper, with a confidence of 95 %.
        milliseconds: of attention in all layers, ``AT`` tokens.
        state_bytes: of all layers, at the longest length.
    """

    forms: tuple[str, ...]
    seconds: float
    drop: float
    bound: float
    milliseconds: float
    state_bytes: int


def train(folder: Path, steps: int) -> None:
    """Train the model and write its folder."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    text, generator = data.library_text().train, torch.Generator().manual_seed(0)
    training, positions = Training(model), torch.arange(LENGTH).expand(BATCH, -1)
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        tokens = text[starts + torch.arange(LENGTH)].long()
        rate = 2e-3 * min(1, (step + 1) / 100) * (0.05 + 0.95 * (1 - step / steps))
        training.learn((tokens, tokens, positions), rate)
    model.save_pretrained(folder)


def text() -> tuple[Tensor, Tensor]:
    """Rows for the user, and fresh ones, of text the model was not trained on."""
    held_out = data.library_text().held_out
    rows = held_out[: len(held_out) // LENGTH * LENGTH].reshape(-1, LENGTH).long()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return rows[order[:ROWS]], rows[order[ROWS : ROWS + FRESH]]


@torch.no_grad()
def bits(model: nn.Module, rows: Tensor) -> Tensor:
    """Bits per token of every row."""
    found = []
    for batch in rows.split(8):
        losses = F.cross_entropy(model(batch)[:, :-1].mT, batch[:, 1:], reduction="none")
        found.append(losses.double().mean(1) / torch.log(torch.tensor(2.0)))
    return torch.cat(found)


def point(
    report: LinearizationReport,
    seconds: float,
    lost: Tensor,
    costs: dict[str, AttentionCost],
) -> Point:
    """Add up what the calls of a result cost."""
    forms = tuple(SOFTMAX if row.reason else str(row.map) for row in report.layers)
    if report.search is not None:
        forms = next(one.forms for one in report.search.points if one.chosen)
    times = [{row.length: row.milliseconds for row in costs[name].times}[AT] for name in forms]
    longest = max(row.length for row in costs[SOFTMAX].times)
    held = sum(costs[name].bytes_at(longest) for name in forms)
    return Point(forms, seconds, float(lost.mean()), upper_bound(lost, False), sum(times), held)


def grid(
    loaded: LoadedModel, rows: Tensor, fresh: Tensor, costs: dict[str, AttentionCost], steps: int
) -> Iterator[Point]:
    """Yield a point for every form in every set of layers, distilled."""
    before, sites = (
        bits(loaded.module, fresh),
        find_sites(shared_copy(loaded.module), [(rows[:2],)]),
    )
    lengths = [row.length for row in costs[SOFTMAX].times]
    sets = [some for n in range(LAYERS) for some in combinations(range(LAYERS), n + 1)]
    for form in FORMS:
        for layers in sets:
            start = time.process_time()
            maps = {"*": "keep", **{f"*layers.{at}.*": form for at in layers}}
            options = {"sinks": 4} if "window" in form else {}
            result = linexport.linearize(
                loaded, rows, map=maps, map_options=options, distil=steps, bench=False, force=True
            )
            seconds = time.process_time() - start
            lost = bits(result.module, fresh) - before
            if form not in costs:
                made = dict(result.module.get_submodule("forms.by_site").named_children())
                own = made[str(sites[layers[0]].index)]
                costs[form] = measure(CallShape.of(sites[0]), own, lengths, 1)
            yield point(result.report, seconds, lost, costs)


def show(one: Point) -> None:
    """Print a point."""
    print(
        f"{one.seconds:7.0f} s  drop {one.drop:8.4f}  at most {one.bound:8.4f}  "
        f"{one.milliseconds:8.1f} ms at {AT:,}  {one.state_bytes:10,} bytes  "
        f"{', '.join(one.forms)}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--train", type=int, default=2400, help="steps, where there is no model")
    parser.add_argument("--minutes", type=float, default=5.0, help="of the search")
    parser.add_argument("--distil", type=int, default=8, help="steps of each point of the grid")
    parser.add_argument("--max-drop", type=float, default=0.02)
    measurement.add_option(parser)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if not chosen.model.exists():
        train(chosen.model, chosen.train)
    loaded, (rows, fresh) = load_model(str(chosen.model), whole=True), text()
    start = time.process_time()
    result = linexport.linearize(
        loaded,
        rows,
        auto=linexport.AutoSearch(chosen.minutes),
        max_drop=chosen.max_drop,
        bench=False,
        threads=1,
    )
    seconds, search = time.process_time() - start, result.report.search
    assert search is not None
    costs = {one.form: one.cost for one in search.costs if one.cost is not None}
    lost = bits(result.module, fresh) - bits(loaded.module, fresh)
    print(result.report.verdict)
    best = point(result.report, seconds, lost, costs)
    show(best)
    tried: list[Point] = []
    found = {
        "verdict": result.report.verdict,
        "search": asdict(best),
        "max_drop": chosen.max_drop,
    }
    for one in grid(loaded, rows, fresh, costs, chosen.distil):
        tried.append(one)
        show(one)
        points = {"grid": [asdict(each) for each in tried], "load": round(os.getloadavg()[0], 1)}
        measurement.write(chosen.json, {**found, **points})
    within = [one for one in tried if one.bound <= chosen.max_drop]
    better = [
        one
        for one in within
        if one.milliseconds < best.milliseconds and one.state_bytes < best.state_bytes
    ]
    spent = sum(one.seconds for one in tried)
    print(
        f"{len(within)} of {len(tried)} points of the grid are within {chosen.max_drop:g}; "
        f"{len(better)} of them cost less in time and bytes than the search's; the grid took "
        f"{spent:.0f} s, the search {seconds:.0f} s"
    )
    return int(bool(better) or best.bound > chosen.max_drop or 10 * seconds > spent)


if __name__ == "__main__":
    sys.exit(main())
