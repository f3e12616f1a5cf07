"""Scans of packages, written as trees or blocks -> the loop over tokens that they compute.

    h_t = a_t h_{t-1} + b_t

``trace`` writes such a loop as Scan, for any number of tokens; the trees fix that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from linexport.patches.packages import Function, swapped
from linexport.patches.recurrent_layers import LAYERS, has_recurrent_layers
from linexport.system.torch_internals.exports import SCAN
from linexport.system.torch_internals.trees import pytree
from linexport.system.versions import TORCH

__all__ = ["SCANS", "as_loops", "has_scans"]


def recurrence(decay: Tensor, value: Tensor) -> Tensor:
    """Return h_t = decay_t h_{t-1} + value_t along dimension 1."""
    state, states = torch.zeros_like(value[:, 0]), []
    for t in range(value.shape[1]):
        state = decay[:, t] * state + value[:, t]
        states.append(state)
    return torch.stack(states, 1)


def _of_pair(
    operator: object, elems: Sequence[Tensor], *_: object, **__: object
) -> tuple[Tensor, Tensor]:
    """Stands in for ``associative_scan``; those packages scan with no other operator."""
    decay, value = elems
    return products(decay), recurrence(decay, value)


def products(decay: Tensor) -> Tensor:
    """Return a_1 a_2 ... a_t along dimension 1."""
    product, products = torch.ones_like(decay[:, 0]), []
    for t in range(decay.shape[1]):
        product = product * decay[:, t]
        products.append(product)
    return torch.stack(products, 1)


def _accelerated(gates: Tensor, tokens: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Stands in for ``accelerated_scan.ref.scan`` of (B, C, T)."""
    reverse = kwargs.get("reverse", False)
    gates, tokens = (x.transpose(1, 2) for x in (gates, tokens))
    if reverse:
        return recurrence(gates.flip(1), tokens.flip(1)).flip(1).transpose(1, 2)
    return recurrence(gates, tokens).transpose(1, 2)


def _method(self: object, decay: Tensor, value: Tensor) -> Tensor:
    """Stands in for a method of ``recurrence``'s arguments."""
    return recurrence(decay, value)


def _linear_scan(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Stands in for ``mingru.linear_scan``."""
    return products(a), recurrence(a, b)


def _matrix_scan(matrices: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Stands in for ``mingru.matrix_scan`` of (B, T, n, 2, 2) and (B, T, n, 2)."""
    state, states = torch.zeros_like(added[:, 0]), []
    product, products = torch.eye(2, dtype=added.dtype).expand_as(matrices[:, 0]), []
    for t in range(added.shape[1]):
        product = matrices[:, t] @ product
        state = (matrices[:, t] @ state[..., None])[..., 0] + added[:, t]
        products.append(product)
        states.append(state)
    return torch.stack(products, 1), torch.stack(states, 1)


def _associative(
    combine_fn: Any, xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
) -> object:
    """Stands in for PyTorch's ``associative_scan``, of any operator."""
    leaves, structure = pytree.tree_flatten(xs)
    leaves = [_with_both_parts(x) if x.is_complex() else x for x in leaves]
    tokens = [x.movedim(dim, 0).flip(0) if reverse else x.movedim(dim, 0) for x in leaves]
    state = pytree.tree_unflatten([x[0] for x in tokens], structure)
    states = [pytree.tree_leaves(state)]
    for t in range(1, tokens[0].shape[0]):
        state = combine_fn(state, pytree.tree_unflatten([x[t] for x in tokens], structure))
        states.append(pytree.tree_leaves(state))
    found = [torch.stack(list(steps)) for steps in zip(*states, strict=True)]
    results = [(x.flip(0) if reverse else x).movedim(0, dim) for x in found]
    return pytree.tree_unflatten(results, structure)


def _with_both_parts(x: Tensor) -> Tensor:
    """Return complex numbers of which both parts are computed, also where one is seen to be zero.

    The first state is a token's value, and must be made as the states are that follow. Of an
    infinite number the sign times 0 is 0.
    """
    return torch.complex(x.real, x.imag + 0 * x.real.sign())


ASSOCIATIVE = Function(SCAN.module, SCAN.name, _associative, str(TORCH))

SCANS = (
    ASSOCIATIVE,
    Function("mambapy.pscan", "pscan", recurrence, "mambapy 1.2.0"),
    Function("accelerated_scan.ref", "scan", _accelerated, "accelerated-scan 0.3.1"),
    Function(
        "gateloop_transformer.associative_scan",
        "associative_scan",
        _of_pair,
        "gateloop-transformer 0.2.5",
    ),
    Function("assoc_scan.assoc_scan", "associative_scan", _of_pair, "assoc-scan 0.0.6"),
    Function("minimamba.s6", "S6._optimized_parallel_scan", _method, "minimamba 1.0.1"),
    Function("mingru.min_gru", "linear_scan", _linear_scan, "mingru-scans 0.2.0"),
    Function("mingru.min_gru", "matrix_scan", _matrix_scan, "mingru-scans 0.2.0"),
)


def has_scans(model: nn.Module) -> bool:
    """Return whether a model has layers of a package whose scans are swapped, or of PyTorch."""
    if has_recurrent_layers(model):
        return True
    packages = {function.module.partition(".")[0] for function in SCANS[1:]}
    return any(type(m).__module__.partition(".")[0] in packages for m in model.modules())


def as_loops(model: nn.Module) -> AbstractContextManager[None]:
    """Swap the scans of packages that are imported, and recurrent layers of PyTorch."""
    return swapped((*SCANS, *LAYERS), model)
