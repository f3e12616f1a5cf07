"""Weights of a model moved to a memory-mapped file and back; see ``linexport.system.memory``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard

from linexport.sources.loaded_model import LoadedModel
from linexport.system import memory

if TYPE_CHECKING:
    import torch

MARGIN = 2**20
"""Bytes for the alignment of parameters in one file."""


def memory_map_weights(loaded: LoadedModel) -> None:
    """Move the large weights to a memory-mapped file; parameters stay the same objects."""
    _move(loaded, memory.is_memory_mapped, mapped=True)


@contextmanager
def mapped_parameters(size: int) -> Iterator[None]:
    """Move every large parameter to one memory-mapped file as soon as a module registers it.

    A model is never in memory as a whole then, not while it is built either.

    Args:
        size: bytes of all parameters; those for which it has no room stay in plain memory.
    """
    import torch
    from torch.nn.modules import module as hooks

    size += MARGIN
    [file] = memory.blocks([size])
    taken = 0

    def register(module: torch.nn.Module, name: str, parameter: torch.Tensor | None) -> None:
        nonlocal taken
        if not is_plain(parameter) or parameter.nbytes < memory.MIN_MMAP_BYTES:
            return
        stop = taken + parameter.nbytes
        if stop > size or memory.is_memory_mapped(parameter.data_ptr()):
            return
        place = torch.from_numpy(file[taken:stop]).view(parameter.dtype).view(parameter.shape)
        parameter.data = place.copy_(parameter.detach())
        memory.release(place.data_ptr(), place.nbytes)
        taken += -(-parameter.nbytes // memory.ALIGNED) * memory.ALIGNED

    with (
        hooks.register_module_parameter_registration_hook(register),
        _one_weight_at_a_time(),
        memory.low_memory(),
    ):
        yield


@contextmanager
def _one_weight_at_a_time() -> Iterator[None]:
    """Keep transformers from reading weights ahead, in threads of its own."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def unmap_weights(loaded: LoadedModel) -> None:
    """Move the weights back to plain memory, where a model that is timed has them."""
    _move(loaded, lambda address: not memory.is_memory_mapped(address), mapped=False)


def is_plain(weight: object) -> TypeGuard[torch.Tensor]:
    """Return whether this is a dense CPU tensor, not of a class that keeps its values elsewhere."""
    import torch

    return (
        isinstance(weight, torch.Tensor)
        and type(weight) in (torch.Tensor, torch.nn.Parameter)
        and weight.layout is torch.strided
        and weight.device.type == "cpu"
    )


def _move(loaded: LoadedModel, keeps: Callable[[int], bool], mapped: bool) -> None:
    """Move every storage that is not kept, with all tensors of the model that view it.

    Small ones are moved as well: one of them keeps the whole file mapped that it was loaded from.
    """
    import torch

    inside: dict[int, list[torch.Tensor]] = {}
    for tensor in _tensors(loaded):
        address = tensor.untyped_storage().data_ptr()
        if address and not keeps(address):
            inside.setdefault(address, []).append(tensor)
    sizes = [group[0].untyped_storage().nbytes() for group in inside.values()]
    files = (
        iter(memory.blocks([n for n in sizes if n >= memory.MIN_MMAP_BYTES]))
        if mapped
        else iter(())
    )
    for size, (address, group) in zip(sizes, inside.items(), strict=True):
        large = mapped and size >= memory.MIN_MMAP_BYTES
        place = torch.from_numpy(next(files)) if large else torch.empty(size, dtype=torch.uint8)
        place.copy_(torch.empty(0, dtype=torch.uint8).set_(group[0].untyped_storage()))
        for tensor in group:
            whole = place[: size // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
            # A parameter remains the same object: exported programs hold it, too.
            tensor.data = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        memory.release(place.data_ptr(), size)
        memory.release(address, size)
    memory.trim_memory()


def _tensors(loaded: LoadedModel) -> Iterator[torch.Tensor]:
    """Yield dense parameters and buffers, each once."""
    modules = [loaded.module, *([loaded.decode_module.module] if loaded.decode_module else [])]
    found: list[object] = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    if loaded.program is not None:
        found += [*loaded.program.state_dict.values(), *loaded.program.constants.values()]
    for tensor in {id(t): t for t in found}.values():
        if is_plain(tensor) and not (tensor.is_inference() or tensor.is_conj() or tensor.is_neg()):
            yield tensor
