"""The quickly deployable plugins of every op, registered with TensorRT's own ``plugin`` package.

TensorRT asks twice: for types and shapes of the outputs, and for the kernel with its launch. Both
are read from the description that the node carries (``quick``). What is registered is a function
whose signature says how many tensors there are, so there is one of each for every op.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import GenericAlias, ModuleType
from typing import Any

from linexport.errors import EnvironmentProblemError
from linexport.plugins.kernels.description import Description
from linexport.plugins.kernels.launch import Extent
from linexport.plugins.ops.registry import all_ops
from linexport.plugins.tensorrt import quick
from linexport.plugins.tensorrt.fields import NAMES
from linexport.plugins.tensorrt.flavour import Flavour
from linexport.plugins.tensorrt.launcher import LANES
from linexport.plugins.tensorrt.plugin import data_type


@cache
def register(flavour: Flavour) -> None:
    """Make the plugins known to a library that takes them.

    Raises:
        EnvironmentProblemError: the library is not installed, or does not have them yet.
    """
    module = flavour.load()
    try:
        package = importlib.import_module(f"{module.__name__}.plugin")
        lacking = "" if hasattr(package, "aot_impl") else "no function aot_impl"
    except ImportError as error:
        lacking = str(error)
    if lacking:
        raise EnvironmentProblemError(
            f"{flavour.title} {flavour.version()} has no quickly deployable plugins that are "
            f"compiled ahead of time ({lacking}); they are of 10.9 and later. Convert the model "
            "without --quick"
        )
    define(module, package)


def define(module: ModuleType, package: ModuleType, lazy: bool = False) -> None:
    """Register every op's functions.

    Args:
        module: TensorRT's Python module.
        package: its module ``plugin``.
        lazy: make the creators with the first plugin.
    """
    for op in filter(lambda op: op.kernels, all_ops().values()):
        inputs, name = op.input_names, f"{quick.NAMESPACE}::{op.name}"
        described = signed(shapes(module, package), package, inputs, len(op.output_names))
        package.register(name, lazy_register=lazy)(described)
        package.aot_impl(name)(signed(launch(package), package, inputs, None))


def signed(
    function: Callable[..., object], package: ModuleType, inputs: Sequence[str], outputs: int | None
) -> Callable[..., Any]:
    """Return the function with the signature that TensorRT checks.

    The signature is that of a description, where the number of ``outputs`` is given, else that of
    an ahead-of-time implementation.
    """
    tensor = package.TensorDesc
    kinds: dict[str, object] = dict.fromkeys(inputs, tensor) | dict.fromkeys(NAMES, str)
    if outputs is None:
        kinds |= {"outputs": GenericAlias(tuple, (tensor,)), "tactic": int}
        text = str | bytes
        returned = (text, text, package.KernelLaunchParams, package.SymIntExprs)
    else:
        returned = (tensor,) * outputs
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
        for name, kind in kinds.items()
    ]
    signature = inspect.Signature(parameters, return_annotation=GenericAlias(tuple, returned))
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def shapes(module: ModuleType, package: ModuleType) -> Callable[..., Any]:
    """``(inputs..., launch, binaries)`` -> descriptions of the outputs."""

    def outputs(*inputs: object, **texts: str) -> Any:
        description = _described(texts.values())
        sizes = _sizes(description, inputs)
        return tuple(
            package.from_shape_expr(
                tuple(sizes[n] if isinstance(n, str) else n for n in tensor.shape),
                data_type(module, tensor.type),
            )
            for tensor in description.outputs
        )

    return outputs


def launch(package: ModuleType) -> Callable[..., Any]:
    """``(inputs..., launch, binaries, outputs, tactic)`` -> the kernel, its launch, its numbers."""

    def implementation(*values: object) -> Any:
        *inputs, first, second, _, _ = values
        description = _described((first, second))
        ((sm, plan),) = description.plans.items()
        sizes = _sizes(description, inputs)
        chunks = package.cdiv(sizes["length"], plan.chunk)
        one = sizes["batch"] * 0 + 1
        known = {**sizes, "chunks": chunks, "chunks_per_segment": chunks, "segments": one}
        chosen = quick.launch_of(plan)
        binary = description.binaries[sm][chosen.kernel.name]
        parameters = package.KernelLaunchParams()
        parameters.grid_x, parameters.grid_y, parameters.grid_z = (
            _product(extent, known, one) for extent in chosen.grid
        )
        parameters.block_x = LANES * chosen.kernel.warps
        parameters.shared_mem = binary.shared
        names = quick.numbers(chosen.kernel)
        numbers = package.SymIntExprs(len(names))
        for i, name in enumerate(names):
            numbers[i] = package.SymInt32(known[name])
        return binary.entry, binary.code, parameters, numbers

    return implementation


def _described(texts: Any) -> Description:
    """From the attributes, which come with a zero byte behind."""
    values = (text.rstrip("\0") for text in texts)
    return Description.from_attributes(dict(zip(NAMES, values, strict=True)))


def _sizes(description: Description, inputs: Sequence[Any]) -> dict[str, Any]:
    """Batch and length as expressions."""
    found: dict[str, object] = {}
    for tensor, given in zip(description.inputs, inputs, strict=True):
        for axis, size in enumerate(tensor.shape if tensor else ()):
            if isinstance(size, str):
                found.setdefault(size, given.shape_expr[axis])
    return found


def _product(extent: Extent, known: Mapping[str, object], one: Any) -> Any:
    value = one * extent.factor
    for symbol in extent.symbols:
        value = value * known[symbol]
    return value
