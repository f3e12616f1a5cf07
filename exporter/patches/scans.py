"""Scans of packages, written as trees or blocks -> the loop over tokens that they compute.

    h_t = a_t h_{t-1} + b_t

``trace`` writes such a loop as Scan, for any number of tokens; the trees fix that number. A
function is swapped wherever a module of its package, or an object in the model, holds it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["SCANS", "Function", "as_loops", "has_scans"]


@dataclass(frozen=True)
class Function:
    """A function of a package.

    Attributes:
        module: the module that defines it.
        name: in that module; "Class.method" for a method.
        replacement: called in its place, with the same arguments.
        tried: version of the package it was tried with, as "package version".
    """

    module: str
    name: str
    replacement: Callable[..., Any]
    tried: str


def recurrence(decay: Tensor, value: Tensor) -> Tensor:
    """Return h_t = decay_t h_{t-1} + value_t along dimension 1."""
    state, states = torch.zeros_like(value[:, 0]), []
    for t in range(value.shape[1]):
        state = decay[:, t] * state + value[:, t]
        states.append(state)
    return torch.stack(states, 1)


def _of_pair(operator: Any, elems: Sequence[Tensor], *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Stands in for ``associative_scan``; those packages scan with no other operator."""
    decay, value = elems
    return _products(decay), recurrence(decay, value)


def _products(decay: Tensor) -> Tensor:
    product, products = torch.ones_like(decay[:, 0]), []
    for t in range(decay.shape[1]):
        product = product * decay[:, t]
        products.append(product)
    return torch.stack(products, 1)


def _accelerated(gates: Tensor, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stands in for ``accelerated_scan.ref.scan`` of (B, C, T)."""
    reverse = kwargs.get("reverse", False)
    gates, tokens = (x.transpose(1, 2) for x in (gates, tokens))
    if reverse:
        return recurrence(gates.flip(1), tokens.flip(1)).flip(1).transpose(1, 2)
    return recurrence(gates, tokens).transpose(1, 2)


def _method(self: Any, decay: Tensor, value: Tensor) -> Tensor:
    """Stands in for a method of ``recurrence``'s arguments."""
    return recurrence(decay, value)


def _linear_scan(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Stands in for ``mingru.linear_scan``."""
    return _products(a), recurrence(a, b)


def _gated_delta(*args: Any, chunk_size: int = 64, **kwargs: Any) -> Any:
    """Stands in for ``opengdn``'s chunks: its own loop over tokens."""
    reference = importlib.import_module("opengdn.reference")
    return reference.gated_delta(*args, **kwargs)


SCANS = (
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
    Function("opengdn.chunkwise", "gated_delta_chunkwise", _gated_delta, "opengdn 0.1.0"),
)


def has_scans(model: nn.Module) -> bool:
    """Return whether a model has layers of a package whose scans are swapped."""
    packages = {function.module.partition(".")[0] for function in SCANS}
    return any(type(m).__module__.partition(".")[0] in packages for m in model.modules())


@contextmanager
def as_loops(model: nn.Module) -> Iterator[None]:
    """Swap the scans of packages that are imported; all are restored at the end."""
    with ExitStack() as restore:
        for function in SCANS:
            defining = sys.modules.get(function.module)
            if defining is None:
                continue
            owner, _, name = function.name.rpartition(".")
            holder = getattr(defining, owner, None) if owner else defining
            original = getattr(holder, name, None)
            if original is None:
                continue
            for place, key in _holders(function.module, holder, name, original, model):
                restore.callback(setattr, place, key, original)
                setattr(place, key, function.replacement)
        yield


def _holders(
    module: str, holder: Any, name: str, original: Any, model: nn.Module
) -> list[tuple[Any, str]]:
    """Return where a function is looked up: its package, the model's modules and objects."""
    package = module.partition(".")[0]
    places = [(holder, name)]
    own_modules = {type(m).__module__ for m in model.modules()}
    for own, found in list(sys.modules.items()):
        if own in own_modules or own == package or own.startswith(f"{package}."):
            places += [(found, k) for k, x in vars(found).items() if x is original]
    places += [(m, k) for m in model.modules() for k, x in vars(m).items() if x is original]
    return list({(id(place), key): (place, key) for place, key in places}.values())
