"""Call targets, which torch resolves by looking names up from `torch`, `operator` and `math`.

Unchecked, ``torch.os.system`` is such a target. Accepted: operators of torch's dispatcher in a few
namespaces, control flow, and arithmetic on sizes.
"""

from __future__ import annotations

import functools
import importlib
import re

from linexport.errors import UnsupportedModelError
from linexport.sources.pt2.source_strings import shorten

_OVERLOAD = re.compile(r"torch\.ops\.([a-z_]+)\.([A-Za-z0-9_]+)\.([A-Za-z0-9_]+)")
_NAMESPACES = ("aten", "prims", "linexport")
# Reads and, with shared=True, creates a file of any path.
_FORBIDDEN = {"torch.ops.aten.from_file.default", "torch.ops.aten.from_file.out"}
_CONTROL_FLOW = {
    f"torch.ops.higher_order.{name}"
    for name in (
        "cond", "while_loop", "scan", "associative_scan", "map_impl", "wrap_with_set_grad_enabled",
        "wrap_with_autocast",
    )
}  # fmt: skip
_ARITHMETIC = {
    f"_operator.{name}"
    for name in (
        "eq", "ne", "le", "ge", "lt", "gt", "neg", "pos", "mul", "add", "sub", "floordiv", "mod",
        "pow", "truediv", "and_", "or_", "lshift", "rshift", "getitem",
    )
} | {
    "math.trunc", "math.ceil", "math.floor", "torch.sym_not", "torch.sym_int", "torch.sym_float",
    "torch.sym_ite", "torch.sym_max", "torch.sym_min", "torch.sym_sum", "torch.sym_sqrt",
    "torch._sym_sqrt",
}  # fmt: skip


@functools.cache
def operator(target: str) -> None:
    """Check one call target, importing linexport's own operators when one is named.

    Raises:
        UnsupportedModelError: it is not an operator that linexport knows.
    """
    if target in _ARITHMETIC or target in _CONTROL_FLOW:
        return
    named = _OVERLOAD.fullmatch(target)
    if not named or target in _FORBIDDEN:
        raise UnsupportedModelError(f"it calls {shorten(target)}, which is not a tensor operator")
    namespace, name, overload = named.groups()
    if namespace not in _NAMESPACES:
        raise UnsupportedModelError(
            f"it calls {target}; operators of {', '.join(_NAMESPACES)} are read, custom ones "
            "need a factory that defines them"
        )
    if namespace == "linexport":
        importlib.import_module("linexport.models.torch_ops").register_all()
    if not _registered(namespace, name, overload):
        raise UnsupportedModelError(f"it calls {target}, which the torch installed here lacks")


def _registered(namespace: str, name: str, overload: str) -> bool:
    """Return whether the dispatcher has an op; it lacks TorchScript's builtins (aten.save)."""
    import torch

    from linexport.system.torch_internals.operators import has_kernel

    try:
        found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except (AttributeError, RuntimeError):
        return False
    return has_kernel(found)
