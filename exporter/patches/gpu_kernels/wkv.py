"""The extensions of RWKV that code compiles itself, RWKV-4's here: ``forward(B, T, C, ..., y)``.

    y_t = (sum_{s < t} e^{(t - 1 - s) w + k_s} v_s + e^{u + k_t} v_t) / (the same without v)

per channel, with w, u (C,) and k, v, y (B, T, C) (Peng et al. 2023, arXiv:2305.13048, section 3.1).
Its name does not say that: Vision-RWKV has another recurrence under the same name and signature,
``bi_wkv``. The source of its kernel does, by the lines of the recurrence.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linexport.models import functional
from linexport.patches.gpu_kernels import GpuKernel, bi_wkv, is_traced, run
from linexport.patches.gpu_kernels.on_cpu import tensors_on_the_cpu
from linexport.patches.gpu_kernels.recurrences import linear
from linexport.plugins.ops.stabilized_exp import LOWEST

LINES = ("no=max(o,u+k[ii]);", "no=max(w+o,k[ii]);")
"""Lines of the recurrence in the kernel's source, without spaces."""

_made: set[str] = set()
"""Names of extensions that are stood in for in this process."""

LARGEST = 1 << 20
"""Bytes of a source file that is read."""


def forward(B: int, T: int, C: int, w: Tensor, u: Tensor, k: Tensor, v: Tensor, y: Tensor) -> None:
    """Stand in for ``forward``, which writes y."""
    y.copy_(_of_all_tokens(w, u, k, v) if is_traced() else _by_tokens(w, u, k, v))


def _by_tokens(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return y by a loop over tokens, as the kernel computes it."""
    numerator, denominator = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
    largest = torch.full_like(k[:, 0], LOWEST)
    outputs = []
    for t in range(k.shape[1]):
        key, value = k[:, t], v[:, t]
        # Sums are kept divided by e^largest, so that nothing overflows.
        top = torch.maximum(largest, u + key)
        old, new = torch.exp(largest - top), torch.exp(u + key - top)
        outputs.append((old * numerator + new * value) / (old * denominator + new))
        top = torch.maximum(w + largest, key)
        old, new = torch.exp(w + largest - top), torch.exp(key - top)
        numerator, denominator = old * numerator + new * value, old * denominator + new
        largest = top
    return torch.stack(outputs, 1)


def _of_all_tokens(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return y by linexport's ops, of keys and values of the token before.

    A query has two exponents, of the sums and of its own token, relative to the larger of them.
    """
    channels = k.shape[2]
    there, zero = torch.ones_like(k[..., :1]), torch.zeros_like(k)
    before, _ = functional.causal_conv(
        torch.cat([k, v, there], -1).mT,
        torch.tensor([1.0, 0.0], dtype=k.dtype).expand(2 * channels + 1, 1, 2).contiguous(),
    )
    key, value, known = before.mT.split([channels, channels, 1], -1)
    key = torch.where(known > 0, key, LOWEST)
    query, features, decay, _ = functional.stabilized_exp(
        torch.stack([zero, u + k], -1).flatten(2),
        torch.stack([key, zero], -1).flatten(2),
        decay=torch.stack([w.expand_as(k), zero], -1).flatten(2),
        q_num_heads=channels,
        k_num_heads=channels,
    )
    weight = features.unflatten(2, (channels, 2))[..., 0] * known
    lost = decay.unflatten(2, (channels, 2))[..., 0]
    one = there[..., None]
    sums, _ = linear(
        one, one, torch.cat([weight * value, weight], -1)[..., None], torch.cat([lost] * 2, -1), 1.0
    )
    numerator, denominator = sums[..., 0].chunk(2, -1)
    old, new = query.unflatten(2, (channels, 2)).unbind(-1)
    return (old * numerator + new * v) / (old * denominator + new)


KERNEL = GpuKernel(
    ("wkv of RWKV-4",), ("forward",), forward, "the average of RWKV-4, weighted by e^(k + decay)"
)
KERNELS = (KERNEL,)


def known(sources: object) -> tuple[GpuKernel, ...]:
    """Return the functions of an extension by its source files; none where it is another one."""
    single = isinstance(sources, str | os.PathLike)
    given = [sources] if single else list(sources) if isinstance(sources, Iterable) else []
    texts = [_text(Path(os.fspath(one))) for one in given if isinstance(one, str | os.PathLike)]
    if any(all(line in text for line in LINES) for text in texts):
        return KERNELS
    if any(bi_wkv.is_source(text) for text in texts):
        return bi_wkv.KERNELS
    return ()


def _text(file: Path) -> str:
    """Return a source file without spaces; "" where it cannot be read."""
    try:
        with file.open(errors="replace") as opened:
            return "".join(opened.read(LARGEST).split())
    except OSError:
        return ""


@contextmanager
def compiled_in_pytorch() -> Iterator[set[str]]:
    """Let ``torch.utils.cpp_extension.load`` give a stand-in for the extension it is asked for.

    Others are compiled as before. Tensors that the code makes on a GPU, or moves to one, are on the
    CPU from then on, until the end of this context, where there is no GPU.

    Yields:
        Names of extensions that are stood in for, filled as they are loaded. Code that is imported
        already has those of before.
    """
    from torch.utils import cpp_extension

    original = cpp_extension.load
    with ExitStack() as stack:
        if _made and not torch.cuda.is_available():
            stack.enter_context(tensors_on_the_cpu())

        @functools.wraps(original)
        def load(name: str, sources: str | list[str], *args: Any, **kwargs: Any) -> Any:
            kernels = known(sources)
            if not kernels:
                return original(name, sources, *args, **kwargs)
            if not torch.cuda.is_available():
                stack.enter_context(tensors_on_the_cpu())
            _made.add(name)
            return _extension(name, kernels)

        stack.callback(setattr, cpp_extension, "load", original)
        cpp_extension.load = load
        yield _made


def _extension(name: str, kernels: Iterable[GpuKernel]) -> ModuleType:
    """Return a module with stand-ins as its functions."""
    module = ModuleType(name)
    for kernel in kernels:
        [function] = kernel.names
        vars(module)[function] = functools.partial(_call, kernel, f"{name}.{function}")
    return module


def _call(kernel: GpuKernel, place: str, *args: object, **kwargs: object) -> Any:
    return run(kernel, place, None, args, kwargs)
