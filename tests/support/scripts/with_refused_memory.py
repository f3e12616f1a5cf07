"""Run a model on the CPU library while its threads are refused memory, then once more with it.

python with_refused_memory.py MODEL LIBRARY INPUTS.npz, with refuse_memory.so loaded before.
"""

import ctypes
import sys

import numpy as np
import onnxruntime

model, library, inputs = sys.argv[1:]
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 4
options.log_severity_level = 4
options.add_session_config_entry("linexport.threads", "4")
options.register_custom_ops_library(library)
session = onnxruntime.InferenceSession(model, options)
fed = dict(np.load(inputs))
shim = ctypes.CDLL(None)
shim.refuse_from.argtypes = [ctypes.c_size_t]
shim.refusals.restype = ctypes.c_long
for _ in range(3):
    shim.refuse_from(4096)
    before = shim.refusals()
    try:
        session.run(None, fed)
        print("run", shim.refusals() - before)
    except Exception as error:
        print("error", shim.refusals() - before, str(error).replace("\n", " "))
shim.refuse_from(0)
first, second = session.run(None, fed), session.run(None, fed)
print("same", all((a == b).all() for a, b in zip(first, second, strict=True)))
