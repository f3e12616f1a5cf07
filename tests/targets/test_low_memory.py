"""Memory that a session with little memory holds between calls."""

from __future__ import annotations

import subprocess
import sys

import pytest

from linexport.system.room import held_memory

SCRIPT = """
import sys
import numpy as np
from onnx import TensorProto, helper
from linexport.system.room import held_memory
from linexport.targets.base import OrtSession

rows = 2**16  # of 256 numbers: 64 MiB, four times
x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1])
y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
wide = helper.make_tensor("wide", TensorProto.FLOAT, [1, 256], [1.0] * 256)
nodes = [helper.make_node("MatMul", ["x", "wide"], ["a0"])]
nodes += [helper.make_node("Sin", [f"a{n}"], [f"a{n + 1}"]) for n in range(3)]
nodes += [helper.make_node("Add", ["a0", "a3"], ["b"])]
nodes += [helper.make_node("ReduceMean", ["b"], ["m"], keepdims=0)]
nodes += [helper.make_node("Unsqueeze", ["m", "zero"], ["y"])]
zero = helper.make_tensor("zero", TensorProto.INT64, [1], [0])
graph = helper.make_graph(nodes, "g", [x], [y], [wide, zero])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
session = OrtSession(model.SerializeToString(), threads=1, low_memory=sys.argv[1] == "low")
before = held_memory()
for n in (rows, 1):
    session.run({"x": np.ones((n, 1), np.float32)})
print((held_memory() - before) // 2**20)
"""


@pytest.mark.parametrize(("kind", "least", "most"), [("low", 0, 80), ("usual", 150, 1000)])
def test_memory_of_a_long_call_is_given_back(kind: str, least: int, most: int) -> None:
    if not held_memory():
        pytest.skip("this system does not say what a process owns")
    command = [sys.executable, "-c", SCRIPT, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert least <= int(done.stdout) <= most
