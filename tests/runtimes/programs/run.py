"""Run jobs in one runtime.

    run.py RUNTIME JOBS.json

    job = {model, calls, result}: paths of a model, of what to call it with, of what it returns

Where a job fails, the file of its result says why. Imports nothing of the project: other
environments run it.
"""

import base64
import json
import sys
from pathlib import Path

import numpy as np


def onnxruntime(model):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
    return lambda feeds, names: dict(zip(names, session.run(names, feeds), strict=True))


def reference(model):
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(model)
    return lambda feeds, names: dict(zip(names, evaluator.run(names, feeds), strict=True))


def openvino(model):
    import openvino

    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(model, "CPU", settings)

    def run(feeds, names):
        found = compiled(feeds)
        return {name: np.array(found[name]) for name in names}

    return run


def outputs(run, calls):
    """Return the outputs of every call; states go from one to the next."""
    states, found = {}, []
    for call in calls:
        feeds = {name: decoded(value) for name, value in call["feeds"].items()}
        feeds |= {past: states[present] for past, present in call["carried"].items()}
        given = run(feeds, [*call["outputs"], *call["kept"]])
        states = {name: given[name] for name in call["kept"]}
        found.append({name: encoded(given[name]) for name in call["outputs"]})
    return found


def decoded(value):
    data = np.frombuffer(base64.b64decode(value["data"]), value["dtype"])
    return data.reshape(value["shape"])


def encoded(array):
    data = base64.b64encode(np.ascontiguousarray(array)).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


RUNTIMES = {"onnxruntime": onnxruntime, "onnx.reference": reference, "OpenVINO": openvino}


def main(runtime, jobs):
    for job in json.loads(Path(jobs).read_text()):
        calls = json.loads(Path(job["calls"]).read_text())
        try:
            result = {"outputs": outputs(RUNTIMES[runtime](job["model"]), calls)}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        Path(job["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
