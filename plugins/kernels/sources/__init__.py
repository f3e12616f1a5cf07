"""The kernels themselves: Triton functions, which run on a GPU or in Triton's interpreter."""
