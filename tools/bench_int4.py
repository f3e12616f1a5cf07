"""Models with int4 weights beside others' 4-bit builds of the same sizes, in turns in one run.

    python -m venv DIR && DIR/bin/pip install xllamacpp gguf
    python tools/bench_int4.py --llama DIR/bin/python [--width 1024] [--threads 2] [--json FILE]

A Qwen3.5 beside llama.cpp's Q4_0, and an LFM2 beside what onnxruntime-genai's own builder makes of
the same folder. Weights are random. A turn is a prompt of 512 tokens and 40 tokens after it, each
the most probable one; llama.cpp's times are those that its server states. Its threads wait for each
other by spinning: on a machine that others use they are many times slower, and say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import measurement
import numpy as np
from bench_weights import LENGTH, PAUSE, Converted, Run, save_model, sized

TOKENS = 40
ROUNDS = 6
STORED = ("int4", "int8", "float32")
Turn = Callable[[int], tuple[float, float]]
"""Milliseconds of a prompt of so many tokens, and of each token after it."""

Times = dict[str, dict[int, tuple[float, float]]]
"""Such milliseconds by who computes them, and by the tokens of the prompt."""


@contextmanager
def llama(
    python: Path, config: Path, model: Path, threads: int, longest: int = LENGTH
) -> Iterator[tuple[Turn, int]]:
    """Start llama.cpp with random weights, which are written, and end it.

    Args:
        python: that has xllamacpp and gguf.
        config: of the model.
        model: file to write.
        threads: of llama.cpp.
        longest: tokens of a prompt at most.

    Returns:
        What answers, and the size of the file.
    """
    script, context = Path(__file__).parent / "llama_weights.py", 2 * (longest + TOKENS)
    settings = ["--config", config, "--threads", threads, "--context", context]
    command = [python, script, model, *settings]
    with subprocess.Popen(
        list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        given, answered = process.stdin, process.stdout
        assert given is not None and answered is not None

        def line() -> str:
            if found := answered.readline():
                return found
            raise SystemExit("llama.cpp ended; what it said is above.")

        def turn(length: int) -> tuple[float, float]:
            given.write(f"{length} {TOKENS}\n")
            given.flush()
            prompt, token = map(float, line().split())
            return prompt, token

        yield turn, int(line())
        given.close()


@contextmanager
def genai(folder: Path, tokens: np.ndarray, work: Path, threads: int) -> Iterator[tuple[Turn, int]]:
    """Build and open a model as onnxruntime-genai does; with the size of its files."""
    import onnxruntime_genai as og

    _save_tokenizer(folder, json.loads((folder / "config.json").read_text())["vocab_size"])
    made = work / "genai"
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    options = ["-m", folder, "-o", made, "-p", "int4", "-e", "cpu", "-c", work / "cache"]
    done = subprocess.run([*builder, *map(str, options)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"onnxruntime-genai's builder ended with {done.stderr[-2000:]}")
    config = json.loads((made / "genai_config.json").read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    (made / "genai_config.json").write_text(json.dumps(config))
    model = og.Model(str(made))
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(
        max_length=LENGTH + TOKENS + 1, min_length=LENGTH + TOKENS + 1, do_sample=False
    )

    def turn(length: int) -> tuple[float, float]:
        generator = og.Generator(model, parameters)
        start = time.perf_counter()
        generator.append_tokens(tokens[0, :length].astype(np.int32))
        generator.generate_next_token()
        middle = time.perf_counter()
        for _ in range(TOKENS):
            generator.generate_next_token()
        return 1e3 * (middle - start), 1e3 * (time.perf_counter() - middle) / TOKENS

    yield turn, sum(f.stat().st_size for f in made.glob("model.onnx*"))


def _save_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer of made-up words, which the builder asks for."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"word{i}": i for i in range(vocabulary)}, unk_token="word0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="word0").save_pretrained(
        folder
    )


def own_turn(run: Run, length: int) -> tuple[float, float]:
    """Return milliseconds of a prompt, and of each token after it with its choice by argmax."""
    start = time.perf_counter()
    logits, run.state = run.read(run.tokens[:, :length], run.empty)
    logits[0, -1].argmax()
    middle = time.perf_counter()
    for _ in range(TOKENS):
        run.step()[0, -1].argmax()
    end = time.perf_counter()
    return 1e3 * (middle - start), 1e3 * (end - middle) / TOKENS


def in_turns(turns: Mapping[str, Turn], lengths: Sequence[int], rounds: int = ROUNDS) -> Times:
    """Return medians of what takes turns; the first round is not counted."""
    rows: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(rounds + 1):
        for length in lengths:
            for name, turn in turns.items():
                time.sleep(PAUSE)
                rows.setdefault((name, length), []).append(turn(length))
    found: Times = {name: {} for name in turns}
    for (name, length), own in rows.items():
        prompts, tokens = zip(*own[1:], strict=True)
        found[name][length] = statistics.median(prompts), statistics.median(tokens)
    return found


def measure(given: argparse.Namespace, model_type: str, work: Path) -> dict[str, Any]:
    """Return bytes of the files, and milliseconds by who computes them."""
    folder = work / "model"
    save_model(sized(model_type, given.width, given.layers, given.vocabulary), model_type, folder)
    tokens = np.random.default_rng(0).integers(3, given.vocabulary, size=(1, LENGTH))
    own = Converted(folder, work, tokens, given.threads)
    if model_type == "qwen3_5_text":
        title, opened = (
            "llama.cpp Q4_0",
            llama(given.llama, folder / "config.json", work / "model.gguf", given.threads),
        )
    else:
        title, opened = "onnxruntime-genai int4", genai(folder, tokens, work, given.threads)
    with opened as (peer, size):
        turns: dict[str, Turn] = {n: partial(own_turn, own.runs[n]) for n in STORED}
        found = in_turns({**turns, title: peer}, [LENGTH])
    sizes = {name: own.bytes(name) for name in STORED} | {title: size}
    return {
        name: {"bytes": sizes[name], "prefill": round(prompt, 3), "step": round(token, 3)}
        for name, row in found.items()
        for prompt, token in row.values()
    }


def main() -> None:
    """Measure, and print the times of all."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument(
        "--llama", type=Path, help="a Python with xllamacpp; without it genai alone"
    )
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--vocabulary", type=int, default=32000)
    options.add_argument("--threads", type=int, default=2)
    measurement.add_option(options)
    given = options.parse_args()
    results = {n: getattr(given, n) for n in ("width", "layers", "vocabulary", "threads")}
    results["families"] = {}
    for model_type in ["qwen3_5_text"] * bool(given.llama) + ["lfm2"]:
        with tempfile.TemporaryDirectory() as work:
            found = measure(given, model_type, Path(work))
        for name, row in found.items():
            print(model_type, name, json.dumps(row), flush=True)
        results["families"][model_type] = found
        results["load"] = round(os.getloadavg()[0], 1)
        measurement.write(given.json, results)


if __name__ == "__main__":
    main()
