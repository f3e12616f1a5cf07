"""From a module and forms to the module in linear form. Weights are shared, not copied.

A reference model of linexport is rebuilt from its config, so that it stays one. Any other module
is copied in structure only; its class is derived from, so that ``forward`` runs with its calls of
softmax attention answered by the forms.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from linexport.linearization import multihead
from linexport.linearization.calls import Attending
from linexport.linearization.forms import Forms, KernelAttention
from linexport.models.attention import LinearAttention
from linexport.models.registry import ReferenceModel, build
from linexport.models.softmax_attention import SoftmaxAttention
from linexport.models.stack import StackConfig

FORMS = "linear_forms"
"""Name of the child that holds the forms."""


def shared_copy(module: nn.Module) -> nn.Module:
    """The same modules anew with the very same parameters and buffers, in inference mode.

    ``MultiheadAttention`` calls softmax attention in the copy, always.
    """
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {id(x): x for x in tensors}
    found = copy.deepcopy(module, memo)
    for child in found.modules():
        child.training = False
    multihead.swap(found)
    return found


def rebuildable(module: nn.Module) -> bool:
    """A reference model whose attention is all of its own layers."""
    return isinstance(module, ReferenceModel) and issubclass(module.Config, StackConfig)


def with_forms(module: nn.Module, forms: Mapping[int, nn.Module]) -> nn.Module:
    """The module in linear form; ``module`` is a ``shared_copy`` of the original."""
    if isinstance(module, ReferenceModel) and rebuildable(module):
        return _rebuilt(module, forms)
    found = shared_copy(module)
    found.add_module(FORMS, Forms(forms))
    base = type(found)

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Attending(getattr(self, FORMS).answer):
            return base.forward(self, *args, **kwargs)

    found.__class__ = type(f"Linear{base.__name__}", (base,), {"forward": forward})
    return found


def _rebuilt(module: ReferenceModel, forms: Mapping[int, nn.Module]) -> ReferenceModel:
    """Its config says what differs by layer; the forms are in the order of the layers."""
    layers = [m for m in module.modules() if isinstance(m, LinearAttention | SoftmaxAttention)]
    softmax = [at for at, layer in enumerate(layers) if isinstance(layer, SoftmaxAttention)]
    config = dict(module.config)
    changes = [dict(c) for c in config["per_layer"] or [{}] * len(layers)]
    for index, form in forms.items():
        assert isinstance(form, KernelAttention)
        changes[softmax[index]] |= {
            "attention": "linear",
            "feature_map": form.feature_map.kind,
            "feature_map_options": asdict(form.feature_map.options),
            "normalize": True,
        }
    found = build(module.name, {**config, "per_layer": changes}).eval()
    for name, parameter in module.named_parameters():
        owner, _, own = name.rpartition(".")
        setattr(found.get_submodule(owner), own, parameter)
    for name, buffer in module.named_buffers():
        owner, _, own = name.rpartition(".")
        setattr(found.get_submodule(owner), own, buffer)
    new = [m for m in found.modules() if isinstance(m, LinearAttention | SoftmaxAttention)]
    for index, form in forms.items():
        assert isinstance(form, KernelAttention)
        new[softmax[index]].feature_map = form.feature_map
    return found


def own_tensors(original: nn.Module, linear: nn.Module) -> list[torch.Tensor]:
    """Parameters of the linear form, and draws of its maps, that the original does not have."""
    shared = {id(x) for x in (*original.parameters(), *original.buffers())}
    return [x for x in (*linear.parameters(), *linear.buffers()) if id(x) not in shared]
