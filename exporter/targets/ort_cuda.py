"""Target ``ort-cuda``: ONNX Runtime's CUDA provider: its kernels, or linexport's with --sm.

GatedDeltaNet is the faster operator: threads share a state by its value channels, where keys are
64, 128 or 256 wide, to which heads are padded. On an H200 8,192 tokens of 16 heads of 64 x 65 took
4.6 ms, 8 heads of 32 x 33, as they are, 14.6 ms, and LinearAttention 28.7 and 17.7 ms. It has no
more heads of queries than of values. For others, and for values of width one, there is
LinearAttention, whose rules are read in its source: a block of threads keeps the state of a head in
shared memory, and goes from token to token,

    4 (d_k d_v + d_k + max(d_k, d_v))  <=  shared memory of a block      max(d_k, d_v) <= 1024

and for d_k = 64 and 128 with d_v a multiple of 32 it divides a state among several blocks, where
the heads are too few to fill the GPU: those widths are padded to. Inputs of both have to have a
token, and both are called in float32: LinearAttention's state has the type of the activations.

``--sm`` names GPUs that nodes carry linexport's own kernels for, which the CUDA library launches
(``plugins.cuda``). The above is then what their functions are made of: other programs run these.

``--packed-batches``: calls take sequences of their own lengths; see ``packed_batches``.
GatedDeltaNet takes them, and so does VarlenCausalConvWithState.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import onnx

from linexport.errors import UnsupportedModelError, UsageError
from linexport.graph.external_data import ModelSource
from linexport.plugins.kernels import contract
from linexport.plugins.kernels.description import LAUNCH, Description
from linexport.plugins.kernels.launch import TYPES
from linexport.plugins.ops import causal_conv, causal_conv_tokens, linear_attention
from linexport.plugins.ops.linear_attention import SCALE, multiplied_out, view
from linexport.plugins.ops.op import Lowering, Node, Op
from linexport.targets.base import (
    DTYPES,
    InferenceSession,
    Options,
    OrtSession,
    Target,
    check_precision,
)
from linexport.targets.lowering import cuda_bfloat16, diagonal, kernels, native_kernel, varlen_conv
from linexport.targets.lowering.choice import Candidate, Rules, by_rules
from linexport.targets.lowering.cuda_norms import NORMS, with_residuals, with_root_mean_squares
from linexport.targets.lowering.packed_batches import ENDS, packed
from linexport.targets.runtime.packed_session import by_rows
from linexport.targets.runtime.providers import CPU, CPU_ONLY
from linexport.targets.trt import parser_form
from linexport.targets.trt.convolutions import tokens_first
from linexport.targets.trt.layers import with_layers
from linexport.targets.trt.precision import half, open_here
from linexport.targets.trt.projections import joint_projections
from linexport.targets.trt.target import planned

KEYS = (64, 128, 256)
"""Widths of keys for which GatedDeltaNet divides a state among threads."""

SHARED = 99 * 1024
"""Bytes of shared memory that a block may have on any GPU of compute capability 8.0 and later."""

WIDEST = 1024
"""Threads of a block, one for each row or column of a state."""

DIVIDED_KEYS, DIVIDED_VALUES = (64, 128), 32
"""Widths of keys, and multiple of widths of values, for which states are divided among blocks."""


LEAST = 3
"""Products of one value that are one with a Split: two nodes in the place of three or more."""

_GATED_DELTA_NET = "gated_delta_net"
"""Name of the lowering to that operator."""


def _conv(node: Node, wide: bool = False) -> Sequence[Candidate]:
    reason = "ONNX Runtime's kernel" + (", which has no bfloat16, in float32" if wide else "")
    return [
        Candidate("native", reason, partial(kernels.native_conv, wide=wide)),
        Candidate("portable", "standard operators", causal_conv.OP.portable),
    ]


def _attention(node: Node) -> Sequence[Candidate]:
    portable = linear_attention.OP.portable
    spec, sizes = view(node)
    if not spec.causal:
        return [Candidate("portable", "bidirectional: two matrix products", portable)]
    by_element = SCALE in node.shapes or diagonal.fits(node)
    if not by_element and spec.q_num_heads <= spec.kv_num_heads and sizes.d_k <= max(KEYS):
        return [_gated_delta_net(node)]
    if not takes(sizes.d_k, sizes.d_v + spec.normalize):
        reason = f"states of {sizes.d_k} x {sizes.d_v} are too large for the kernel: a Scan"
        return [Candidate("portable", reason, portable)]
    if by_element:
        write = multiplied_out(partial(kernels.native_columns, d_k=sizes.d_k))
        return [Candidate("native", "ONNX Runtime's kernel, a block for each head", write)]
    return [_divided(node) or _whole(node)]


def _conv_tokens(node: Node) -> Sequence[Candidate]:
    reason = f"ONNX Runtime's {varlen_conv.OP}"
    return [Candidate("varlen", reason, causal_conv_tokens.OP.portable)]


def _gated_delta_net(node: Node, ends: str = "") -> Candidate:
    spec, sizes = view(node)
    d_k = next(width for width in KEYS if sizes.d_k <= width)
    shares = spec.q_num_heads == sizes.key_heads
    dialect = replace(native_kernel.GATED_DELTA_NET, shares_keys=shares, ends=ends)
    write = partial(kernels.native_columns, d_k=d_k, dialect=dialect)
    padded = "" if d_k == sizes.d_k else f", keys padded to {d_k}"
    return Candidate(_GATED_DELTA_NET, f"ONNX Runtime's GatedDeltaNet{padded}", write)


def takes(d_k: int, d_v: int) -> bool:
    """Return whether LinearAttention's kernel runs states of these widths on every GPU."""
    longer = max(d_k, d_v)
    return 4 * (d_k * d_v + d_k + longer) <= SHARED and longer <= WIDEST


