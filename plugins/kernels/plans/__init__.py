"""One module for each op that has kernels."""
