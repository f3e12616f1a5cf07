"""Rewrites to operators that only ONNX Runtime has: the passes of target ``ort``, one a file.

They run after all others. Each is proven on random inputs by ``replacement.substitute`` before it
is made, and is here because it was measured to be faster on a CPU (``tools/bench_weights.py``).
"""
