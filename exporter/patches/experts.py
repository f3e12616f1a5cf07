"""Mixtures of experts in transformers -> ``linexport.MixtureOfExperts``.

    experts(hidden_states (N, H), top_k_index (N, k), top_k_weights (N, k)) -> (N, H)

The library has an interface for implementations of this function, which models choose by name; so
nothing is swapped. Its own loop over the experts that were hit cannot be traced, and its form
without one gathers the weights of k experts for every token, which for a prompt is more memory than
there is. Experts that the op does not describe, with biases, norms, transposed weights or a gate of
another kind, are computed for all tokens: E / k times the products, and E values for every one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from linexport.models.functional import mixture_of_experts
from linexport.patches import parameters
from linexport.patches.library import find
from linexport.plugins.ops.mixture_of_experts import ExpertFunction
from linexport.system.untyped import LibraryObject

NAME = "linexport"
"""Name of the implementation, while a model is traced."""

ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "silu": "silu",
    "GELUActivation": "gelu",
    "ReLUSquaredActivation": "relu2",
}
"""Activations that the op has, by the names of classes and of functions."""

CAPPED = {
    (f"{family}Experts._apply_gate", f"{family}SoftcappedSwiGLU")
    for family in ("Inkling2", "Inkling2Loop")
}
"""Names of gates with soft caps, and of their activations, which have ``gate_softcap`` and
``up_softcap``."""


@contextmanager
def applied(model: LibraryObject) -> Iterator[None]:
    """The experts of a model computed by the op; restored afterwards.

    Raises:
        EnvironmentProblemError: this transformers has no such interface.
        UnsupportedModelError: it has other parameters than are expected.
    """
    if not any(hasattr(part, "_apply_gate") for part in model.modules()):
        yield
        return
    functions = find("integrations.moe", "ALL_EXPERTS_FUNCTIONS")
    like = find("integrations.moe", "batched_mm_experts_forward")
    before = model.get_experts_implementation()
    functions[NAME] = parameters.bind(f"{like.__module__}.{like.__name__}", like, forward)
    try:
        model.set_experts_implementation(NAME)
        yield
    finally:
        model.set_experts_implementation(before)
        del functions[NAME]


def forward(
    self: LibraryObject, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Stands in for ``forward`` of a module of experts."""
    function = described(self)
    if function is None:
        return _every_expert(self, hidden_states, top_k_index, top_k_weights)
    return mixture_of_experts(
        hidden_states,
        top_k_index,
        top_k_weights.to(hidden_states.dtype),
        self.gate_up_proj if self.has_gate else self.up_proj,
        self.down_proj,
        **asdict(function),
    )


def _every_expert(module: LibraryObject, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """Return y (N, H), all tokens through all experts; activations get rows, as in the library."""

    def product(x: Tensor, name: str) -> Tensor:
        matrices = getattr(module, name)
        y = x @ (matrices if module.is_transposed else matrices.transpose(1, 2))
        return y + getattr(module, f"{name}_bias")[:, None] if module.has_bias else y

    pairs = module.down_proj.shape[0], x.shape[0]
    first, act = ("gate_up_proj", "_apply_gate") if module.has_gate else ("up_proj", "act_fn")
    h = getattr(module, act)(product(x, first).flatten(0, 1))
    y = product(h.unflatten(0, pairs), "down_proj")
    if _has_norm(module):
        y = module.post_expert_norm(y.flatten(0, 1)).unflatten(0, pairs)
    share = weight.new_zeros(pairs[::-1]).scatter_add(1, index, weight)
    return torch.einsum("ne,enh->nh", share.to(y.dtype), y).to(x.dtype)


def described(module: LibraryObject) -> ExpertFunction | None:
    """Return what the op computes between the products of these experts; None if it cannot."""
    if module.has_bias or _has_norm(module) or module.is_transposed:
        return None
    # Experts with a gate of their own may have no such attribute.
    gate = type(module)._apply_gate
    act: Any = getattr(module, "act_fn", None)
    activation = getattr(act, "__name__", type(act).__name__)
    if gate is find("integrations.moe", "_default_apply_gate") and activation in ACTIVATIONS:
        return ExpertFunction(ACTIVATIONS[activation], module.has_gate)
    if (gate.__qualname__, activation) in CAPPED and module.has_gate:
        caps = act.gate_softcap.softcap, act.up_softcap.softcap
        # With a cap of zero the library's quotient is NaN, and the op has no cap.
        return ExpertFunction("silu", True, *caps) if min(caps) > 0 else None
    return None


def _has_norm(module: object) -> bool:
    """Return whether experts have a norm behind them, which transformers 5.18 does not know."""
    return bool(getattr(module, "has_post_expert_norm", False))
