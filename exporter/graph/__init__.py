"""Facts about an ONNX graph: dimensions, states, the sequence axis, external initializers."""
