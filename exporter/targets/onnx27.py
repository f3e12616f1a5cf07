"""Target ``onnx27``: the standard LinearAttention and CausalConvWithState of ONNX opset 27.

ONNX Runtime 1.31 loads opset 27 only on request, 1.32 by default. Both run these operators by
their own function bodies; the target is for runtimes that implement them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import onnx
from onnx import defs, version_converter

from linexport.errors import BuildError, EnvironmentProblemError
from linexport.graph.external_data import ModelSource
from linexport.plugins.ops import causal_conv, linear_attention
from linexport.plugins.ops.linear_attention import multiplied_out, view
from linexport.plugins.ops.op import Node
from linexport.targets.base import OrtSession, Target
from linexport.targets.lowering import kernels
from linexport.targets.lowering.choice import Candidate, by_rules

OPSET = 27

CONVERTIBLE = 26
"""The highest opset that onnx's converter reaches with an adapter for every operator."""

UNRELEASED = "ALLOW_RELEASED_ONNX_OPSET_ONLY"
"""Environment variable by which ONNX Runtime refuses opsets newer than it knows."""


REASON = "the operator of ONNX opset 27"


def _conv(node: Node) -> Sequence[Candidate]:
    write = partial(kernels.native_conv, dialect=kernels.ONNX_27)
    return [Candidate("standard", REASON, write)]


def _attention(node: Node) -> Sequence[Candidate]:
    """The standard operator is causal."""
    if not view(node)[0].causal:
        return []
    if kernels.by_kappa(node):
        return [Candidate("portable", kernels.BY_KAPPA, linear_attention.OP.portable)]
    write = partial(kernels.native, dialect=kernels.ONNX_27)
    return [Candidate("standard", REASON, multiplied_out(write))]


def raise_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model at opset 27.

    onnx's converter stops at 26. Operators that 27 left as they were need no conversion beyond.

    Raises:
        EnvironmentProblemError: the onnx that is installed has no opset 27.
        BuildError: the model uses an operator that opset 27 changed.
    """
    if defs.onnx_opset_version() < OPSET:
        raise EnvironmentProblemError(
            f"onnx {onnx.__version__} ends with opset {defs.onnx_opset_version()}; target onnx27 "
            "needs onnx 1.22 or newer: pip install --upgrade onnx. Targets ort and onnx do not."
        )
    raised = version_converter.convert_version(model, CONVERTIBLE)
    for node in raised.graph.node:
        if node.domain == "" and _since(node.op_type, OPSET) != _since(node.op_type, CONVERTIBLE):
            raise BuildError(
                f"{node.op_type} {node.name!r} changed in ONNX opset {OPSET}, and onnx has no "
                "adapter for it. Use --target ort or --target onnx."
            )
    for opset in raised.opset_import:
        if opset.domain == "":
            opset.version = OPSET
    return raised


def _since(op_type: str, version: int) -> int:
    return int(defs.get_schema(op_type, version, "").since_version)


def open_session(model: ModelSource, **keywords: Any) -> OrtSession:
    """Open in ONNX Runtime, as ``OrtSession`` does, with its check for released opsets off."""
    saved = os.environ.get(UNRELEASED)
    os.environ[UNRELEASED] = "0"
    try:
        return OrtSession(model, **keywords)
    finally:
        if saved is None:
            del os.environ[UNRELEASED]
        else:
            os.environ[UNRELEASED] = saved


TARGET = Target(
    name="onnx27",
    candidates=by_rules({causal_conv.OP: _conv, linear_attention.OP: _attention}),
    open=open_session,
    prepare=raise_opset,
)
