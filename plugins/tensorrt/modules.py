"""Compiled kernels in the driver: equal cubins are one module, however many nodes launch them.

    (context, SHA-256 of the cubin)  ->  module, number of its users

A model's layers are alike: 72 of them load their kernels once.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from typing import Any

from linexport.errors import EnvironmentProblemError
from linexport.plugins.tensorrt.flavour import driver

_Key = tuple[int, bytes]


@dataclass
class _Loaded:
    cuda: Any
    context: Any
    module: Any
    users: int = 0


_loaded: dict[_Key, _Loaded] = {}
_lock = threading.RLock()


def checked(result: tuple[Any, ...]) -> Any:
    """Return the value of a driver call; a tuple where it has several, or none.

    Raises:
        EnvironmentProblemError: it failed; names CUDA's error.
    """
    error, *values = result
    if int(error):
        raise EnvironmentProblemError(f"The CUDA driver reports {error.name}.")
    return values[0] if len(values) == 1 else values


class Modules:
    """The modules that one launcher uses, in the context that is current when they are loaded."""

    def __init__(self) -> None:
        self._keys: list[_Key] = []

    def load(self, code: bytes) -> Any:
        """Return the module of a cubin.

        Raises:
            EnvironmentProblemError: the driver refuses it.
        """
        cuda = driver()
        context = checked(cuda.cuCtxGetCurrent())
        key = int(context), hashlib.sha256(code).digest()
        with _lock:
            found = _loaded.get(key)
            if found is None:
                found = _loaded[key] = _Loaded(cuda, context, checked(cuda.cuModuleLoadData(code)))
            found.users += 1
            self._keys.append(key)
        return found.module

    def close(self) -> None:
        """Give up all modules, and unload those that nobody else uses."""
        with _lock:
            while self._keys:
                key = self._keys.pop()
                found = _loaded[key]
                found.users -= 1
                if not found.users:
                    del _loaded[key]
                    _unload(found)


def _unload(found: _Loaded) -> None:
    """Unload a module in its own context, which need not be that of this thread."""
    cuda = found.cuda
    before = checked(cuda.cuCtxGetCurrent())
    checked(cuda.cuCtxSetCurrent(found.context))
    try:
        checked(cuda.cuModuleUnload(found.module))
    finally:
        checked(cuda.cuCtxSetCurrent(before))
