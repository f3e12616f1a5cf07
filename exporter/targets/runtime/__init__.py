"""Sessions of ONNX Runtime: providers, options, memory of devices, captured calls."""
