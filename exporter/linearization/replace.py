"""From a module and forms to the module in linear form. Weights are shared, not copied.

A stack of linexport's layers is rebuilt from its config and remains such a stack. Any other module
is copied in structure only, and held by a module of the same signature that answers its calls of
softmax attention by the forms.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from torch import nn

from linexport.linearization.activation_calls import (
    Activating,
    ComputeActivation,
    FollowActivation,
    Layers,
    leave,
)
from linexport.linearization.forms import Forms, KernelAttention
from linexport.linearization.window_forms import WindowForm
from linexport.models import multihead_attention
from linexport.models.attention import LinearAttention
from linexport.models.registry import ReferenceModel, build
from linexport.models.softmax_attention import SoftmaxAttention
from linexport.models.softmax_calls import Attending
from linexport.models.stack import StackConfig
from linexport.system.copies import copied

M = TypeVar("M", bound=nn.Module)


def inference_copy(module: nn.Module) -> nn.Module:
    """Copy the modules, in inference mode, sharing their parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, object] = {id(x): x for x in tensors}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, on copies of its own programs
        found = copied(module, memo)
    return _inference(found)


def _inference(module: M) -> M:
    """``eval()``, which modules of exported programs do not have."""
    for child in module.modules():
        child.training = False
    return module


def shared_copy(module: nn.Module) -> nn.Module:
    """An ``inference_copy`` in which ``MultiheadAttention`` calls softmax attention, always."""
    found = inference_copy(module)
    multihead_attention.swap(found)
    return found


def rebuildable(module: nn.Module) -> bool:
    """A reference model whose attention is all of its own layers."""
    return isinstance(module, ReferenceModel) and issubclass(module.Config, StackConfig)


def with_forms(module: nn.Module, forms: Mapping[int, nn.Module]) -> nn.Module:
    """The module in linear form; ``module`` is a ``shared_copy`` of the original."""
    if isinstance(module, ReferenceModel) and rebuildable(module):
        return _rebuilt(module, forms)
    base = type(module)

    # torch.export names inputs after the parameters of forward: they are to be the original's.
    @functools.wraps(base.forward)
    def forward(self: WithForms, *args: Any, **kwargs: Any) -> Any:
        with self.answered(self.layers.answer, self.layers.follow):
            return self.inner(*args, **kwargs)

    made: type[WithForms] = type(f"Linear{base.__name__}", (WithForms,), {"forward": forward})
    return _inference(made(shared_copy(module), Forms(forms)))


class WithForms(nn.Module):
    """A module whose calls of softmax attention, and activations, are answered by forms."""

    def __init__(self, inner: nn.Module, forms: Forms) -> None:
        super().__init__()
        self.inner, self.forms, self.layers = inner, forms, Layers()

    @contextmanager
    def answered(
        self, answer: ComputeActivation, follow: FollowActivation = leave
    ) -> Iterator[None]:
        """Runs of ``inner`` are in linear form, with activations handed to ``answer``."""
        # Activations of the module itself: those inside forms stay as they are.
        with Attending(self.forms.answer), Activating(answer, follow):
            yield


def without(
    original: nn.Module,
    linear: nn.Module,
    forms: Mapping[int, nn.Module],
    owners: Iterable[str],
) -> nn.Module:
    """The linear form with ``forms`` alone, and modules named ``owners`` as they are originally.

    Args:
        original: a ``shared_copy`` of it.
        linear: a linear form of it, whose parameters may have been learned.
        forms: those that remain.
        owners: paths of modules that get the original's parameters.
    """
    found = with_forms(original, forms)
    taken = tuple(owners)
    for name, parameter in stem(linear).named_parameters():
        owner, _, own = name.rpartition(".")
        if not any(owner == one or owner.startswith(f"{one}.") for one in taken):
            setattr(stem(found).get_submodule(owner), own, parameter)
    return found


def stem(linear: nn.Module) -> nn.Module:
    """Module that has the original's parameters by their names."""
    return linear.inner if isinstance(linear, WithForms) else linear


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
        if isinstance(form, WindowForm):
            spec = form.window
            changes[softmax[index]] |= {
                "attention": "window",
                "window": spec.window,
                "sinks": spec.sinks,
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
        layer = new[softmax[index]]
        layer.feature_map = form.feature_map
        _scale_queries(layer.query, form)
        if isinstance(form, WindowForm):
            layer.far_gain = form.far_gain
    return found


def _scale_queries(query: nn.Linear, form: KernelAttention) -> None:
    """Multiply the projection of queries by the gains of a form, one a head, that are not 1."""
    if not bool((form.gain == 1).all()):
        gains = form.gain.detach().repeat_interleave(query.weight.shape[0] // len(form.gain))
        query.weight = nn.Parameter(query.weight.detach() * gains[:, None])
