"""Operators that slide over an axis: convolutions and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from linexport.token_flow.axes import Axis, Span, fixed, has_tokens, size_of, span_of
from linexport.token_flow.interpreter import FlowKind, Interpreter, rule
from linexport.token_flow.lengths import of
from linexport.token_flow.rules.pieces import filled
from linexport.token_flow.values import MixingError, TokenValue

ADVICE = "a causal convolution, padded on the left alone, gets a state"


@rule("Conv", "ConvTranspose", "ConvInteger")
def convolution(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow a convolution."""
    given, weight, *rest = a.inputs(node)
    kernel = [size_of(axis).number for axis in weight.known_axes[2:]]
    if weight.spans or any(v.spans for v in rest):
        raise MixingError("has a kernel of tokens")
    transposed = node.op == "ConvTranspose"
    channels = size_of(weight.known_axes[1 if transposed else 0])
    if transposed:
        channels = channels * of(node.attrs.get("group", 1))
    return [_slid(a, node, given, kernel, fixed(channels))]


@rule("AveragePool", "MaxPool", "LpPool")
def pooling(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow a mean, a maximum or a norm over a window."""
    given = a.value(node.inputs[0])
    found = _slid(a, node, given, list(node.attrs["kernel_shape"]), given.known_axes[1])
    return [found, found][: len(node.outputs)]


@rule("GlobalAveragePool", "GlobalMaxPool")
def global_pooling(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow a mean over all axes behind the channels."""
    given = a.value(node.inputs[0])
    if any(map(has_tokens, given.known_axes[2:])):
        raise MixingError("reduces over all tokens of a call")
    axes = (*given.known_axes[:2], *[()] * (given.rank - 2))
    return [replace(given.without_numbers(), axes=axes)]


def _slid(
    a: Interpreter, node: gs.Node, given: TokenValue, kernel: Sequence[int | None], channels: Axis
) -> TokenValue:
    """Return what a window makes of the axes behind the channels."""
    a.check_same_everywhere(given)
    if has_tokens(given.known_axes[1]):
        raise MixingError("takes tokens for channels")
    count = len(kernel)
    pads = list(node.attrs.get("pads") or [0] * 2 * count)
    strides = list(node.attrs.get("strides") or [1] * count)
    gaps = list(node.attrs.get("dilations") or [1] * count)
    named = node.attrs.get("auto_pad") not in (None, "NOTSET", b"NOTSET", "VALID", b"VALID")
    axes = [given.known_axes[0], channels]
    for n, axis in enumerate(given.known_axes[2:]):
        width = kernel[n]
        if not has_tokens(axis):
            axes.append(_other_axis(a, node, n))
            continue
        span = span_of(axis)
        plain = span is not None and width is not None and node.op != "ConvTranspose"
        if not plain or (named and width != 1):
            raise MixingError("slides over tokens in a way that cannot be followed", ADVICE)
        assert span is not None and width is not None
        reach = gaps[n] * (width - 1)
        axes.append(_window(a, span, reach, strides[n], pads[n], pads[n + count]))
    return replace(given.without_numbers(), axes=tuple(axes))


def _other_axis(a: Interpreter, node: gs.Node, place: int) -> Axis:
    """Return an axis without tokens of a result, as the graph states its size."""
    return fixed(a.axis_size(None, node.outputs[0], place + 2))


def _window(a: Interpreter, span: Span, reach: int, stride: int, front: int, behind: int) -> Axis:
    """Return the tokens of a result, each called by the last that it is made of."""
    each = span.step
    if stride != 1:
        chunk = of(stride * each)
        whole = reach < stride and not front and not behind
        ends = (span.start, span.stop)
        if not (whole and span.aligned and all(e.divided(chunk) is not None for e in ends)):
            raise MixingError(
                "takes every few tokens, counted from the first of a call",
                "let the number of tokens be a multiple of the stride: --dim",
            )
        return (replace(span, step=stride * each),)
    if front:
        span = filled(a, span, span.start - of(front * each))
    start = span.start + of(reach * each)
    real = None if span.real is None else span.real + of(reach * each)
    if reach:
        a.note(FlowKind.WINDOW, reach * each, span.rows)
    moved_by = a.number if reach or front or behind else span.moved_by
    stop = span.stop + of(behind * each)
    made = replace(span, start=start, stop=stop, real=real, moved_by=moved_by)
    late = real is not None and (real - start).number
    if real is not None and isinstance(late, int) and late <= 0:
        made = replace(made, real=None, filled_by=None)
    return (made,)
