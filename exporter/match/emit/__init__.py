"""Matches as nodes: operands packed for a fused op, the op, and what is behind it."""
