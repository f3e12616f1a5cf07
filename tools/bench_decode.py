"""One decode step of a four-layer model beside the sum of its matrix products.

    python tools/bench_decode.py [--dim 512] [--json FILE]

The products are those of the model's own weights on one token, each a graph of its own, timed in
the same run; the step carries its states from call to call, as a stream does.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import measurement
import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper

import linexport
from linexport import manifest, models
from linexport.targets.base import OrtSession
from linexport.timing.latency import Settings, interleaved

SETTINGS = Settings(warmup=5, repeats=100, seconds=20.0, lead_in=4)
LAYERS = 4


def products(weights: list[np.ndarray]) -> OrtSession:
    """Every weight times one token, nothing else."""
    inputs, outputs, nodes, constants = [], [], [], []
    for i, weight in enumerate(weights):
        inputs.append(helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, [1, 1, None]))
        outputs.append(helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None))
        constants.append(numpy_helper.from_array(np.ascontiguousarray(weight.T), f"w{i}"))
        nodes.append(helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"y{i}"]))
    graph = helper.make_graph(nodes, "products", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return OrtSession(model.SerializeToString(), taking_turns=True)


def main() -> None:
    """Print both times and their ratio."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--dim", type=int, default=512)
    measurement.add_option(options)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config = {"dim": given.dim, "num_heads": given.dim // 64, "layers": LAYERS}
        module = models.build("language_model", config)
        models.save(module, folder / "model.pt")
        linexport.convert(folder / "model.pt", folder / "out", bench=False)
        path = folder / "out"
        session = OrtSession(path / "model.onnx", taking_turns=True)
        stream = linexport.Artifact(path, manifest.read(path), session).stream()
        token = np.zeros((1, 1), np.int64)
        linear = [m for m in module.modules() if isinstance(m, torch.nn.Linear)]
        weights = [m.weight.detach().numpy() for m in linear]
        bare = products(weights)
        x = {f"x{i}": np.ones((1, 1, w.shape[1]), np.float32) for i, w in enumerate(weights)}
        calls: dict[str, Callable[[], object]] = {
            "step": lambda: stream.step(token),
            "products": lambda: bare.run(x),
        }
        times = {n: float(np.median(t)) for n, t in interleaved(calls, SETTINGS).items()}
    ratio = times["step"] / times["products"]
    print(f"step {times['step']:.3f} ms, products {times['products']:.3f} ms, ratio {ratio:.2f}")
    measurement.write(given.json, {"dim": given.dim, "ms": times, "ratio": ratio})


if __name__ == "__main__":
    main()
