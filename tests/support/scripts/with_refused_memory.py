"""Run models on the CPU library while its threads are refused memory, then once more with it.

python with_refused_memory.py LIBRARY FOLDER..., with refuse_memory.so loaded before. Each folder
has model.onnx and inputs.npz. A line for each: folder, threads, errors, whether it is as before.
"""

import ctypes
import sys

import numpy as np
import onnxruntime

LEAST, TRIES = 4096, 30
"""Bytes that are refused, and calls in which a thread may ask for them."""

library, *folders = sys.argv[1:]
shim = ctypes.CDLL(None)
shim.refuse_from.argtypes = [ctypes.c_size_t]
for folder in folders:
    for threads in ("2", "4"):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(threads)
        options.log_severity_level = 4
        options.add_session_config_entry("linexport.threads", threads)
        options.register_custom_ops_library(library)
        session = onnxruntime.InferenceSession(f"{folder}/model.onnx", options)
        fed = dict(np.load(f"{folder}/inputs.npz"))
        errors: set[str] = set()
        for _ in range(TRIES):  # a busy machine may leave all parts to the first thread
            shim.refuse_from(LEAST)
            try:
                session.run(None, fed)
            except Exception as error:
                errors.add(str(error).replace("\n", " "))
            finally:
                shim.refuse_from(0)
            if errors:
                break
        first, second = session.run(None, fed), session.run(None, fed)
        same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, second, strict=True))
        print(folder, threads, sorted(errors), same, sep="\t")
