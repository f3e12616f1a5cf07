"""Triton's interpreter without work that it repeats for every call of a function."""

from __future__ import annotations

import pytest


def prepare_once_a_launch(patch: pytest.MonkeyPatch) -> None:
    """Let functions that a kernel calls use the language as its launch prepared it.

    The interpreter replaces the builtins of ``triton.language`` when a kernel is launched, and
    again, with the same functions, in every call inside of it: a quarter of its time. The launch
    leaves out ``triton.language.core``, which the standard functions import; what the first of
    their calls replaces there is never taken back.
    """
    from triton.language import core
    from triton.runtime import interpreter

    def call(self: interpreter.InterpretedFunction, *arguments: object, **named: object) -> object:
        if core.is_builtin(core.load):
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **named)

    patch.setattr(interpreter.InterpretedFunction, "__call__", call)
