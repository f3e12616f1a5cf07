"""Functions that ``torch.vmap`` runs for each row, written out while a model is traced.

    torch.vmap(lambda u: scan(a, u))(x)     ->     scan of all rows, as torch's batching rules say

torch's export keeps vmap as nodes that add and remove the dimension of rows, which its translation
to ONNX does not take where vmaps are nested, a dimension other than the first is mapped, or numbers
become complex. Here the function is traced by itself, below these rules, and what it does of all
rows is run in its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from linexport.system.torch_internals import Internal
from linexport.system.torch_internals.trees import pytree
from linexport.system.untyped import TorchInternal

log = logging.getLogger(__name__)

WITHOUT = "functions of torch.vmap are traced as torch traces them"

IMPLEMENTATION = Internal(
    "torch._functorch.apis", "vmap_impl", "writes out what torch.vmap computes", WITHOUT
)
RECORDED = Internal(
    "torch._export.utils",
    "_maybe_find_pre_dispatch_tf_mode_for_export",
    "writes out what torch.vmap computes",
    WITHOUT,
)
UNTRACED = Internal(
    "torch.fx.experimental.proxy_tensor",
    "disable_proxy_modes_tracing",
    "writes out what torch.vmap computes",
    WITHOUT,
)


@contextmanager
def written_out() -> Iterator[None]:
    """Write out functions of ``torch.vmap`` that are called in a trace."""
    vmap, recorded, untraced = (i.holder() for i in (IMPLEMENTATION, RECORDED, UNTRACED))
    if vmap is None or recorded is None or untraced is None:
        yield
        return
    plain, inside = getattr(*vmap), list[bool]()

    def run(
        function: Callable[..., object],
        in_dims: TorchInternal,
        out_dims: TorchInternal,
        randomness: str,
        chunk_size: int | None,
        *args: object,
        **kwargs: object,
    ) -> object:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[n] for n in places]

        def of_tensors(*given: Tensor) -> object:
            for place, value in zip(places, given, strict=True):
                leaves[place] = value
            args, kwargs = pytree.tree_unflatten(leaves, structure)
            return plain(function, in_dims, out_dims, randomness, chunk_size, *args, **kwargs)

        if inside:
            return of_tensors(*tensors)
        inside.append(True)
        try:
            with mock.patch.object(*recorded, lambda: None), getattr(*untraced)():
                written: Callable[..., object] = make_fx(of_tensors)(*tensors)
        except Exception as error:
            log.info("torch.vmap is not written out: %s", error)
            written = of_tensors
        finally:
            inside.clear()
        return written(*tensors)

    with ExitStack() as restore:
        restore.enter_context(mock.patch.object(*vmap, run))
        yield
