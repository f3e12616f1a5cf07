"""linexport's ops: their schemas and bodies, their kernels, and their TensorRT plugins."""
