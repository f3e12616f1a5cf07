"""Baselines of ``bench_cpu`` beside ONNX Runtime: PyTorch, OpenVINO, and a matrix product."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from linexport.plugins.ops.registry import all_ops
from linexport.targets.base import OrtSession
from linexport.targets.lowering.inlined import inlined

SIDE = 768
RUNNER = Path(__file__).parent / "run_openvino.py"

Feeds = dict[str, np.ndarray]
Calls = dict[str, Callable[[], object]]


def compiled(heads: int, width: int) -> Callable[[Feeds], object]:
    """torch.compile of elu+1's chunked form, chunks of 64; lengths are multiples of it."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            x.unflatten(-1, (heads, width)).unflatten(1, (-1, 64)).permute(0, 3, 1, 2, 4)
            for x in (q, k, v)
        )
        q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        states = k.transpose(-1, -2) @ v
        before = states.cumsum(2) - states
        sums = q @ before + (q @ k.transpose(-1, -2)).tril() @ v
        out = sums[..., :-1] / (sums[..., -1:] + 1e-6)
        return out.permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)

    fast = torch.compile(attend, dynamic=False)

    def run(feeds: Feeds) -> object:
        with torch.no_grad():
            return fast(*(torch.from_numpy(feeds[n]) for n in ("query", "key", "value")))

    return run


def eager_delta_rule(feeds: Feeds, heads: int) -> Callable[[], object]:
    """The generalised delta rule in PyTorch, token by token."""
    x = {name: torch.from_numpy(array) for name, array in feeds.items()}
    run = all_ops()["GeneralizedDeltaRule"].eager

    def call() -> object:
        with torch.no_grad():
            return run(**x, past_state=None, key_mask=None, num_heads=heads, scale=1.0)

    return call


def product(threads: int) -> tuple[Callable[[], object], float]:
    """A product of square matrices, and its operations."""
    node = helper.make_node("MatMul", ["a", "b"], ["c"])
    infos = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [SIDE, SIDE]) for n in ("a", "b", "c")
    ]
    graph = helper.make_graph([node], "product", infos[:2], infos[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    session = OrtSession(model.SerializeToString(), threads, taking_turns=True)
    x = np.random.default_rng(0).random((SIDE, SIDE), np.float32)
    return lambda: session.run({"a": x, "b": x}), 2.0 * SIDE**3


class OpenVino:
    """OpenVINO on a model without functions, in a process of its own.

    Args:
        python: an interpreter that has it, as ``tools/runtimes_environment`` makes one.
        model: the portable one; its functions are inlined.
        feeds: of every call.
        expected: the first output; another one is an error.
        folder: for files that both processes read.
    """

    def __init__(
        self,
        python: Path,
        model: onnx.ModelProto,
        feeds: Feeds,
        expected: np.ndarray,
        folder: Path,
        threads: int,
    ) -> None:
        onnx.save(inlined(model), folder / "model.onnx")
        np.savez(folder / "feeds.npz", **feeds)
        self._process = subprocess.Popen(
            [python, RUNNER, folder, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self()
        found = np.load(folder / "found.npy")
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)

    def __call__(self) -> None:
        """Run the model once."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != "ran\n":
            raise RuntimeError("OpenVINO's process ended")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
