"""How quantised weights are written, by target: for ONNX Runtime's kernels, or portably."""

from __future__ import annotations

from linexport.quantization.portable import portable_model
from linexport.quantization.rewrite import quantised_model

REWRITES = {"ort": quantised_model, "onnx": portable_model}
"""Targets that have weights in fewer bits."""
