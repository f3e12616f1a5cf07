"""linexport's GPU kernels for ONNX Runtime's CUDA provider, as a shared library in C++."""
