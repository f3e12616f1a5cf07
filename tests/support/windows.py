"""A node of WindowAttention: its inputs by what is given, and its outputs of numbers."""

from __future__ import annotations

import onnx

from linexport.plugins.ops.window_attention import OP, WindowSpec
from tests.support.native import one_node

PASTS = tuple(OP.input_names[3:9])
OUTPUTS = tuple(n for n in OP.output_names if n != "left_mask")


def window_shapes(
    spec: WindowSpec, widths: tuple[int, int], optional: set[str]
) -> dict[str, tuple[int | str, ...]]:
    keys, values = (spec.kv_num_heads * width for width in widths)
    found: dict[str, tuple[int | str, ...]] = {
        "query": ("B", "T", spec.q_num_heads * widths[0]),
        "key": ("B", "T", keys),
        "value": ("B", "T", values),
        "past_key": ("B", spec.window, keys),
        "past_value": ("B", spec.window, values),
        "past_seen": ("B", spec.window),
        "past_sink_key": ("B", spec.sinks, keys),
        "past_sink_value": ("B", spec.sinks, values),
        "past_left": ("B", 1),
        "key_mask": ("B", "T"),
    }
    given_ = {"query", "key", "value", *(PASTS if "past" in optional else ())}
    given_ |= optional & {"key_mask"}
    return {n: s for n, s in found.items() if n in given_}


def window_node(spec: WindowSpec, widths: tuple[int, int]) -> onnx.ModelProto:
    """The node with all states, and without a key mask."""
    wanted = window_shapes(spec, widths, {"past"})
    return one_node(OP.name, wanted, OUTPUTS, **vars(spec))
