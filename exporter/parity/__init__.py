"""Proving that an artifact equals its original: parity over cases, and streaming equivalence."""

from linexport.parity.check import ModelUnderTest, Parity, check
from linexport.parity.diverge import first_divergence
from linexport.parity.language.check import check_language
from linexport.parity.language.layer_by_layer import check_layers, layer_values
from linexport.parity.language.layers import first_layer
from linexport.parity.library import check_library, not_run, proven
from linexport.parity.streams.check import check_in_place, check_streaming
from linexport.parity.streams.whole_runs import WholeRuns

__all__ = [
    "ModelUnderTest",
    "Parity",
    "WholeRuns",
    "check",
    "check_in_place",
    "check_language",
    "check_layers",
    "check_library",
    "check_streaming",
    "first_divergence",
    "first_layer",
    "layer_values",
    "not_run",
    "proven",
]
