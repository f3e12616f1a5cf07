"""Checks and times of the GPU kernels: what a pack of ``tools/gpu_check.py`` holds and runs."""
