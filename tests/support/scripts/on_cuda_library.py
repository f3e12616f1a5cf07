"""Run a model with the CUDA library, made one of the CPU provider, on the stand-in for the driver.

on_cuda_library.py MODEL LIBRARY SIZES: SIZES is a JSON list of batch and length. Prints the shapes
of the outputs at each as JSON, or ONNX Runtime's error.
"""

import ctypes
import json
import sys

import numpy as np
import onnxruntime

model, library, sizes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
driver.cuCtxSetCurrent(context)
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(library)
TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(bool)": np.bool_}
found = []
try:
    session = onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
    for batch, length in sizes:
        known = {"batch": batch, "seq": length}
        feeds = {
            i.name: np.zeros([known.get(d, d) for d in i.shape], TYPES[i.type])
            for i in session.get_inputs()
        }
        driver.fakeDriverMark(f"{batch}x{length}".encode())
        found.append([list(output.shape) for output in session.run(None, feeds)])
except Exception as error:
    found = str(error)
driver.fakeDriverMark(b"end")
print(json.dumps(found))
