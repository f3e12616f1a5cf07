"""An object in memory becomes a LoadedModel: what a notebook or a program holds.

    (module, args), (module, args, kwargs), ...   a module with examples, as a factory returns it
    a function without arguments                  that returns one of these
    a causal language model of transformers       which says itself how it is called
    a torch.export.ExportedProgram

Modules are copied first: conversion moves weights to float32, to the CPU and into files.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from os import PathLike
from typing import ParamSpec, TypeVar

from linexport.errors import UsageError
from linexport.sources.files import first_line
from linexport.sources.loaded_model import LoadedModel, Source

KIND = "object"
"""Kind of such a source."""

EXAMPLES = ("args", "kwargs", "dynamic_shapes")
"""Parameters for examples of a module, in torch.export's order."""

P = ParamSpec("P")
R = TypeVar("R")

WAYS = (
    "Expected the path of a model, package.module:callable, file.py:Class, a torch.nn.Module with "
    "args=(x, ...) (and kwargs, dynamic_shapes), a tuple (module, args), (module, args, kwargs) or "
    "(module, args, kwargs, dynamic_shapes), a function without arguments that returns one, a "
    "torch.export.ExportedProgram, or a causal language model of transformers."
)


def load_object(source: object, *, seed: int = 0, whole: bool = False) -> LoadedModel:
    """Load a model from an object, which is not changed.

    Args:
        source: see above.
        seed: of torch's generator while a function runs.
        whole: a model of transformers as one plain module; see ``load_model``.

    Raises:
        UsageError: it is none of these, or cannot be copied.
        UnsupportedModelError: see ``load_module``.
    """
    import torch

    from linexport.sources.factory import call, load_module
    from linexport.sources.hugging_face import is_language_model
    from linexport.sources.weights import weights_digest
    from linexport.system.torch_internals.compiled import original_of, uncompiled

    if isinstance(source, torch.export.ExportedProgram):
        from linexport.sources.exported_program import of_program

        program = copy.deepcopy(source)
        module = program.module()
        origin = Source(KIND, name_of(source), None, "", weights_digest(module))
        return of_program(program, module, origin)
    if isinstance(source, torch.nn.Module):
        source = original_of(source)
        if not is_language_model(source):
            raise UsageError(
                f"{name_of(source)} has no example inputs. Give them: args=(x, ...), or "
                "(module, args) in place of the module."
            )
        source = source, ()
    elif callable(source) and not isinstance(source, type):
        source = call(source, name_of(source), seed)
    if not isinstance(source, tuple) or not isinstance(next(iter(source), None), torch.nn.Module):
        raise UsageError(f"Found {_described(source)}. {WAYS}")
    if len(source) not in (2, 3, 4):
        raise UsageError(f"Found a tuple of {len(source)}. {WAYS}")
    location = name_of(original_of(source[0]))
    own, *rest = map(_copied, source)
    assert isinstance(own, torch.nn.Module)
    loaded = load_module((uncompiled(own), *rest), location, whole=whole)
    return replace(loaded, source=replace(loaded.source, kind=KIND))


def takes_examples(convert: Callable[P, R]) -> Callable[P, R]:
    """Let a function whose second parameter is a path take examples there, as torch.export does.

        convert(module, (x,), {"mask": m}, output="artifact")

    Raises:
        UsageError: examples are given by place and by name.
    """
    by_name: Callable[..., R] = convert

    @wraps(convert)
    def called(*given: P.args, **named: P.kwargs) -> R:
        source, *places = given
        if not places or places[0] is None or isinstance(places[0], str | PathLike):
            return convert(*given, **named)
        examples = dict(zip(EXAMPLES, places, strict=False))
        twice = [f"{name} behind the module and by name" for name in examples if name in named]
        if len(places) > len(EXAMPLES):
            twice = [f"{len(places)} arguments behind the module"]
        if twice:
            raise UsageError(
                f"Found {twice[0]}. Expected convert(module, args, kwargs, dynamic_shapes), each "
                "once, and output by name."
            )
        return by_name(source, **examples, **named)

    return called


def with_examples(
    source: object,
    args: tuple[object, ...] | None,
    kwargs: Mapping[str, object] | None,
    dynamic_shapes: object,
) -> object:
    """Return a source with its examples, where they are given on their own.

    Args:
        source: see above.
        args: positional example inputs of a module.
        kwargs: those by name.
        dynamic_shapes: in torch.export's notation; None for the usual, and {} where nothing varies.

    Raises:
        UsageError: they are given with something else than a module.
    """
    if args is None and kwargs is None and dynamic_shapes is None:
        return source
    import torch

    if not isinstance(source, torch.nn.Module):
        advice = "Leave them out: other sources bring their examples"
        if inspect.isfunction(source):
            advice = (
                "Call it in the forward of a module and give that; or leave them out, if it "
                "returns (module, args)"
            )
        raise UsageError(
            "args, kwargs and dynamic_shapes go with a torch.nn.Module; found "
            f"{_described(source)}. {advice}."
        )
    args = (args,) if isinstance(args, torch.Tensor) else args or ()
    if dynamic_shapes is None:
        return (source, args, kwargs) if kwargs else (source, args)
    return source, args, kwargs or {}, dynamic_shapes or None


def name_of(source: object) -> str:
    """Return package.module.Name of an object's class, and of a function itself."""
    named = source if hasattr(source, "__qualname__") else type(source)
    return f"{named.__module__}.{named.__qualname__}"


def _described(source: object) -> str:
    if isinstance(source, type):
        return f"the class {source.__name__}"
    if isinstance(source, tuple):
        return f"a tuple of {', '.join(type(x).__name__ for x in source) or 'nothing'}"
    return f"an object of the type {type(source).__name__}"


def _copied(value: object) -> object:
    """Return a copy on the CPU of a module, or of the tensors among examples.

    Raises:
        UsageError: it has something that Python cannot copy.
    """
    import torch

    from linexport.system.copies import copied
    from linexport.system.torch_internals.trees import pytree

    if not isinstance(value, torch.nn.Module):
        return pytree.tree_map(
            lambda x: x.detach().cpu().clone() if isinstance(x, torch.Tensor) else x, value
        )
    try:
        return copied(value).cpu()
    except Exception as error:  # whatever an attribute of it raises
        raise UsageError(
            f"{name_of(value)} cannot be copied ({first_line(error)}), and conversion changes a "
            "module. Give a function without arguments that builds it."
        ) from error
