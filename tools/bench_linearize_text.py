"""Layers of a trained decoder made linear, more and more of them: quality, time and state.

    python tools/bench_linearize_text.py FOLDER [--distil 20] [--json FILE]
    python tools/bench_linearize_text.py FOLDER --times --json FILE

FOLDER is that of ``tools/train_text.py``. Layers are ordered by the loss that each alone costs as
``window64+elu1`` without distillation; the first quarter, half, three quarters and all of them are
then replaced and distilled by a user's call, and converted. Everything else is measured on the
artifacts, that of the softmax model among them, with the CPU library and one thread: bits per byte
on packages that training never read, needles found (all digits of the answer have the largest
logits), time of a prompt and of a token after it, and bytes of state. A step of the softmax model
is one of PyTorch with the cache of transformers: an artifact without linear layers has no state.

The artifacts are kept in FOLDER. ``--times`` measures their times alone again, on a machine that
has nothing else to do, and writes them into FILE.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import measurement
import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from train_text import IGNORED, Rows, corpus

import linexport
from linexport.linearization.find_softmax import find_sites
from linexport.linearization.replace import shared_copy, with_forms
from linexport.sources import load_model
from linexport.sources.loaded_model import LoadedModel
from linexport.timing.latency import Call, Settings, interleaved

FORM, OPTIONS = "window64+elu1", {"sinks": 4}
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
ORDERED = 8
"""Rows that layers are ordered by."""

TEXT = 2048
"""Tokens of a row whose bits are counted."""

RECALL = (512, 1024, 2048, 4096, 8192)
TIMED = (1024, 8192)
DIGITS = 4

KEPT = ("past_key", "past_value", "past_mask", "past_length")
"""Names of states of layers that keep their softmax, and of the model."""


@dataclass
class Point:
    """One share of linear layers.

    Attributes:
        linear: places of the layers that are linear.
        error: smallest and largest error of their outputs, relative.
        bits: per byte.
        recall: share of needles found, by the tokens of the row.
        prefill: milliseconds, by the tokens of the prompt.
        step: milliseconds of one token after such a prompt.
        state_bytes: after the longest prompt, of all layers.
        linear_bytes: of these, without keys and values of layers that keep softmax.
        replaced_bytes: of the layers that are linear, over that of softmax in the same.
    """

    linear: list[int]
    error: tuple[float, float] | None = None
    bits: float = 0.0
    recall: dict[int, float] = field(default_factory=dict)
    prefill: dict[int, float] = field(default_factory=dict)
    step: dict[int, float] = field(default_factory=dict)
    state_bytes: int = 0
    linear_bytes: int = 0
    replaced_bytes: float | None = None


def batch(rows: Rows, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels of text and lookups, whose positions have no jump."""
    tokens, labels, _ = rows.batch(length, count)
    return tokens, labels


def order(loaded: LoadedModel, tokens: Tensor, labels: Tensor) -> list[int]:
    """Return the places of layers, first that whose linear form alone costs the least."""
    everything = linexport.linearize(
        loaded, tokens, map=FORM, map_options=OPTIONS, bench=False, force=True
    )
    forms = dict(everything.module.get_submodule("forms.by_site").named_children())
    original = shared_copy(loaded.module)
    sites = find_sites(original, [(tokens[:2],)])
    lost = []
    for site in sites:
        model = with_forms(original, {site.index: forms[str(site.index)]})
        lost.append((loss(model, tokens[:ORDERED], labels[:ORDERED]), site.index))
        print(f"layer {site.index} alone: {lost[-1][0]:.4f} nats", flush=True)
    return [index for _, index in sorted(lost)]


@torch.no_grad()
def loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> float:
    """Return the mean loss of labelled tokens, in nats."""
    found = [
        F.cross_entropy(model(t)[:, :-1].mT, y[:, 1:], ignore_index=IGNORED)
        for t, y in zip(tokens.split(1), labels.split(1), strict=True)
    ]
    return float(torch.stack(found).mean())


def artifact(
    loaded: LoadedModel, places: Sequence[int], tokens: Tensor, steps: int, folder: Path
) -> tuple[linexport.Artifact, Point]:
    """Convert the model with the layers of some places in linear form."""
    point = Point(sorted(places))
    if not places:
        manifest = linexport.convert(loaded, folder, bench=False)
    else:
        sites = find_sites(shared_copy(loaded.module), [(tokens[:2],)])
        maps = {"*": "keep", **{site.name: FORM for site in sites if site.index in places}}
        result = linexport.linearize(
            loaded, tokens, map=maps, map_options=OPTIONS, distil=steps, bench=False, force=True
        )
        errors = [r.layer_error for r in result.report.layers if r.layer_error is not None]
        point.error = min(errors), max(errors)
        result.save(folder.with_suffix(".pt2"))
        manifest = linexport.convert(folder.with_suffix(".pt2"), folder, bench=False)
    print(f"{len(places)} layers linear, conversion: {manifest.status}", flush=True)
    return linexport.load(folder, threads=1), point


def inputs(model: linexport.Artifact, tokens: Tensor) -> dict[str, np.ndarray]:
    """Return what a call is given; all tokens are there."""
    found = {"input_ids": tokens.numpy()}
    if "attention_mask" in {record.name for record in model.manifest.inputs}:
        found["attention_mask"] = np.ones(tokens.shape, np.int64)
    return found


def logits(model: linexport.Artifact, tokens: Tensor) -> Tensor:
    """Return the logits of a row."""
    found = model.run(**inputs(model, tokens[None]))
    return torch.from_numpy(next(iter(found.values())))[0]


