"""Kernels and layers of GPU libraries that nothing stands in for, by what they compute.

A layer is here where it fails before it calls a kernel, so that its own message would be of GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from linexport.errors import UnsupportedModelError
from linexport.patches.gpu_kernels import GpuKernel

FLA = ("fla",)
BLOCKS = "attention to blocks chosen by scores"
CYCLIC = "a delta rule on keys that rotate with the state"
PRECONDITIONED = "a delta rule whose writes are preconditioned by a second state"
PATH = "softmax attention with products of Householder matrices between each query and key"
LOG_LINEAR = "linear attention with a state for each power of two of tokens"
COMPLEX_STATES = "a state space whose states are complex, with a step of the trapezoidal rule"

USE_LISTED = "Use a layer that linexport's page on GPU libraries lists as one that converts"
USE_MAMBA3_FOLDER = "Convert a model folder of the type mamba3, or use Mamba2"
NO_FORM = "of which linexport has no form without a GPU"


def _nothing(*_args: Any, **_kwargs: Any) -> Any:
    """Stand in for no kernel: those are refused before they are called."""


def _refused(
    names: tuple[str, ...], what: str, instead: str = USE_LISTED, packages: tuple[str, ...] = FLA
) -> GpuKernel:
    return GpuKernel(packages, names, _nothing, what, instead=instead)


KERNELS = (
    _refused(("parallel_path_attn",), PATH),
    _refused(("deltaformer_attn",), "softmax attention to values solved for token by token"),
    _refused(("parallel_nsa", "parallel_nsa_compression"), BLOCKS),
    _refused(("parallel_moba",), BLOCKS),
    _refused(("chunk_mesa_net",), "the solution of a linear system for each token"),
    _refused(
        ("chunk_momentum_delta_rule", "fused_recurrent_momentum_delta_rule"),
        "a delta rule with momentum, two states that read each other",
    ),
    _refused(
        ("chunk_precond_gated_delta_rule", "fused_recurrent_precond_gated_delta_rule"),
        PRECONDITIONED,
    ),
    _refused(("chunk_precond_kda", "fused_recurrent_precond_kda"), PRECONDITIONED),
    _refused(("chunk_log_linear_attn",), LOG_LINEAR, "Use Mamba2"),
    _refused(("chunk_cyfa", "fused_recurrent_cyfa"), CYCLIC),
    _refused(
        ("mamba3_siso_combined", "mamba3_mimo"), COMPLEX_STATES, USE_MAMBA3_FOLDER, ("mamba_ssm",)
    ),
)

LAYERS: Mapping[tuple[str, str], tuple[str, str, str]] = {
    ("fla", "CyclicFlowAttention"): (CYCLIC, NO_FORM, USE_LISTED),
    ("fla", "LogLinearMamba2"): (LOG_LINEAR, NO_FORM, "Use Mamba2"),
    ("fla", "Mamba3"): (COMPLEX_STATES, NO_FORM, USE_MAMBA3_FOLDER),
    ("fla", "MomAttention"): (
        "a delta rule on several memories, each of the tokens that are routed to it",
        NO_FORM,
        "Use GatedDeltaNet",
    ),
    ("fla", "PaTHAttention"): (PATH, NO_FORM, USE_LISTED),
    ("fla", "StickBreakingAttention"): (
        "stick-breaking attention",
        "and its code refuses to run on a CPU",
        "Call fla.ops.stickbreaking_attn.parallel_stickbreaking_attn in a layer of yours, which "
        "converts",
    ),
}
"""Layers by package and class: what they compute, why they are refused, and what to do."""


def refuse_layers(model: nn.Module) -> None:
    """Refuse a model with a layer that cannot run without a GPU.

    Args:
        model: any.

    Raises:
        UnsupportedModelError: it has one.
    """
    for place, part in model.named_modules():
        for kind in type(part).__mro__:
            found = LAYERS.get((kind.__module__.partition(".")[0], kind.__name__))
            if found is not None:
                what, reason, advice = found
                raise UnsupportedModelError(
                    f"{place or 'The model'} is a {kind.__name__} of {kind.__module__}: it "
                    f"computes {what}, {reason}. {advice}."
                )
