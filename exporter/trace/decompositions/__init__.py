"""Operators of torch that ONNX lacks, as ones that it has."""
