"""OpenVINO's side of ``bench_cpu``: run FOLDER/model.onnx on FOLDER/feeds.npz for every line.

    PYTHON tools/run_openvino.py FOLDER THREADS

The interpreter is one with openvino, and without linexport. The first output is written to
FOLDER/found.npy once.
"""

import sys
from pathlib import Path

import numpy as np
import openvino

folder, threads = Path(sys.argv[1]), int(sys.argv[2])
settings = {"INFERENCE_PRECISION_HINT": "f32"}
if threads:
    settings["INFERENCE_NUM_THREADS"] = threads
compiled = openvino.Core().compile_model(folder / "model.onnx", "CPU", settings)
feeds = dict(np.load(folder / "feeds.npz"))
np.save(folder / "found.npy", compiled(feeds)[0])
for _ in sys.stdin:
    compiled(feeds)
    print("ran", flush=True)
