"""Portable artifacts in the runtimes that people have, each compared with the PyTorch original."""
