"""Convert the model of ``leaky_sum`` for TARGET into FOLDER, stream it, and print what happened."""

import json
import sys

import numpy as np
import onnx
import onnxruntime
from leaky_sum import OP

import linexport
from linexport.inspection import inspect
from linexport.plugins.ops.registry import all_ops, attach_functions, register_schemas

if __name__ == "__main__":
    target, folder = sys.argv[1:]
    assert all_ops()["LeakySum"] is OP
    manifest = linexport.convert(
        "leaky_sum:model", folder, target=target, bench=False, threads=1, dims=["seq=1:16:64"]
    )
    artifact = linexport.load(folder, threads=1)
    x = np.random.default_rng(0).normal(size=(2, 24, 8)).astype(np.float32)
    stream = artifact.stream()
    parts = [x[:, :7], x[:, 7:8], x[:, 8:]]
    pieces = np.concatenate([stream.step(part)["output"] for part in parts], 1)

    register_schemas()
    node = onnx.helper.make_node("LeakySum", ["x"], ["y"], "sum", domain="linexport", rate=0.75)
    float32 = onnx.TensorProto.FLOAT
    alone = onnx.helper.make_model(
        onnx.helper.make_graph(
            [node],
            "g",
            [onnx.helper.make_tensor_value_info("x", float32, ["B", "T", 8])],
            [onnx.helper.make_tensor_value_info("y", float32, ["B", "T", 8])],
        ),
        opset_imports=[onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("linexport", 1)],
        ir_version=10,
    )
    attach_functions(alone)
    onnx.checker.check_model(alone, full_check=True)
    session = onnxruntime.InferenceSession(alone.SerializeToString())
    (got,), (expected, _) = session.run(["y"], {"x": x}), OP.oracle({"rate": 0.75}, {"x": x})
    print(
        json.dumps(
            {
                "status": manifest.status,
                "fused": dict(manifest.fused),
                "states": [s.op for s in manifest.states],
                "streaming": manifest.streaming.passed,
                "lowerings": [c.lowering for c in manifest.lowerings],
                "stream_error": float(np.abs(pieces - artifact.run(x)["output"]).max()),
                "oracle_error": float(np.abs(got - expected).max()),
                "details": inspect(folder).ops[0].details,
            }
        )
    )