def _whole(node: Node) -> Candidate:
    write = partial(kernels.native_columns, d_k=view(node)[1].d_k)
    return Candidate("native", "ONNX Runtime's kernel, a block for each head", write)


def _divided(node: Node) -> Candidate | None:
    """The kernel on heads of widths whose states it divides; None where that wastes much."""
    sizes = view(node)[1]
    d_k = next((width for width in DIVIDED_KEYS if sizes.d_k <= width), None)
    if d_k is None or 2 * sizes.d_k < d_k or 2 * sizes.d_v < DIVIDED_VALUES:
        return None
    if not takes(d_k, sizes.d_v + DIVIDED_VALUES):
        return None
    padded = sizes.d_k != d_k or sizes.d_v % DIVIDED_VALUES
    reason = (
        f"heads padded to {d_k} keys and multiples of {DIVIDED_VALUES} values, whose states the "
        "kernel divides among blocks"
        if padded
        else "widths whose states the kernel divides among blocks"
    )
    write = partial(kernels.native_columns, d_k=d_k, multiple=DIVIDED_VALUES)
    return Candidate("native_padded" if padded else "native", reason, write)


_RULES: Rules = {causal_conv.OP: _conv, linear_attention.OP: _attention}
_BFLOAT16_RULES: Rules = {**_RULES, causal_conv.OP: partial(_conv, wide=True)}


def _packed_attention(node: Node) -> Sequence[Candidate]:
    """The only operator for packed batches.

    Raises:
        UnsupportedModelError: it does not take this attention.
    """
    (found,) = _attention(node)
    if found.name != _GATED_DELTA_NET:
        raise UnsupportedModelError(
            "Packed batches are for attention that ONNX Runtime's GatedDeltaNet takes. Found "
            f"{linear_attention.OP.describe(node)}; what there is for it is {found.reason}. Leave "
            "out --packed-batches for rows of one length."
        )
    return [found]


_PACKED_RULES: Rules = {
    linear_attention.OP: _packed_attention,
    causal_conv_tokens.OP: _conv_tokens,
}


def _packed_lowering(op: Op, node: Node) -> Lowering:
    if op is causal_conv_tokens.OP:
        return partial(varlen_conv.lowering, ends=ENDS)
    return _gated_delta_net(node, ENDS).write


def configure(target: Target, options: Options) -> Target:
    """Return the target for these options.

    Raises:
        UsageError: an unknown precision or GPU, or an option that is of engines.
    """
    if options.quick or options.timing_cache:
        raise UsageError("--quick and --timing-cache are of targets that build engines.")
    check_precision(options)
    if not options.plugins and options.sms:
        raise UsageError("--sm names GPUs to compile kernels for, and --no-plugins wants none.")
    if options.packed and options.sms:
        raise UsageError(
            "--packed-batches are for ONNX Runtime's kernels, and --sm for linexport's."
        )
    contract.architectures(options.sms)
    if options == Options():
        return target
    return replace(
        target,
        candidates=partial(_candidates, options),
        prepare=partial(_prepare, options),
        written=partial(_written, options),
        options=options,
    )


def _prepare(options: Options, model: onnx.ModelProto) -> onnx.ModelProto:
    takes = cuda_bfloat16.OPERATORS if options.precision == "bf16" else None
    ready = with_root_mean_squares(model)
    if not options.sms:
        ready = tokens_first(ready) if options.packed else ready
        return half(ready, options.precision, takes, NORMS, half_caches=True)
    describe = partial(_described, options)
    return parser_form.mark_plugins(
        planned(options, ready, takes, NORMS, half_caches=True), describe, filled=False
    )


def _described(options: Options, op: Op, node: Node) -> Description | None:
    """Describe a node for the CUDA library, which wants its first output to be an activation."""
    dtype = DTYPES[options.precision]
    if contract.unsupported(op, node, dtype, options.sms):
        return None
    output = contract.tensors(op, node, dtype)[1][0]
    if output.type != TYPES[dtype]:
        return None
    return contract.describe_plugin(op, node, dtype, options.sms)


def _candidates(options: Options, op: Op, node: Node) -> Sequence[Candidate]:
    """The kernels where the node carries them; its function is for programs without the library."""
    if options.packed:
        return by_rules(_PACKED_RULES)(op, node)
    rules = _BFLOAT16_RULES if options.precision == "bf16" else _RULES
    functions = by_rules(rules)(op, node)
    if LAUNCH not in node.annotations:
        return functions
    return [replace(functions[0], name="kernels", reason="linexport's kernels")]


def _written(options: Options, lowered: onnx.ModelProto) -> onnx.ModelProto:
    if options.packed:
        return packed(lowered, _packed_lowering)
    found = parser_form.parsable(with_layers(options, lowered)) if options.sms else lowered
    return with_residuals(joint_projections(found, least=LEAST))


def _with_norms(lowered: onnx.ModelProto) -> onnx.ModelProto:
    """Return a float32 model with ONNX Runtime's norms; large weights may be external."""
    return with_residuals(with_root_mean_squares(lowered))


def _open(model: ModelSource, **keywords: Any) -> InferenceSession:
    """Open a model; one in bfloat16, which no CPU kernels take, is widened on the CPU."""
    on_cpu = keywords.get("execution", CPU_ONLY).provider == CPU
    return by_rows((open_here if on_cpu else OrtSession)(model, **keywords))


TARGET = Target(
    name="ort-cuda",
    candidates=by_rules(_RULES),
    open=_open,
    configure=configure,
    written=_with_norms,
)
