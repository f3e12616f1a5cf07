"""Run MODEL on the arrays of an .npz file where linexport cannot be imported; print the errors."""

import sys

sys.modules["linexport"] = None  # importing it fails
import numpy  # noqa: E402
import onnxruntime  # noqa: E402

path, arrays = sys.argv[1:]
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
with numpy.load(arrays) as file:
    expected = [file[n] for n in file.files if n.startswith("out:")]
    feeds = {n[3:]: file[n] for n in file.files if n.startswith("in:")}
for got, wanted in zip(session.run(None, feeds), expected, strict=False):  # states come last
    print(float(abs(got - wanted).max() / abs(wanted).max()))
assert not [m for m in sys.modules if m.startswith("linexport.")]
