"""A Mamba2 served by linexport beside llama.cpp's server and onnxruntime-genai, in one run.

    python -m venv DIR && DIR/bin/pip install xllamacpp gguf
    python tools/bench_peers.py --llama DIR/bin/python [--dim 512] [--threads 1] [--json FILE]

All have the same random weights in float32, and write as many tokens by argmax. ``xllamacpp`` is
llama.cpp with its own server. onnxruntime-genai has no server: its library writes the texts in one
batch, which begin and end together, and one after another, without HTTP. On a busy machine, where
processes wait for each other, the processor time of a token says more than the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import measurement
import numpy as np
from bench_serve import CLIENTS, ROUNDS, TOKENS, Server, serve, together

import linexport
from linexport.artifact.genai import CONFIG, write_genai

Numbers = dict[str, float]


def source(folder: Path, dim: int) -> Path:
    """Write a Mamba2 of bytes, for transformers and, as ``weights.npz``, for llama.cpp."""
    import torch
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"hidden_size": dim, "num_hidden_layers": 4, "num_heads": dim // 32, "head_dim": 64}
    sizes |= {"state_size": 64, "conv_kernel": 4, "vocab_size": 256, "n_groups": 1}
    torch.manual_seed(0)
    model = Mamba2ForCausalLM(
        Mamba2Config(**sizes, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False)
    )
    with torch.no_grad():  # letters alone, each of which is a piece of text at once
        model.lm_head.weight[:97] = 0
        model.lm_head.weight[123:] = 0
    place = folder / "mamba2"
    model.save_pretrained(place)
    (place / "sizes.json").write_text(json.dumps(sizes))
    np.savez(place / "weights.npz", **{n: w.numpy() for n, w in model.state_dict().items()})
    return place


@contextmanager
def llama(python: Path, folder: Path, threads: int) -> Iterator[Server]:
    """Start llama.cpp's server, and end it."""
    script = Path(__file__).with_name("llama_server.py")
    command = [python, script, folder, "--slots", str(CLIENTS), "--threads", str(threads)]
    with (folder / "llama.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise SystemExit((folder / "llama.log").read_text()[-3000:])
            yield Server(process, url)
        finally:
            process.terminate()
            process.wait()


def genai(folder: Path, threads: int) -> Callable[[int, int], Numbers]:
    """Return a measurement of so many texts in batches of such a size."""
    import onnxruntime_genai

    config = json.loads((folder / CONFIG).read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    (folder / CONFIG).write_text(json.dumps(config))
    model = onnxruntime_genai.Model(str(folder))

    def measure(texts: int, batch: int) -> Numbers:
        begun, first, gaps = time.perf_counter(), [], []
        for start in range(0, texts, batch):
            prompts = [list(b"def f%d(" % (start + i)) for i in range(batch)]
            # Of one length: the library pads none of these, as the others do not.
            prompts = [(p + [97] * 8)[:8] for p in prompts]
            parameters = onnxruntime_genai.GeneratorParams(model)
            parameters.set_search_options(max_length=8 + TOKENS, do_sample=False, batch_size=batch)
            generator = onnxruntime_genai.Generator(model, parameters)
            generator.append_tokens(np.array(prompts, np.int32))
            times = []
            while not generator.is_done():
                generator.generate_next_token()
                times.append(time.perf_counter())
            first.append(times[0] - begun)
            gaps.append(np.diff(times))
        seconds = time.perf_counter() - begun
        joined = np.concatenate(gaps)
        return {
            "tokens_per_second": texts * TOKENS / seconds,
            "median_gap_ms": 1e3 * float(np.median(joined)),
            "p99_gap_ms": 1e3 * float(np.percentile(joined, 99)),
            "first_token_ms": 1e3 * float(np.median(first)),
        }

    return measure


def processor_seconds(process: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


Case = tuple[Callable[[], Numbers], int, int]
"""A measurement, how many tokens it writes, and the process that computes them."""


def measured(cases: dict[str, Case]) -> dict[str, Numbers]:
    """Measure in turns; return medians without the first round."""
    found: dict[str, list[Numbers]] = {name: [] for name in cases}
    for _ in range(ROUNDS + 1):
        for name, (case, tokens, process) in cases.items():
            before = processor_seconds(process)
            numbers = case()
            spent = processor_seconds(process) - before
            found[name].append({**numbers, "processor_ms": 1e3 * spent / tokens})
    return {
        name: {key: round(float(np.median([r[key] for r in runs[1:]])), 2) for key in runs[0]}
        for name, runs in found.items()
    }


def main() -> None:
    """Print and write the numbers."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--llama", type=Path, required=True, help="Python with xllamacpp, gguf")
    options.add_argument("--dim", type=int, default=512)
    options.add_argument("--threads", type=int, default=1)
    measurement.add_option(options)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        weights, artifact = source(folder, given.dim), folder / "artifact"
        linexport.convert(weights, artifact, bench=False)
        threads = given.threads
        library = genai(write_genai(artifact, folder / "genai").path, threads)
        many = serve(artifact, folder / "many.log", "--slots", CLIENTS, "--threads", threads)
        single = serve(artifact, folder / "one.log", "--slots", 1, "--threads", threads)
        with many as ours, single as one, llama(given.llama, weights, threads) as theirs:

            def asked(server: Server, clients: int, **more: Any) -> Case:
                case = partial(together, server.url, clients, **more)
                return lambda: asyncio.run(case()), clients * TOKENS, server.process.pid

            def looped(batch: int) -> Case:
                return lambda: library(CLIENTS, batch), CLIENTS * TOKENS, os.getpid()

            result = measured(
                {
                    "linexport, one client": asked(ours, 1),
                    f"linexport, {CLIENTS} clients": asked(ours, CLIENTS),
                    f"linexport, {CLIENTS} clients, one at a time": asked(one, CLIENTS),
                    "llama.cpp, one client": asked(theirs, 1, ignore_eos=True),
                    f"llama.cpp, {CLIENTS} clients": asked(theirs, CLIENTS, ignore_eos=True),
                    f"onnxruntime-genai, a batch of {CLIENTS}": looped(CLIENTS),
                    f"onnxruntime-genai, {CLIENTS} one by one": looped(1),
                }
            )
    load = Path("/proc/loadavg").read_text().split()[:3]
    for name, numbers in result.items():
        print(name, numbers)
    print("load average", *load)
    sizes = {"dim": given.dim, "threads": given.threads}
    measurement.write(given.json, {**sizes, "times": result, "load": load})


if __name__ == "__main__":
    main()
