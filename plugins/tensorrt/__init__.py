"""TensorRT and TensorRT-RTX: the libraries, the plugins of linexport's ops, and their launch."""
