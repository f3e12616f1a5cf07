"""Linear layers with their activations inside other modules, and kernel layers in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from linexport.errors import UsageError
from linexport.models.feed_forward.activations import known
from linexport.models.feed_forward.layer import KernelFeedForward


@dataclass(frozen=True)
class Pair:
    """Two modules of an ``nn.Sequential``, one after the other.

    Attributes:
        name: path of the linear layer.
        owner: the ``nn.Sequential``.
        first: name of the linear layer in it.
        second: name of the activation in it.
    """

    name: str
    owner: nn.Module
    first: str
    second: str

    @property
    def linear(self) -> nn.Linear:
        """W and b."""
        found = self.owner.get_submodule(self.first)
        assert isinstance(found, nn.Linear)
        return found

    def replace(self, layer: KernelFeedForward) -> None:
        """Put ``layer`` in the place of both; names of later modules stay as they are."""
        setattr(self.owner, self.first, layer)
        setattr(self.owner, self.second, nn.Identity())


def linear_activation_pairs(module: nn.Module) -> list[Pair]:
    """Every linear layer that an activation follows in an ``nn.Sequential``."""
    found = []
    for path, owner in module.named_modules():
        if not isinstance(owner, nn.Sequential):
            continue
        for (first, linear), (second, activation) in pairwise(owner._modules.items()):
            if type(linear) is nn.Linear and activation is not None and known(activation):
                found.append(Pair(f"{path}.{first}" if path else first, owner, first, second))
    return found


def substitute(module: nn.Module, configs: Mapping[str, Any] | None) -> None:
    """Put kernel layers, to load a state_dict into, in the place of pairs, in place.

    Args:
        module: a model with pairs.
        configs: of ``KernelFeedForward``, by the names of pairs; None: no layers.

    Raises:
        UsageError: there is no such pair, or its sizes are not those of the config.
    """
    found = {pair.name: pair for pair in linear_activation_pairs(module)} if configs else {}
    for name, config in (configs or {}).items():
        if name not in found or not isinstance(config, dict):
            raise UsageError(
                f"kernel_feed_forward has {name!r}; expected configs by the names of linear layers "
                f"that an activation follows: {', '.join(found) or 'there are none'}."
            )
        linear = found[name].linear
        layer = KernelFeedForward.from_config(config)
        sizes = (layer.config["in_features"], layer.config["out_features"])
        if sizes != (linear.in_features, linear.out_features):
            raise UsageError(
                f"The kernel layer {name} is of {sizes[0]} to {sizes[1]} features; expected "
                f"{linear.in_features} to {linear.out_features}."
            )
        found[name].replace(layer)
