"""Linear layers with their activations inside other modules, and kernel layers in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from linexport.errors import UsageError
from linexport.models.feed_forward.activations import known
from linexport.models.feed_forward.chebyshev_layer import ChebyshevFeedForward
from linexport.models.feed_forward.layer import KernelFeedForward
from linexport.models.feed_forward.low_rank import LowRankFeedForward

NewLayer = KernelFeedForward | LowRankFeedForward | ChebyshevFeedForward
"""New layers in the place of a pair; their config says whether the layer after it is folded in."""


@dataclass(frozen=True)
class Pair:
    """Two modules of an ``nn.Sequential``, one after the other, and a linear one after them if any.

    Attributes:
        name: path of the linear layer.
        owner: the ``nn.Sequential``.
        first: name of the linear layer in it.
        second: name of the activation in it.
        third: name of a linear layer after these, unless an activation follows it; else None.
    """

    name: str
    owner: nn.Module
    first: str
    second: str
    third: str | None = None

    @property
    def linear(self) -> nn.Linear:
        """W and b."""
        found = self.owner.get_submodule(self.first)
        assert isinstance(found, nn.Linear)
        return found

    @property
    def following(self) -> nn.Linear | None:
        """The linear layer ``third``."""
        found = None if self.third is None else self.owner.get_submodule(self.third)
        assert found is None or isinstance(found, nn.Linear)
        return found

    def replace(self, layer: NewLayer) -> None:
        """Put ``layer`` in the place of both, and of the third if that is folded into it.

        Names of later modules stay as they are.
        """
        setattr(self.owner, self.first, layer)
        setattr(self.owner, self.second, nn.Identity())
        if layer.config["folded"]:
            assert self.third is not None
            setattr(self.owner, self.third, nn.Identity())


def linear_activation_pairs(module: nn.Module) -> list[Pair]:
    """Every linear layer that an activation follows in an ``nn.Sequential``."""
    found = []
    for path, owner in module.named_modules():
        if not isinstance(owner, nn.Sequential):
            continue
        children = list(owner._modules.items())
        for at, ((first, linear), (second, activation)) in enumerate(pairwise(children)):
            if type(linear) is nn.Linear and activation is not None and known(activation):
                name = f"{path}.{first}" if path else first
                found.append(Pair(name, owner, first, second, _third(children[at + 2 :])))
    return found


def _third(rest: Sequence[tuple[str, nn.Module | None]]) -> str | None:
    """A linear layer first in ``rest``, whose output no activation is given."""
    if not rest or type(rest[0][1]) is not nn.Linear:
        return None
    return None if len(rest) > 1 and rest[1][1] is not None else rest[0][0]


def new_layer(config: Mapping[str, object]) -> NewLayer:
    """The layer of a ``config``, of any kind.

    Raises:
        UsageError: names what does not fit.
    """
    if "rank" in config:
        return LowRankFeedForward.from_config(config)
    if "degree" in config:
        return ChebyshevFeedForward.from_config(config)
    return KernelFeedForward.from_config(config)


def substitute(module: nn.Module, configs: Mapping[str, object] | None) -> None:
    """Put kernel layers, to load a state_dict into, in the place of pairs, in place.

    Args:
        module: a model with pairs.
        configs: of ``KernelFeedForward``, by the names of pairs; None: no layers.

    Raises:
        UsageError: the module has no such pair, or its sizes are not those of the config.
    """
    found = {pair.name: pair for pair in linear_activation_pairs(module)} if configs else {}
    for name, config in (configs or {}).items():
        if name not in found or not isinstance(config, dict):
            raise UsageError(
                f"kernel_feed_forward has {name!r}; expected configs by the names of linear layers "
                f"that an activation follows: {', '.join(found) or 'there are none'}."
            )
        linear = found[name].linear
        layer = new_layer(config)
        last = found[name].following if layer.config["folded"] else linear
        if last is None:
            raise UsageError(
                f"The kernel layer {name} has the linear layer after its activation folded in, and "
                "there is none."
            )
        sizes = (layer.config["in_features"], layer.config["out_features"])
        if sizes != (linear.in_features, last.out_features):
            raise UsageError(
                f"The kernel layer {name} is of {sizes[0]} to {sizes[1]} features; expected "
                f"{linear.in_features} to {last.out_features}."
            )
        found[name].replace(layer)
