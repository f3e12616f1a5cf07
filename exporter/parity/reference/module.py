"""The original module as reference: float32 as it is, and float64 where it allows that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from linexport.plugins.ops.linear_attention.chunk_torch import watch_denominators
from linexport.sources.half_precision import in_float32
from linexport.sources.loaded_model import LoadedModel
from linexport.sources.memory_map import is_plain
from linexport.system import memory
from linexport.system.copies import copied
from linexport.system.torch_internals.exports import control_flow_as_it_is
from linexport.system.torch_internals.modules import change_tensors
from linexport.system.torch_internals.trees import pytree
from linexport.system.untyped import Keywords, Positional, TorchCallable

Arguments = tuple[tuple[object, ...], dict[str, object]]


class Reference:
    """A module run on drawn inputs.

    In another precision it is a copy, and in float64 what the module says to compute in float32 is
    computed in float64, too. A module that computes in half precision is run as it was given in
    that, and as ``in_float32`` makes it in others. Weights that are memory-mapped, as those of the
    copy are, leave memory when the part of the module that has them is done.

    Attributes:
        denominator: smallest |denominator| of normalised linear attention in the last run, NaN if
            one was; None where none was computed by ``linexport.models``.

    Args:
        loaded: the original.
        dtype: computed in; floating inputs are converted to it.
        widened: float64 is computed in place of float32, too; False leaves float32 as it is where
            the module names it, so that float64 stands for half precision alone.
    """

    def __init__(self, loaded: LoadedModel, dtype: torch.dtype, widened: bool = True) -> None:
        self.dtype, self.widened = dtype, widened
        self.name = str(dtype).removeprefix("torch.")
        self.denominator: float | None = None
        given = loaded.given
        self._given = given if given is not None and given.dtype == dtype else None
        kept = given is not None and given.is_kept
        if self._given is not None:
            self.module = self._given.module
        elif dtype == torch.float32 and not kept:
            self.module = loaded.module
        else:
            made = _copied(loaded.module, dtype)
            self.module = in_float32(made) if kept else made

    def __call__(self, inputs: Arguments) -> list[np.ndarray]:
        """Flattened outputs; those in bfloat16, which numpy does not have, as float32.

        Raises:
            Exception: whatever the module raises.
        """
        args, kwargs = inputs if self._given else pytree.tree_map(self._convert, inputs)
        wide = Widened() if self.widened and self.dtype == torch.float64 else nullcontext()
        plain = control_flow_as_it_is()
        with torch.no_grad(), passing(), plain, watch_denominators() as seen, wide:
            outputs = self._run(*args, **kwargs)
        # min of Python takes a NaN only where it comes first.
        self.denominator = float(torch.stack([x.double() for x in seen]).min()) if seen else None
        leaves = [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]
        return [x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy() for x in leaves]

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self._given.run(args, kwargs) if self._given else self.module(*args, **kwargs)

    def _convert(self, leaf: object) -> object:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.to(self.dtype)
        return leaf


def run_deciding(
    reference: Callable[[Arguments], list[np.ndarray]],
    inputs: Arguments,
    deciding: AbstractContextManager[object],
) -> list[np.ndarray]:
    """Run a reference in a context in which choices are made otherwise, see ``near_ties``."""
    with deciding:
        return reference(inputs)


class Widened(TorchFunctionMode):
    """A context in which float64 is computed where code names float32.

    Libraries do so for what half precision would lose: sums, norms, softmax, recurrences. In a
    reference it would be what float32 loses. So are tensors that code makes without saying of what
    dtype, such as a first state of zeros. What is added in a norm stays that of float32.
    """

    def __enter__(self) -> Widened:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._default)

    def __torch_function__(
        self,
        func: TorchCallable,
        types: object,
        args: Positional = (),
        kwargs: Keywords | None = None,
    ) -> object:
        """``func`` with float64 for float32 among its arguments."""
        args, kwargs = pytree.tree_map(_widened, (args, kwargs or {}))
        if func in NORMS:
            args, kwargs = _with_epsilon(*args, **kwargs)
        return CASTS.get(func, func)(*args, **kwargs)


NORMS = (torch.rms_norm, torch.nn.functional.rms_norm)

CASTS: dict[Any, Any] = {
    torch.Tensor.float: torch.Tensor.double,
    torch.Tensor.cfloat: torch.Tensor.cdouble,  # type: ignore[attr-defined]
}

WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def _with_epsilon(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments of a norm; an epsilon left out is float32's, as in the original."""
    given = torch.finfo(torch.float32).eps if eps is None else eps
    return (x, normalized_shape, weight, given), {}


def _widened(argument: object) -> object:
    return WIDE.get(argument, argument) if isinstance(argument, torch.dtype) else argument


@contextmanager
def passing() -> Iterator[None]:
    """Paged weights leave memory when the part of a module that has them is done."""

    def leave(module: torch.nn.Module, *_: object) -> None:
        for weight in (*module.parameters(False), *module.buffers(False)):
            if is_plain(weight):
                memory.release(weight.data_ptr(), weight.nbytes)

    # Of all modules: hooks of its own keep a torch.nn.TransformerEncoder from its fast path.
    handle = register_module_forward_hook(leave)
    try:
        yield
    finally:
        handle.remove()


def _copied(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Return a copy in this precision, where the module has it, with memory-mapped weights."""
    weights = _weights(module)
    made = copied(module, {id(w): _empty(w) for w in weights.values()})
    change_tensors(made, lambda weight: _converted(weight, dtype))
    mine = _weights(made)
    sources = {id(mine[name]): (mine[name], weight) for name, weight in weights.items()}
    sizes = [weight.numel() * own.itemsize for own, weight in sources.values()]
    places = iter(memory.blocks([n for n in sizes if n >= memory.MIN_MMAP_BYTES]))
    for size, (own, weight) in zip(sizes, sources.values(), strict=True):
        if size < memory.MIN_MMAP_BYTES:
            own.data = weight.detach().to(own.dtype, copy=True)
            continue
        place = torch.from_numpy(next(places))
        own.data = place.view(own.dtype).view(weight.shape).copy_(weight.detach())
        memory.release(place.data_ptr(), size)
        memory.release(weight.data_ptr(), weight.nbytes)
    return made


def _converted(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight in this precision; complex ones have none besides the two of float."""
    if weight.is_complex():
        return weight.to(dtype.to_complex()) if dtype in WIDE.values() else weight
    return weight.to(dtype) if weight.is_floating_point() else weight


def _weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Floating parameters and buffers by name; what has several names occurs as often."""
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: weight for name, weight in named if weight.is_floating_point()}


def _empty(weight: torch.Tensor) -> torch.Tensor:
    values = weight.detach().new_empty(0)
    if isinstance(weight, torch.nn.Parameter):
        return torch.nn.Parameter(values, requires_grad=False)
    return values


def feeds(inputs: Arguments, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The tensors of drawn inputs by the names of the graph's inputs."""
    leaves: list[Any] = [x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
    return {name: leaf.numpy() for name, leaf in zip(names, leaves, strict=True)}
