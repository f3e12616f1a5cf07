"""Nodes that one kernel runs, described for TensorRT's quickly deployable plugins, ahead of time.

TensorRT keeps the kernel in the engine, as PTX with a grid and arguments that are expressions of
shapes, and launches it by itself: such a node needs neither Python nor a plugin library where the
engine runs. In exchange there is one kernel a node and no scratch memory:

    feature maps, convolutions   as they are
    attention on any length      the rules linear and gated, in one segment
    attention on one token       every rule, where the model's sequence is fixed to one token

Long sequences are not cut into segments, so few of them do not fill a GPU. The launch passes the
inputs, then int32 arguments, then the outputs: every one the op has, used or not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from linexport.errors import BuildError, UnsupportedModelError
from linexport.plugins.kernels import contract
from linexport.plugins.kernels.compile import compile_kernels
from linexport.plugins.kernels.description import Binary, Description
from linexport.plugins.kernels.fit import fit
from linexport.plugins.kernels.launch import Kernel, Launch, LaunchPlan
from linexport.plugins.kernels.plan import plan_launches
from linexport.plugins.ops.op import Node, Op

NAMESPACE = "linexport_quick"
SHARED = 48 * 1024
"""Bytes of shared memory such a kernel may have: TensorRT raises no limit for it."""

HIDDEN = 2
"""Pointers behind a kernel's arguments that Triton declares and ours do not use."""

ENTRY = re.compile(r"(\.visible \.entry (\w+)\()(.*?)(\n\))", re.DOTALL)


def describe_plugin(op: Op, node: Node, dtype: str, sms: Sequence[int]) -> Description:
    """Describe the node's plugin; compiles its kernel.

    Args:
        op: the node's op.
        node: a checked node, with its widths known.
        dtype: that of the activations, as NumPy calls it.
        sms: compute capabilities to compile for.

    Raises:
        UnsupportedModelError: one kernel does not suffice, or it needs too much shared memory.
        OpError, UsageError, EnvironmentProblemError: as of ``contract.describe_plugin``.
    """
    first = node.inputs[0]
    length = node.shapes[first][op.tokens(node.attributes)[first]]
    plans = {
        sm: fit(single(plan_launches(node, dtype, sm), length == 1, node.op_type), sm)
        for sm in contract.architectures(sms)
    }
    inputs, outputs = contract.tensors(op, node, dtype)
    inputs += (None,) * (len(op.schema.inputs) - len(inputs))
    formal = [x.name if x else None for x in inputs], [x.name for x in outputs]
    binaries = {sm: _compiled(chosen, sm, *formal) for sm, chosen in plans.items()}
    return Description(node.op_type, inputs, outputs, plans, binaries, quick=True)


def single(plan: LaunchPlan, one_token: bool, what: str) -> LaunchPlan:
    """The plan with one launch only.

    Raises:
        UnsupportedModelError: it has none that is right for the lengths.
    """
    route = plan.decode if one_token and plan.decode else plan.single
    if len(route.launches) != 1 or route.scratch:
        raise UnsupportedModelError(
            f"{what} takes {len(route.launches)} kernels; a quickly deployable plugin has one."
        )
    return replace(plan, single=route, segmented=None, decode=None)


def launch_of(plan: LaunchPlan) -> Launch:
    """The one launch of a single plan."""
    (launch,) = plan.single.launches
    return launch


def numbers(kernel: Kernel) -> list[str]:
    """Names of the int32 arguments, in order."""
    return [a.name for a in kernel.arguments if not a.is_pointer]


def _compiled(
    plan: LaunchPlan, sm: int, inputs: Sequence[str | None], outputs: Sequence[str]
) -> dict[str, Binary]:
    kernel = launch_of(plan).kernel
    made = compile_kernels([kernel], sm)[kernel.name]
    if made.shared > SHARED:
        raise UnsupportedModelError(
            f"{kernel.function} has {made.shared} bytes of shared memory; a quickly deployable "
            f"plugin has at most {SHARED}."
        )
    order = [*inputs, *numbers(kernel), *outputs]
    ptx = with_parameters(made.ptx, [a.name for a in kernel.arguments], order)
    return {kernel.name: Binary(ptx.encode(), made.entry, made.shared)}


def with_parameters(ptx: str, declared: Sequence[str], targets: Sequence[str | None]) -> str:
    """PTX whose kernel takes other parameters than it was compiled with.

    A parameter is read by name, so a declaration may move, and one that nothing reads may be added
    or left out.

    Args:
        ptx: of one kernel.
        declared: names of what it takes, in order, followed by ``HIDDEN`` parameters.
        targets: names of its new parameters; None, or a name it does not declare, for a pointer
            that is passed and not read.

    Raises:
        BuildError: the kernel reads a parameter that is not among the targets.
    """
    found = ENTRY.search(ptx)
    lines = [line.strip() for line in found[3].split(",\n")] if found else []
    if found is None or len(lines) != len(declared) + HIDDEN:
        raise BuildError(f"A kernel has {len(lines)} parameters; expected {len(declared)}.")
    known = dict(zip(declared, lines, strict=False))
    unread = [f".param .u64 {found[2]}_unread_{i}" for i in range(len(targets))]
    taken = [known.get(name or "", unread[i]) for i, name in enumerate(targets)]
    body = ptx[found.end() :]
    for line in set(lines) - set(taken):
        if re.search(rf"\b{line.split()[-1]}\b", body):
            raise BuildError(f"A kernel reads {line!r}, which a quick plugin is not given.")
    head = found[1] + ",".join(f"\n\t{line}" for line in taken) + found[4]
    return ptx[: found.start()] + head + body
