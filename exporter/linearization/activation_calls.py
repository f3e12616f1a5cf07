"""Activations of linear layers in a running module, of any caller.

    f(W x + b)        x (..., d), W (out, d)

A torch-function mode sees every ``F.linear`` and every activation that is given what came out of
one, in eager PyTorch, in exported programs and while ``torch.export`` traces: ``nn.Sequential``,
layers and activations that are attributes, and functions called in between are all the same to it.
Activations are told apart by their order, as calls of softmax attention are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from linexport.models.feed_forward import ACTIVATIONS, KernelFeedForward

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
        out, width = self.weight.shape
        layer = nn.Linear(width, out, self.bias is not None, device="meta")
        layer.weight = nn.Parameter(self.weight.detach(), requires_grad=False)
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias.detach(), requires_grad=False)
        return layer


ComputeActivation = Callable[[int, Activated], Tensor]
"""Function in the place of an activation, by its number in the order of calls."""


class Activating(TorchFunctionMode):
    """Hands every activation of a linear layer to ``answer``."""

    def __init__(self, answer: ComputeActivation) -> None:
        super().__init__()
        self.answer, self.count = answer, 0
        self.products: Any = WeakIdKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Of an operator "gelu.default"; of what works in place "relu_".
        name = getattr(func, "__name__", "").partition(".")[0].rstrip("_")
        if name == "linear":
            result = func(*args, **kwargs)
            self.products[result] = dict(
                zip(("input", "weight", "bias"), args, strict=False), **kwargs
            )
            return result
        given = args[0] if args else kwargs.get("input")
        known = name in ACTIVATIONS or name in OTHERS
        if not (known and isinstance(given, Tensor) and given in self.products):
            return func(*args, **kwargs)
        if name == "gelu" and "tanh" in (*args[1:], kwargs.get("approximate")):
            name = "gelu-tanh"
        self.count += 1
        return self.answer(
            self.count - 1,
            Activated(
                name,
                **{"bias": None, **self.products[given]},
                plain=lambda: func(*args, **kwargs),
            ),
        )


class Layers(nn.Module):
    """Kernel layers in place of some activations and what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.by_place = nn.ModuleDict()

    def put(self, places: Mapping[int, KernelFeedForward]) -> None:
        """Answer the activations of these places from now on."""
        self.by_place.update({str(index): layer for index, layer in places.items()})

    def answer(self, index: int, activated: Activated) -> Tensor:
        """See ``ComputeActivation``."""
        if str(index) not in self.by_place:
            return activated.plain()
        found: Tensor = self.by_place[str(index)](activated.input)
        return found
