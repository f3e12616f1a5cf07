"""An exported program in bfloat16 -> the same in float32.

Types of values are replaced where the graph names them: in the arguments of nodes, in what is known
of each value, in weights and constants, and in example inputs. Regions of ``torch.autocast`` to
bfloat16 are switched off.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.export import ExportedProgram

from linexport.sources.half_precision import wide_tensor, wide_type
from linexport.system.torch_internals.trees import pytree

REGION = "wrap_with_autocast"
"""Operator of a region: (device, dtype, enabled, cache, graph, inputs)."""

DTYPE, ENABLED = 1, 2
"""Places among its arguments."""


def in_float32(program: ExportedProgram) -> ExportedProgram:
    """Return a copy of a program in float32; it is not changed itself."""
    made = copy.deepcopy(program)
    for part in made.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                _widen(node)
            part.recompile()
    for tensors in (made.state_dict, made.constants):
        for name, value in tensors.items():
            tensors[name] = _stored(value)
    if made.example_inputs is not None:
        made.example_inputs = pytree.tree_map(wide_tensor, made.example_inputs)
    return made


def _stored(value: Any) -> Any:
    wide = wide_tensor(value)
    if isinstance(value, torch.nn.Parameter) and wide is not value:
        return torch.nn.Parameter(wide, requires_grad=value.requires_grad)
    return wide


def _widen(node: torch.fx.Node) -> None:
    if getattr(node.target, "__name__", "") == REGION and node.args[DTYPE] == torch.bfloat16:
        args = list(node.args)
        args[ENABLED] = False
        node.args = tuple(args)
    node.args, node.kwargs = pytree.tree_map(wide_type, (node.args, dict(node.kwargs)))
    if "val" in node.meta:
        node.meta["val"] = pytree.tree_map(wide_tensor, node.meta["val"])
