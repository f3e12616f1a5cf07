"""Types and shapes of all values of an ONNX graph, in terms of its dimensions, seen by running it.

Files state them in many ways, or not at all, and inference loses a size where it is computed. Here
the graph is run with every value as an output: once, and once more with each dimension changed. A
size that follows a dimension is named after it, if it still does where that is several times as
large (the number of chunks of 16 is the same for 100 tokens and for 101):

    size = c                  it never changes
    size = c * batch * seq    it grows in proportion to those
    size = seq + c            it differs by as much as the dimension does

Nothing is said of values whose sizes follow from the numbers in the inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from linexport.graph.walk import reads
from linexport.trace.messages import error_summary

log = logging.getLogger(__name__)

STEPS = (1, 28, -1)
"""Changes of a size tried in turn, its double last; 100 and 28 are a multiple of most strides."""

FAR = (6, 3, 2)
"""Multiples of a size tried in turn, to see whether what held for a small change holds there."""

FOLDER = "session.model_external_initializers_file_folder_path"

BY_CONTENT = ("NonZero", "Unique", "Compress", "NonMaxSuppression", "StringSplit")
"""Operators whose output sizes depend on numbers; so may everything that is computed of them."""

SHAPE_OF = "shape of "

DimSizes = Mapping[str, int]
Found = dict[str, tuple[np.dtype, tuple[int, ...]]]
Shapes = Mapping[str, tuple[int, ...]]
Changes = Mapping[str, tuple[int, Shapes]]
"""By dimension: the size it was changed to, and the shapes that came of it."""


def observe(
    model: onnx.ModelProto,
    folder: Path,
    feeds: Callable[[DimSizes], dict[str, np.ndarray]],
    sizes: DimSizes,
) -> list[onnx.ValueInfoProto]:
    """Return a typed and shaped entry for every tensor of the graph; none if it does not run so.

    Args:
        model: the model to run; its external data lies in ``folder``.
        folder: where the model's external data is.
        feeds: draws inputs at given sizes of the dimensions.
        sizes: sizes of the dimensions in the example inputs.
    """
    try:
        session = _session(model, folder)
        before = _run(session, feeds(sizes))
        near = {name: _near(session, feeds, sizes, name) for name in sizes}
        del session
        far = _far(model, folder, feeds, sizes, list(before))
    except Exception as error:  # ONNX Runtime has no common error; inference must do
        log.debug("the graph does not run with all values as outputs: %s", error_summary(error))
        return []
    changes = {name: change for name, change in near.items() if change}
    if len(changes) < len(near):
        fixed = ", ".join(name for name in near if name not in changes)
        log.debug("the graph takes one size only of the dimensions %s", fixed)
        return []
    tainted = _by_content(model.graph.node)
    return [
        helper.make_tensor_value_info(
            value,
            helper.np_dtype_to_tensor_dtype(dtype),
            _agreed(
                _shape(value, shape, changes, sizes),
                _shape(value, shape, {**changes, **far}, sizes),
            ),
        )
        for value, (dtype, shape) in before.items()
        if value not in tainted
    ]


def _by_content(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """Values that depend on operators of ``BY_CONTENT``."""
    found: set[str] = set()
    for node in nodes:
        if node.op_type in BY_CONTENT or found.intersection(reads(node)):
            found.update(node.output)
    return found


def _session(
    model: onnx.ModelProto, folder: Path, shapes_of: Sequence[str] | None = None
) -> onnxruntime.InferenceSession:
    """Open the model with all values as outputs, or only the shapes of some, to save memory."""
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    there = {o.name for o in model.graph.output}
    names = [n for node in model.graph.node for n in node.output if n and n not in there]
    if shapes_of is not None:
        names = [f"{SHAPE_OF}{value}" for value in shapes_of]
        pairs = zip(shapes_of, names, strict=True)
        watched.graph.node.extend(helper.make_node("Shape", [x], [y]) for x, y in pairs)
        del watched.graph.output[:]
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(FOLDER, str(folder))
    return onnxruntime.InferenceSession(
        watched.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def _run(session: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray]) -> Found:
    values = session.run(None, feeds)
    named = zip((o.name for o in session.get_outputs()), values, strict=True)
    return {n: (v.dtype, v.shape) for n, v in named if isinstance(v, np.ndarray)}


def _near(
    session: onnxruntime.InferenceSession,
    feeds: Callable[[DimSizes], dict[str, np.ndarray]],
    sizes: DimSizes,
    name: str,
) -> tuple[int, Shapes] | None:
    """Change one dimension a little; None if it takes no other size."""
    for step in (*STEPS, sizes[name]):
        size = sizes[name] + step
        try:
            found = _run(session, feeds({**sizes, name: size}))
        except Exception:  # a size the model does not take
            continue
        return size, {value: shape for value, (_, shape) in found.items()}
    return None


def _far(
    model: onnx.ModelProto,
    folder: Path,
    feeds: Callable[[DimSizes], dict[str, np.ndarray]],
    sizes: DimSizes,
    values: Sequence[str],
) -> Changes:
    """Change every dimension that allows it by a large factor."""
    session, found = _session(model, folder, values), {}
    for name in sizes:
        for times in FAR:
            size = times * sizes[name]
            try:
                shapes = session.run(None, feeds({**sizes, name: size}))
            except Exception:  # a size the model does not take
                continue
            found[name] = (size, dict(zip(values, map(tuple, shapes), strict=True)))
            break
    return found


def _shape(
    value: str, shape: Sequence[int], changes: Changes, sizes: DimSizes
) -> list[int | str | None] | None:
    """Return the shape in names; None where the rank itself changes."""
    if any(len(found[value]) != len(shape) for _, found in changes.values()):
        return None
    return [
        _size(size, {n: (new, found[value][axis]) for n, (new, found) in changes.items()}, sizes)
        for axis, size in enumerate(shape)
    ]


def _agreed(
    near: list[int | str | None] | None, far: list[int | str | None] | None
) -> list[int | str | None] | None:
    """Return the sizes on which a small change and a large one agree."""
    if near is None or far is None:
        return None
    return [a if a == b else None for a, b in zip(near, far, strict=True)]


def _size(size: int, changes: Mapping[str, tuple[int, int]], sizes: DimSizes) -> int | str | None:
    """Return one size in names; None where it depends on the dimensions in another way."""
    follows = [name for name, (_, after) in changes.items() if after != size]
    if not follows:
        return size
    factor = size
    for name in follows:
        new, after = changes[name]
        if after * sizes[name] != size * new or factor % sizes[name]:
            factor = 0
            break
        factor //= sizes[name]
    if factor:
        return "*".join([*[str(factor)] * (factor > 1), *follows])
    name = follows[0]
    if len(follows) > 1 or changes[name][1] - size != changes[name][0] - sizes[name]:
        return None
    rest = size - sizes[name]
    return f"{name} {'+' if rest > 0 else '-'} {abs(rest)}"
