"""Target ``ort``: ONNX Runtime with its native kernels, padded to widths they are fast at.

The rules below are measured (``tools/bench_attention.py``); ``--tune`` measures again, per model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from linexport.plugins.ops import (
    causal_conv,
    cumulative_sum,
    generalized_delta_rule,
    linear_attention,
)
from linexport.plugins.ops.linear_attention import SCALE, multiplied_out, single_numbers, view
from linexport.plugins.ops.op import Node
from linexport.targets.base import OrtSession, Target
from linexport.targets.lowering import convolution, diagonal, kernels, native_kernel
from linexport.targets.lowering.choice import Candidate, Rules, by_rules

WIDEST_KEY = 256
NUMBERS = "keys and values of width one: all heads as channels, chunks of tokens at once"
GROUPS = (1, 2, 4, 8)
"""Query heads per key/value head that the CPU kernel has a fast path for."""


def _conv(node: Node) -> Sequence[Candidate]:
    return [
        Candidate("channels_last", convolution.REASON, convolution.channels_last),
        Candidate("portable", "standard operators", causal_conv.OP.portable),
        Candidate("native", "ONNX Runtime's kernel", kernels.native_conv),
    ]


def _attention(node: Node) -> Sequence[Candidate]:
    """Best first by measured rules."""
    portable = Candidate("portable", "standard operators", linear_attention.OP.portable)
    spec, sizes = view(node)
    if not spec.causal:
        return [replace(portable, reason="bidirectional: two matrix products")]
    if kernels.by_kappa(node):
        return [replace(portable, reason=kernels.BY_KAPPA)]
    if single_numbers.fits(spec, sizes) and SCALE not in node.shapes:
        native = Candidate("native", "ONNX Runtime's kernel", kernels.native)
        return [replace(portable, reason=NUMBERS), native]
    if diagonal.fits(node):
        return [
            Candidate("by_element", diagonal.REASON, diagonal.by_element),
            Candidate("native", "ONNX Runtime's kernel", multiplied_out(kernels.native)),
        ]
    if SCALE in node.shapes:
        return [portable]
    if kernels.is_running_sum(node):
        reason = "one value channel: a running sum, as a normaliser is"
        return [
            Candidate("running_sum", reason, kernels.running_sum),
            Candidate("native", "ONNX Runtime's kernel", kernels.native),
            portable,
        ]
    aligned = (
        sizes.d_k % native_kernel.KEY_MULTIPLE == 0
        and sizes.d_v % native_kernel.VALUE_MULTIPLE == 0
    )
    group = spec.output_heads // spec.kv_num_heads
    if sizes.d_k > WIDEST_KEY or group not in GROUPS:
        native = Candidate("native", "ONNX Runtime's kernel", kernels.native)
        return [portable, native] if not spec.has_beta else [native, portable]
    if aligned:
        reason = "widths on the kernel's fast path"
        return [Candidate("native", reason, kernels.native_bounded), portable]
    reason = (
        f"widths {sizes.d_k} x {sizes.d_v} padded to multiples of "
        f"{native_kernel.KEY_MULTIPLE} x {native_kernel.VALUE_MULTIPLE}, the kernel's fast path"
    )
    return [
        Candidate("native_padded", reason, kernels.native_padded),
        Candidate("native", "ONNX Runtime's kernel", kernels.native),
        portable,
    ]


def _transition(node: Node) -> Sequence[Candidate]:
    reason = "chunks in blocks that stay in cache"
    return [
        Candidate("by_blocks", reason, generalized_delta_rule.by_blocks),
        Candidate("portable", "standard operators", generalized_delta_rule.OP.portable),
    ]


def _sum(node: Node) -> Sequence[Candidate]:
    reason = "a past of zeros, that of whole sequences, is not added"
    return [
        Candidate("from_zero", reason, cumulative_sum.from_zero),
        Candidate("portable", "standard operators", cumulative_sum.OP.portable),
    ]


_RULES: Rules = {
    causal_conv.OP: _conv,
    cumulative_sum.OP: _sum,
    generalized_delta_rule.OP: _transition,
    linear_attention.OP: _attention,
}

TARGET = Target(
    name="ort",
    candidates=by_rules(_RULES),
    open=OrtSession,
)
