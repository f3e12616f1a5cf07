"""Activations of linear layers in a running module, of any caller.

    f(W x + b)        x (..., d), W (out, d)

Where what comes out goes, perhaps through dropout, into another linear layer and nowhere else, that
layer can be folded into the replacement.

A torch-function mode sees every ``F.linear`` and every activation that is given what came out of
one, in eager PyTorch, in exported programs and while ``torch.export`` traces: ``nn.Sequential``,
layers and activations that are attributes, and functions called in between are all the same to it.
Activations are identified by their order, as calls of softmax attention are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from linexport.models.feed_forward import ACTIVATIONS, NewLayer
from linexport.system.torch_internals.trees import pytree
from linexport.system.untyped import Keywords, Positional, TorchCallable

OTHERS = (
    *("celu", "elu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish"),
    *("relu6", "selu", "sigmoid", "softplus", "softsign"),
)
"""Names of activations without a form: they are reported."""


@dataclass(frozen=True)
class Activated:
    """An activation and the linear layer in front of it.

    Attributes:
        name: of the activation, one of ``ACTIVATIONS`` or of ``OTHERS``.
        input: x.
        weight: W.
        bias: b.
        plain: gives the activation's own result.
    """

    name: str
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    plain: Callable[[], Tensor]

    def linear(self) -> nn.Linear:
        """W and b as a layer, shared."""
        return as_linear(self.weight, self.bias)


def as_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """The layer of a weight and a bias, shared."""
    out, width = weight.shape
    layer = nn.Linear(width, out, bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


ComputeActivation = Callable[[int, Activated], Tensor]
"""Function in the place of an activation, by its number in the order of calls."""

Use = dict[str, Any]
"""Positional of a linear layer that is given what came out of an activation, by name."""

FollowActivation = Callable[[int, Activated, Use | None], Tensor | None]
"""Told every use of what came out of an activation; None for one that is not a linear layer.

Its result, if any, takes the place of the linear layer's.
"""


def leave(index: int, activated: Activated, use: Use | None) -> None:
    """Leave uses of activations as they are."""


class Activating(TorchFunctionMode):
    """Hands every activation of a linear layer to ``answer``, and uses of it to ``follow``."""

    def __init__(self, answer: ComputeActivation, follow: FollowActivation = leave) -> None:
        super().__init__()
        self.answer, self.follow, self.count = answer, follow, 0
        self.products: Any = WeakIdKeyDictionary()
        self.results: Any = WeakIdKeyDictionary()

    def __torch_function__(
        self,
        func: TorchCallable,
        types: object,
        args: Positional = (),
        kwargs: Keywords | None = None,
    ) -> object:
        kwargs = kwargs or {}
        # Of an operator "gelu.default"; of what works in place "relu_".
        name = getattr(func, "__name__", "").partition(".")[0].rstrip("_")
        used = self._used(args, kwargs)
        if name == "linear":
            given = dict(zip(("input", "weight", "bias"), args, strict=False), **kwargs)
            for one in used:
                folded = self.follow(*one, given)
                if folded is not None:
                    return folded
            result = func(*args, **kwargs)
            self.products[result] = given
            return result
        entering = args[0] if args else kwargs.get("input")
        known = name in ACTIVATIONS or name in OTHERS
        if not (known and isinstance(entering, Tensor) and entering in self.products):
            result = func(*args, **kwargs)
            if used and isinstance(result, Tensor):
                self._pass_on(name, used, result)
            return result
        if name == "gelu" and "tanh" in (*args[1:], kwargs.get("approximate")):
            name = "gelu-tanh"
        self.count += 1
        activated = Activated(
            name, **{"bias": None, **self.products[entering]}, plain=lambda: func(*args, **kwargs)
        )
        result = self.answer(self.count - 1, activated)
        self.results[result] = (self.count - 1, activated)
        return result

    def _used(self, args: object, kwargs: object) -> list[tuple[int, Activated]]:
        """Activations whose results are among the arguments."""
        if not self.results:
            return []
        leaves = pytree.tree_leaves((args, kwargs))
        return [self.results[x] for x in leaves if isinstance(x, Tensor) and x in self.results]

    def _pass_on(self, name: str, used: list[tuple[int, Activated]], result: Tensor) -> None:
        """Inference drops nothing: what comes out of dropout is what went in."""
        if name == "dropout":
            self.results[result] = used[0]
            return
        for one in used:
            self.follow(*one, None)


class Layers(nn.Module):
    """Kernel layers in place of some activations and what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.by_place = nn.ModuleDict()

    def put(self, places: Mapping[int, NewLayer]) -> None:
        """Answer the activations of these places from now on."""
        self.by_place.update({str(index): layer for index, layer in places.items()})

    def answer(self, index: int, activated: Activated) -> Tensor:
        """See ``ComputeActivation``."""
        if str(index) not in self.by_place:
            return activated.plain()
        layer: Any = self.by_place[str(index)]
        # One that is folded with the layer after it takes that layer's place.
        found: Tensor = activated.plain() if layer.config["folded"] else layer(activated.input)
        return found

    def follow(self, index: int, activated: Activated, use: Use | None) -> Tensor | None:
        """See ``FollowActivation``."""
        if use is None or str(index) not in self.by_place:
            return None
        layer: Any = self.by_place[str(index)]
        return layer(activated.input) if layer.config["folded"] else None
