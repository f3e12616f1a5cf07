"""Run a plan with Triton itself: on a GPU by its just-in-time compiler, or in its interpreter.

Engines do not come here: they launch binaries made by ``compile``. The kernels, their constants,
grids and scratch are the same, so what holds here holds there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from linexport.plugins.kernels.launch import LaunchPlan
from linexport.plugins.kernels.sources import function, in_tuples, parameters
from linexport.system.json_object import JsonObject

ELEMENTS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "i8": torch.int8,
}


def run(
    plan: LaunchPlan,
    tensors: Mapping[str, torch.Tensor],
    batch: int,
    length: int,
    multiprocessors: int,
) -> None:
    """Fill the output tensors of a plan.

    ``tensors`` holds every input and output of the node by formal name, contiguous and on one
    device; a bool tensor is taken as bytes.

    Raises:
        TypeError: a tensor does not have the type that the plan states.
    """
    values = plan.symbols(batch, length, multiprocessors)
    route = plan.route(batch, length, multiprocessors)
    device = next(iter(tensors.values())).device
    pool: JsonObject = {
        name: x.view(torch.int8) if x.dtype == torch.bool else x for name, x in tensors.items()
    }
    for buffer in route.scratch:
        size = buffer.elements.of(values)
        pool[buffer.name] = torch.empty(size, dtype=ELEMENTS[buffer.type], device=device)
    pool.update(values)
    for launch in route.launches:
        kernel = launch.kernel
        grid = tuple(extent.of(values) for extent in launch.grid)
        for argument in kernel.arguments:
            if argument.is_pointer and pool[argument.name].dtype != ELEMENTS[argument.type[1:]]:
                raise TypeError(
                    f"{kernel.function} takes {argument.name} as {argument.type}, and is given "
                    f"{pool[argument.name].dtype}."
                )
        if all(grid):
            given = {name: pool[argument.name] for name, argument in parameters(kernel).items()}
            function(kernel)[grid](
                **in_tuples(kernel, {**given, **dict(kernel.constants)}),
                num_warps=kernel.warps,
                num_stages=kernel.stages,
            )
