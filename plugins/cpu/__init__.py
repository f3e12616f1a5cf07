"""Operators for ONNX Runtime on the CPU, as a shared library in C++."""
