"""Calls of softmax attention in a running module, of any caller.

    softmax(scale q k^T + mask) v      q (B, H, T, d), k (B, H_kv, S, d), v (B, H_kv, S, d_v)

A torch-function mode sees every call of ``F.scaled_dot_product_attention`` or of its operator in
an exported program, in eager PyTorch and while ``torch.export`` traces. Calls are identified by
their order: that of a module in inference mode does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from linexport.system.untyped import Keywords, Positional, TorchCallable

_OPERATOR = torch.ops.aten.scaled_dot_product_attention
ATTENTION = (F.scaled_dot_product_attention, _OPERATOR, _OPERATOR.default)
PROJECTIONS = ("linear", "addmm", "matmul", "mm")
"""Names of the functions that an output projection is one call of."""


@dataclass(frozen=True)
class Call:
    """Positional of one call, by the names of ``F.scaled_dot_product_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def factor(self) -> float:
        """Scale of q . k."""
        return 1 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale

    def softmax(self) -> Tensor:
        """The attention itself."""
        return F.scaled_dot_product_attention(**vars(self))


ComputeAttention = Callable[[int, Call], Tensor]
"""Function in the place of a call, by its number in the order of calls."""


class Attending(TorchFunctionMode):
    """Hands every call of softmax attention to ``answer``."""

    def __init__(self, answer: ComputeAttention) -> None:
        super().__init__()
        self.answer, self.count = answer, 0

    def __torch_function__(
        self,
        func: TorchCallable,
        types: object,
        args: Positional = (),
        kwargs: Keywords | None = None,
    ) -> object:
        if not any(func is attention for attention in ATTENTION):
            return func(*args, **(kwargs or {}))
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        call = Call(**dict(zip(names, args, strict=False)), **(kwargs or {}))
        self.count += 1
        return self.answer(self.count - 1, call)


class Projecting(TorchFunctionMode):
    """Shows ``seen`` every product with one of some parameters: its name, and what came out."""

    def __init__(
        self, parameters: Iterable[tuple[str, Tensor]], seen: Callable[[str, Tensor], None]
    ) -> None:
        super().__init__()
        # Not by equality: that of tensors is elementwise.
        self.names = {id(parameter): name for name, parameter in parameters}
        self.seen = seen

    def __torch_function__(
        self,
        func: TorchCallable,
        types: object,
        args: Positional = (),
        kwargs: Keywords | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "").partition(".")[0] in PROJECTIONS:
            given = [*args, *(kwargs or {}).values()]
            found = [self.names[id(x)] for x in given if id(x) in self.names]
            matrices = [name for name in found if not name.endswith("bias")]
            if matrices:
                self.seen(matrices[0], result)
        return result
