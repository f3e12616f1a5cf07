"""Train the small models, each in under three minutes on two cores.

    python -m linexport.models.train language-model --out model.pt
    python -m linexport.models.train digits --out digits.pt --map favor+ --features 64
    python -m linexport.models.train digit-network --out network.pt
    python -m linexport.models.train digit-memory --out memory.pt

Progress goes to stderr, the score on data the model never saw to stdout. The same seed and steps
give the same weights on the same machine; with --seconds, its speed decides.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from linexport.errors import LinexportError, UsageError
from linexport.models import checkpoint, data, samples, scores, training
from linexport.models.config import from_text
from linexport.models.registry import ReferenceModel
from linexport.system.json_object import JsonObject

# Tensors are small: two threads save a third of the time on an idle machine, and on a busy one
# wait for each other at every operation, ten times slower and more. One also repeats exactly.
_THREADS = 1

Out = Annotated[Path, typer.Option(help="Where the checkpoint goes.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps of the optimiser.")]
Seconds = Annotated[
    float | None, typer.Option(min=1, help="Train no longer than this; weights then vary.")
]
Seed = Annotated[int, typer.Option(help="Of the first weights and of the batches.")]
Map = Annotated[str, typer.Option(help="Feature map of every layer.")]
Features = Annotated[
    int | None, typer.Option(help="Its option 'features': how many, where it has a choice.")
]
MapOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Another option of it, NAME=VALUE; repeat for several.", metavar="NAME=VALUE"
    ),
]
Heads = Annotated[
    int, typer.Option(min=1, help="Of attention; a width of 96 or 64 is divided among them.")
]
AttentionKind = Annotated[
    str, typer.Option(help="linear, or softmax: what linexport linearize starts from.")
]

app = typer.Typer(add_completion=False, help="Train a small reference model on real data.")


@app.command()
def language_model(
    out: Out,
    steps: Steps = training.LANGUAGE_MODEL_STEPS,
    seconds: Seconds = None,
    seed: Seed = 0,
    map: Map = "elu1",
    features: Features = None,
    map_option: MapOption = None,
    heads: Heads = training.LANGUAGE_MODEL_HEADS,
    attention: AttentionKind = "linear",
) -> None:
    """A byte-level language model of the standard library's source text."""
    how = _attention(map, features, map_option, heads, attention)
    run = partial(training.train_language_model, steps, seed=seed, seconds=seconds, **how)
    _train(out, run, _bits_per_byte)


@app.command()
def digits(
    out: Out,
    steps: Steps = training.DIGITS_STEPS,
    seconds: Seconds = None,
    seed: Seed = 0,
    map: Map = "elu1",
    features: Features = None,
    map_option: MapOption = None,
    heads: Heads = training.DIGITS_HEADS,
    attention: AttentionKind = "linear",
) -> None:
    """A classifier of scikit-learn's handwritten digits."""
    how = _attention(map, features, map_option, heads, attention)
    run = partial(training.train_digits, steps, seed=seed, seconds=seconds, **how)
    _train(out, run, lambda model: _accuracy(samples.accuracy(model)))


@app.command()
def digit_network(
    out: Out, steps: Steps = training.DIGITS_STEPS, seconds: Seconds = None, seed: Seed = 0
) -> None:
    """Two layers with GELU between them, on scikit-learn's handwritten digits."""
    run = partial(training.train_digit_network, steps, seed=seed, seconds=seconds)
    _train(out, run, lambda model: _accuracy(samples.network_accuracy(model)))


@app.command()
def digit_memory(
    out: Out, steps: Steps = training.MEMORY_STEPS, seconds: Seconds = None, seed: Seed = 0
) -> None:
    """Cross-attention to 4,096 stored images of digits, which tells others by them."""
    run = partial(training.train_digit_memory, steps, seed=seed, seconds=seconds)
    _train(out, run, lambda model: _accuracy(samples.memory_accuracy(model)))


def _train(out: Path, run: Callable[..., ReferenceModel], score: Callable[[Any], str]) -> None:
    """Train, save, and print the score on held-out data.

    Raises:
        UsageError: see ``_check_folder``; nothing was trained.
    """
    _check_folder(out)
    started = time.monotonic()
    model = run(say=_say)
    found = score(model)
    checkpoint.save(model, out)
    print(f"held out: {found}; {time.monotonic() - started:.0f} s; saved {out}")


def _attention(
    map: str, features: int | None, given: list[str] | None, heads: int, attention: str
) -> JsonObject:
    """Return the arguments of training that say what the attention layers are."""
    options = _options(features, given or [])
    return {"feature_map": map, "options": options, "heads": heads, "attention": attention}


def _options(features: int | None, given: list[str]) -> dict[str, object]:
    """Return the options of the feature map."""
    options: dict[str, object] = {} if features is None else {"features": features}
    return options | from_text(given, "degree=3")


def _bits_per_byte(model: torch.nn.Module) -> str:
    text = data.library_text()
    bits, unigram = samples.bits_per_byte(model), scores.unigram_bits_per_byte(text)
    return f"{bits:.3f} bits per byte (unigram {unigram:.3f})"


def _accuracy(share: float) -> str:
    """Return the score of a model of digits in words; ``share`` is what it tells right."""
    _, held_out = data.digits()
    return f"accuracy {share:.1%} on {len(held_out.labels)} images"


def _check_folder(out: Path) -> None:
    """Refuse a place that cannot be written, before minutes are spent on a model.

    Raises:
        UsageError: its folder does not exist, or it is a folder.
    """
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: the folder {out.parent} does not exist. Create it first.")
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; give the path of a file in it.")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(_THREADS)
    try:
        app()
    except LinexportError as error:
        _say(f"error: {error}")
        sys.exit(error.exit_code)
