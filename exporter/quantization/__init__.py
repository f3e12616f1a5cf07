"""Weights in fewer bits: chosen, written, and compared with the float32 artifact on data."""
