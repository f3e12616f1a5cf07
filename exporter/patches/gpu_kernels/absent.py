"""Packages that are not installed, or that have no compiled part here, made of linexport's kernels.

    extensions  selective_scan_cuda, ...                     compiled; mamba_ssm needs one
    packages    mamba_ssm, causal_conv1d, fla, flash_attn    their kernels and some of their layers
    triton      for fla and mamba_ssm, which define kernels  names alone; see triton_package

A finder behind Python's own makes them, so that what is installed is found first. A name that is
not here is an import error, as without the package.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType

from linexport.patches.gpu_kernels import MARK, functions, triton_package
from linexport.patches.gpu_kernels.extensions import EXTENSIONS, NEEDED_BY
from linexport.patches.gpu_kernels.layers import IN_MODULE, LAYERS
from linexport.system.torch_internals import triton_looked_for

__all__ = ["EXTENSIONS", "KNOWN", "needed", "standing_in"]

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "mamba_ssm": (
        "ops.selective_scan_interface",
        "ops.triton.layernorm",
        "ops.triton.layer_norm",
        "ops.triton.layernorm_gated",
        "ops.triton.ssd_combined",
        "modules.mamba_simple",
        "modules.mamba2",
    ),
    "causal_conv1d": ("causal_conv1d_interface",),
    "fla": ("ops", "modules"),
    "flash_attn": (),
    triton_package.NAME: ("language", "runtime"),
}
"""Modules of a package that is not installed."""

OPEN = ("fla.ops.", "fla.modules.", f"{triton_package.NAME}.")
"""Packages whose modules may have any name, as they change from release to release."""

KNOWN = frozenset((*PACKAGES, *EXTENSIONS))
"""Everything that can be made."""

USERS = {name: (user,) for name, user in NEEDED_BY.items()} | {
    triton_package.NAME: ("fla", "mamba_ssm")
}
"""Packages that cannot be imported without another one, by the latter."""


def needed() -> frozenset[str]:
    """Return names without which an installed package cannot be imported."""
    return frozenset(
        name for name, users in USERS.items() if any(map(importlib.util.find_spec, users))
    )


@contextmanager
def standing_in(made: Collection[str]) -> Iterator[set[str]]:
    """Make modules that cannot be found, until the end of this context.

    They remain imported, except those of triton: PyTorch is not to take that for installed.

    Args:
        made: names of packages and extensions to make.

    Yields:
        Names of others that could be made, filled as they are looked for in vain.
    """
    finder = _Finder(frozenset(made))
    if triton_package.NAME in made and importlib.util.find_spec(triton_package.NAME) is None:
        triton_looked_for.look()
    sys.meta_path.append(finder)
    try:
        yield finder.missed
    finally:
        sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == triton_package.NAME and _is_made(module):
                del sys.modules[name]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of some names that nothing before it has found."""

    def __init__(self, made: frozenset[str]) -> None:
        self.missed: set[str] = set()
        self._made = made

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        root = fullname.partition(".")[0]
        if root not in KNOWN or not (fullname == root or _is_made(sys.modules.get(root))):
            return None  # an installed package without such a module
        if root not in self._made:
            if root != triton_package.NAME:  # which PyTorch, too, looks for
                self.missed.add(root)
            return None
        return (
            importlib.machinery.ModuleSpec(fullname, self, is_package=root in PACKAGES)
            if _has(fullname)
            else None
        )

    def exec_module(self, module: ModuleType) -> None:
        root = module.__name__.partition(".")[0]
        if root == triton_package.NAME:
            vars(module).update(triton_package.content(module.__name__), **{MARK: True})
        else:
            layers = LAYERS.get(root, {}) | IN_MODULE.get(module.__name__, {})
            vars(module).update(functions(root), **layers, **{MARK: True})
        if module.__name__ == root:  # what a function of the model imports when it is called
            for name in PACKAGES.get(root, ()):
                importlib.import_module(f"{root}.{name}")


def _is_made(module: ModuleType | None) -> bool:
    return getattr(module, MARK, None) is not None


def _has(name: str) -> bool:
    """Return whether a package has a module of some name."""
    root, _, rest = name.partition(".")
    own = PACKAGES.get(root, ())
    return not rest or name.startswith(OPEN) or any(f"{m}.".startswith(f"{rest}.") for m in own)
