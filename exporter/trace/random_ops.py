"""Rejection of programs that draw random numbers at every call.

Such a model has no one output to be equal to: random features must be drawn once and frozen.
"""

from __future__ import annotations

import re

import torch

from linexport.errors import UnsupportedModelError
from linexport.system.torch_internals.operators import Overload, arguments

_OFF = {"train": False, "training": False, "dropout_p": 0.0, "p": 0.0}
"""Arguments of random operators that make them deterministic."""


def reject_nondeterminism(program: torch.export.ExportedProgram) -> None:
    """Raise where the program draws a random number that is used.

    Raises:
        UnsupportedModelError: names the operators and the lines that call them.
    """
    found = [
        f"\n  {node.target}{_line(node)}"
        for module in program.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if node.users and _is_random(node)
    ]
    if found:
        raise UnsupportedModelError(
            "The model draws random numbers at every call, so that no two of its outputs are "
            f"equal and no conversion can be checked:{''.join(dict.fromkeys(found))}\n"
            "Draw once, from a seed, when the module is built, and keep the result with "
            "register_buffer. Random features of attention are frozen so in the feature maps of "
            "linexport.models, such as favor+. If it is dropout that draws, call module.eval()."
        )


def _is_random(node: torch.fx.Node) -> bool:
    target = node.target
    if not isinstance(target, Overload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = arguments(target, node.args, node.kwargs)
    return not any(name in given and given[name] == off for name, off in _OFF.items())


def _line(node: torch.fx.Node) -> str:
    """Return the line of the model's code that calls the operator, if the program has it."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f" at {frames[-1][0]}:{frames[-1][1]}" if frames else ""
