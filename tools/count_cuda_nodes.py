"""Nodes of a layer in artifacts of target ort-cuda, with ONNX Runtime's norms and without.

    python tools/count_cuda_nodes.py --json docs/data/cuda_nodes.json

Each is a launch on the GPU, but for those that only give a tensor another shape. A layer is the
difference between two models, of which one has one layer more. In fp16, with kernels for 9.0; no
GPU is needed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import measurement
import onnx
import torch
import transformers

import linexport
from linexport import models
from linexport.targets import ort_cuda

WIDTH = 128
QWEN = {
    **{"vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "head_dim": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
}
LINEAR, FULL = "linear_attention", "full_attention"

VIEWS = {"Reshape", "Squeeze", "Unsqueeze"}
"""Operators that compute nothing."""

Source = Callable[[Path], Mapping[str, object]]
"""Writes a model, and returns arguments of ``convert``."""


def own(layers: int) -> Source:
    """Return linexport's language model: layer norms, a short convolution, elu + 1, GELU."""

    def write(folder: Path) -> Mapping[str, object]:
        model = models.build("language_model", {"dim": WIDTH, "num_heads": 2, "layers": layers})
        inputs, shapes = model.example_inputs(2, 16, 0), model.dynamic_shapes()
        return {"source": model.eval(), "args": inputs, "dynamic_shapes": shapes}

    return write


def qwen(*kinds: str) -> Source:
    """Return a Qwen3.5 with these layers: root mean square norms, gates, SiLU."""

    def write(folder: Path) -> Mapping[str, object]:
        sizes = {**QWEN, "layer_types": [*kinds], "num_hidden_layers": len(kinds)}
        config = transformers.AutoConfig.for_model("qwen3_5_text", **sizes)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return {"source": folder}

    return write


PAIRS: Mapping[str, tuple[Source, Source]] = {
    "language model of linexport": (own(2), own(3)),
    "Qwen3.5, gated delta rule": (qwen(LINEAR, FULL), qwen(LINEAR, LINEAR, FULL)),
    "Qwen3.5, softmax attention": (qwen(LINEAR, FULL), qwen(LINEAR, FULL, FULL)),
}


@contextmanager
def without_operators() -> Iterator[None]:
    """Leave norms, residuals and products as they were exported."""
    with ExitStack() as stack:
        for name in ("with_root_mean_squares", "with_residuals"):
            stack.enter_context(mock.patch.object(ort_cuda, name, lambda model: model))
        stack.enter_context(mock.patch.object(ort_cuda, "NORMS", frozenset()))
        stack.enter_context(mock.patch.object(ort_cuda, "LEAST", 10**9))
        yield


def counted(source: Source) -> Counter[str]:
    """Return the nodes of an artifact by operator."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        given = dict(source(place / "model"))
        options = {"target": "ort-cuda", "precision": "fp16", "sms": (90,), "bench": False}
        manifest = linexport.convert(given.pop("source"), place / "out", **given, **options)
        if manifest.status != "ok":
            raise SystemExit(f"the conversion failed: {manifest.failure}")
        model = onnx.load_model(str(place / "out" / "model.onnx"), load_external_data=False)
    return Counter(node.op_type for node in model.graph.node)


def layer(pair: tuple[Source, Source]) -> dict[str, int]:
    """Return the nodes of a layer, and those of them that are casts or compute nothing."""
    shallow, deep = (counted(source) for source in pair)
    found = Counter({kind: deep[kind] - shallow[kind] for kind in deep})
    return {
        "nodes": sum(found.values()),
        "casts": found["Cast"],
        "views": sum(found[kind] for kind in VIEWS),
    }


def main() -> None:
    """Count the layers and print a line for each."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    measurement.add_option(options)
    given = options.parse_args()
    rows = []
    for name, pair in PAIRS.items():
        with without_operators():
            before = layer(pair)
        rows.append({"layer": name, "before": before, "after": layer(pair)})
        print(rows[-1], flush=True)
    measurement.write(given.json, rows)


if __name__ == "__main__":
    main()
