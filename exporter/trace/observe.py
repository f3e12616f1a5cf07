"""Types and shapes of all values of an ONNX graph, in terms of its dimensions, seen by running it.

Files state them in many ways, or not at all, and inference loses a size where it is computed. Here
the graph is run with every value as an output: once, and once more with each dimension changed. A
size that follows a dimension is named after it:

    size = c                  it never changes
    size = c * batch * seq    it grows in proportion to those
    size = seq + c            it differs by as much as the dimension does

Nothing is said of values whose sizes follow from the numbers in the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from linexport.loaders.onnx_file.walk import reads

STEPS = (1, 28, -1)
"""Changes of a size tried in turn, its double last; 100 and 28 are a multiple of most strides."""

FOLDER = "session.model_external_initializers_file_folder_path"

BY_CONTENT = ("NonZero", "Unique", "Compress", "NonMaxSuppression", "StringSplit")
"""Operators whose output sizes depend on numbers; so may everything that is computed of them."""

Sizes = Mapping[str, int]
Shape = tuple[int | str | None, ...]
Found = dict[str, tuple[np.dtype, tuple[int, ...]]]


def observe(
    model: onnx.ModelProto,
    folder: Path,
    feeds: Callable[[Sizes], dict[str, np.ndarray]],
    sizes: Sizes,
) -> list[onnx.ValueInfoProto]:
    """A typed and shaped entry for every tensor the graph computes; none if it does not run so.

    Args:
        model: weights may lie in files of ``folder``.
        feeds: draws inputs at given sizes of the dimensions.
        sizes: those of the example.
    """
    try:
        session = _session(model, folder)
        before = _run(session, feeds(sizes))
        changes = {name: _changed(session, feeds, sizes, name) for name in sizes}
    except Exception:  # ONNX Runtime has no common error; what is inferred must do
        return []
    if any(change is None for change in changes.values()):
        return []
    tainted = _by_content(model.graph.node)
    return [
        helper.make_tensor_value_info(
            value,
            helper.np_dtype_to_tensor_dtype(dtype),
            _shape(value, shape, {n: c for n, c in changes.items() if c}, sizes),
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


def _session(model: onnx.ModelProto, folder: Path) -> onnxruntime.InferenceSession:
    """With all values as outputs."""
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    there = {o.name for o in model.graph.output}
    names = (n for node in model.graph.node for n in node.output if n and n not in there)
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


def _changed(
    session: onnxruntime.InferenceSession,
    feeds: Callable[[Sizes], dict[str, np.ndarray]],
    sizes: Sizes,
    name: str,
) -> tuple[int, Found] | None:
    """The size one dimension was changed to, and what came of it; None if it takes no other."""
    for step in (*STEPS, sizes[name]):
        size = sizes[name] + step
        try:
            return size, _run(session, feeds({**sizes, name: size}))
        except Exception:  # a size the model does not take
            continue
    return None


def _shape(
    value: str, shape: Sequence[int], changes: Mapping[str, tuple[int, Found]], sizes: Sizes
) -> list[int | str | None] | None:
    """The shape in names; None where the rank itself changes."""
    if any(len(found[value][1]) != len(shape) for _, found in changes.values()):
        return None
    return [
        _size(size, {n: (new, found[value][1][axis]) for n, (new, found) in changes.items()}, sizes)
        for axis, size in enumerate(shape)
    ]


def _size(size: int, changes: Mapping[str, tuple[int, int]], sizes: Sizes) -> int | str | None:
    """One size in names; None where it follows the dimensions in no way known here."""
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