def bits_per_byte(model: linexport.Artifact, rows: Rows, text: Sequence[Tensor]) -> float:
    """Return the loss on rows of text, by the bytes that were predicted."""
    nats, size = 0.0, 0
    for row in text:
        nats += float(F.cross_entropy(logits(model, row)[:-1].double(), row[1:], reduction="sum"))
        size += len(rows.tokenizer.decode(row[1:].tolist()).encode())
    return nats / size / float(np.log(2))


def recall(model: linexport.Artifact, needles: Sequence[Tensor]) -> float:
    """Return the share of rows, all digits of whose answer have the largest logits."""
    found = [
        bool((logits(model, row)[-DIGITS - 1 : -1].argmax(-1) == row[-DIGITS:]).all())
        for row in needles
    ]
    return float(np.mean(found))


class SoftmaxStep:
    """A step of the softmax model in PyTorch, with the cache of transformers."""

    def __init__(self, folder: Path, prompt: Tensor) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        self.cache = transformers.DynamicCache(config=self.model.config)
        self(prompt)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        found = self.model(
            input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        logits: Tensor = found.logits
        return logits

    @property
    def state_bytes(self) -> int:
        """Return the bytes of keys and values."""
        layers = self.cache.layers
        return sum(x.nbytes for layer in layers for x in (layer.keys, layer.values))


def measure_times(model: linexport.Artifact, point: Point, folder: Path) -> None:
    """Measure prompts and steps of an artifact, and the state after them."""
    settings = Settings(warmup=1, repeats=3, seconds=20.0, patience=60.0, threads=1, lead_in=0)
    many = Settings(warmup=3, repeats=20, threads=1)
    for length in TIMED:
        prompt, token = torch.ones(1, length, dtype=torch.long), torch.ones(1, 1, dtype=torch.long)
        step: Call
        if point.linear:
            stream = model.stream()
            stream.step(**inputs(model, prompt))
            step, held = partial(stream.step, **inputs(model, token)), stream.state().arrays
            point.state_bytes = sum(x.nbytes for x in held.values())
            own = [x for name, x in held.items() if not name.startswith(KEPT)]
            point.linear_bytes = sum(x.nbytes for x in own)
        else:
            softmax = SoftmaxStep(folder, prompt)
            step, point.state_bytes = partial(softmax, token), softmax.state_bytes
        for times, call, how in (
            (point.prefill, partial(model.run, **inputs(model, prompt)), settings),
            (point.step, step, many),
        ):
            times[length] = round(float(np.median(interleaved({"call": call}, how)["call"])), 2)


def compare_states(points: Mapping[float, Point], layers: int) -> None:
    """Note what states of linear layers take of keys and values in their place."""
    if 0.0 not in points:
        return
    whole = points[0.0].state_bytes / layers
    for point in points.values():
        if point.linear:
            point.replaced_bytes = point.linear_bytes / (whole * len(point.linear))


def save(path: Path | None, result: dict[str, Any], points: Mapping[float, Point]) -> None:
    """Write what was measured so far."""
    found = {str(share): asdict(point) for share, point in points.items()}
    measurement.write(path, {**result, "load": round(os.getloadavg()[0], 1), "points": found})


def time_again(folder: Path, path: Path) -> None:
    """Measure the times of artifacts once more, and write them in the place of those of a file."""
    result = measurement.read(path)
    points = {}
    for share, known in result["points"].items():
        point = points[float(share)] = Point(**known)
        point.prefill, point.step = {}, {}
        model = linexport.load(folder / f"linear-{len(point.linear)}", threads=1)
        measure_times(model, point, folder / "model")
        del model
        print(share, point.prefill, point.step, flush=True)
    save(path, result, points)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of tools/train_text.py")
    parser.add_argument("--distil", type=int, default=20, help="steps at most")
    parser.add_argument("--data", type=int, default=64, help="rows of calibration data")
    parser.add_argument("--length", type=int, default=1024, help="tokens of such a row")
    parser.add_argument(
        "--rows", type=int, default=16, help="of text, and of each length of needles"
    )
    parser.add_argument(
        "--shares", type=float, nargs="+", default=SHARES, help="of linear layers; 0 first"
    )
    parser.add_argument("--times", action="store_true", help="measure these alone, once more")
    measurement.add_option(parser)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if chosen.times:
        time_again(chosen.folder, chosen.json)
        return 0
    found = corpus(chosen.folder)
    trained = torch.load(chosen.folder / "checkpoint.pt", weights_only=True, mmap=True)
    loaded = load_model(str(chosen.folder / "model"), whole=True)
    tokens, labels = batch(Rows(found, False, 10**6), chosen.data, chosen.length)
    layers = order(loaded, tokens, labels)
    fresh = Rows(found, True, 0)
    text = [fresh.text(TEXT) for _ in range(chosen.rows)]
    needles = {length: [fresh.needle(length) for _ in range(chosen.rows)] for length in RECALL}
    result = {
        "steps": trained["step"],
        "tokens": trained["tokens"],
        "processor_seconds": round(trained["seconds"]),
        "distil": chosen.distil,
        "data": [chosen.data, chosen.length],
        "rows": chosen.rows,
    }
    points = dict[float, Point]()
    for share in chosen.shares:
        places = layers[: round(share * len(layers))]
        folder = chosen.folder / f"linear-{len(places)}"
        model, point = artifact(loaded, places, tokens, chosen.distil, folder)
        points[share] = point
        point.bits = bits_per_byte(model, fresh, text)
        measure_times(model, point, chosen.folder / "model")
        point.recall = {n: recall(model, rows) for n, rows in needles.items()}
        del model  # softmax over 8,192 tokens takes gigabytes, which a session keeps
        compare_states(points, len(layers))
        print(asdict(point), flush=True)
        save(chosen.json, result, points)
    return 0


if __name__ == "__main__":
    sys.exit(main())
