"""Parameters and constants of the kernels of LinearAttention, in the order these declare them."""

from __future__ import annotations

SCALARS = ("length", "chunks", "segments", "chunks_per_segment")
SEQUENCES = ("query", "key", "value", "beta", "output")
"""Tensors in the type of the activations; all others but the mask are float32, decays too."""

PAST, PRESENT = ("past_state", "past_normalizer"), ("present_state", "present_normalizer")

GIVEN = tuple(f"x{i}" for i in range(16))
"""Tensors that expressions read."""

CONVOLVED = tuple(f"present_conv_{i}" for i in range(3))
"""Present states of the convolutions in expressions."""

OPERANDS = ("query", "key", "value", "decay", "beta")

TUPLES = {"operands": OPERANDS, "tensors": GIVEN, "states": CONVOLVED}
"""Parameters that are named tuples of these, for functions that pass them on together."""

DECAYED = ("query_from_start", "key_from_start", "key_to_end")
"""Queries and keys with the decays of their channels, in the type of the features."""


_DECAYED = (*DECAYED, "chunk_decays")
PARAMETERS: dict[str, tuple[str, ...]] = {
    "segments.segment_state": (
        *("key", "value", "decay", "key_mask", "parameter_0", "segment_states", "segment_decays"),
        *("key_to_end", "chunk_decays", "length", "segments", "chunks_per_segment"),
    ),
    "segments.segment_scan": ("segment_states", "segment_decays", *PAST, *PRESENT, "segments"),
    "linear.segment_output": (
        *("query", "key", "value", "decay", "key_mask", "parameter_0", *PAST),
        *("segment_states", "channel_scores", *_DECAYED, "inverses"),
        *("output", *PRESENT, "length", "segments", "chunks_per_segment"),
    ),
    "channels.chunk_scores": (
        *("query", "key", "decay", "key_mask", "parameter_0", "channel_scores", *_DECAYED),
        *("length", "chunks"),
    ),
    "delta.chunk_inverse": (
        *("key", "decay", "beta", "key_mask", "parameter_0", "inverses", "length", "chunks"),
    ),
    "transitions.segment_transition": (
        *("key", "value", "decay", "key_mask", "parameter_0", "past_state", "segment_states"),
        *("transitions", *_DECAYED[1:], "inverses"),
        *("length", "segments", "chunks_per_segment"),
    ),
    "transitions.transition_scan": ("segment_states", "transitions", "segments"),
    "bidirectional.segment_output": (
        *("query", "parameter_0", "output", *PRESENT, "length", "chunks_per_segment"),
    ),
    "recurrent.step": (
        *(*OPERANDS, "key_mask", "parameter_0", *PAST, *GIVEN),
        *("output", *PRESENT, *CONVOLVED),
        "length",
    ),
    "operands.write": (*GIVEN, *OPERANDS, *CONVOLVED, "length", "chunks"),
}
"""Run-time parameters in the order the kernel declares them, each item of a tuple by itself; one
without a tensor is a constant."""

_KEYS = ("HEADS", "KEY_HEADS", "WIDTH", "D_K", "DECAYS", "MAP", "PRECISION")
_PROGRAM = (*("PROGRAM", "PLACES", "QUERY_CONVOLUTIONS", "KEY_CONVOLUTIONS", "VALUE_CONVOLUTIONS"),)
_SUMS = ("QUERY_HEADS", "D_V", "NORMALIZE", "SCALE", "EPS")
CONSTANTS: dict[str, tuple[str, ...]] = {
    "segments.segment_state": (*_KEYS, "D_V", "NORMALIZE"),
    "segments.segment_scan": ("D_K", "D_V", "DECAYS"),
    "linear.segment_output": (*_KEYS, *_SUMS),
    "channels.chunk_scores": (*("HEADS", "KEY_HEADS", "QUERY_HEADS", "WIDTH", "D_K", "MAP"),),
    "delta.chunk_inverse": (*_KEYS, "BETA_HEADS"),
    "transitions.segment_transition": (*_KEYS, "D_V"),
    "transitions.transition_scan": ("D_K", "D_V"),
    "bidirectional.segment_output": (
        *("HEADS", "QUERY_HEADS", "WIDTH", "D_K", "D_V", "MAP", "SCALE", "EPS"),
        "PRECISION",
    ),
    "recurrent.step": (
        *("HEADS", "KEY_HEADS", "QUERY_HEADS", "BETA_HEADS", "WIDTH", "D_K", "D_V"),
        *("DECAYS", "DELTA", "MAP", "NORMALIZE", "SCALE", "EPS", *_PROGRAM),
    ),
    "operands.write": (
        *("HEADS", "KEY_HEADS", "QUERY_HEADS", "BETA_HEADS", "D_K", "D_V", "DECAYS", *_PROGRAM),
        "REACH",
    ),
}
