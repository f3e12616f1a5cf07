"""Reading an ONNX file: parsed, checked and in order, without the weights that lie beside it."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, checker

from linexport.errors import UnsupportedModelError
from linexport.loaders.files import first_line, refuse, unreadable
from linexport.loaders.onnx_file.external import check_external
from linexport.loaders.onnx_file.walk import all_nodes, all_texts, nodes_within, reads

LARGEST = 2**31 - 1
"""Bytes a protobuf message may have; weights beside the file do not count."""

KNOWN_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "linexport")
_AGAIN = "copy or download it again"
_EXPORT = "export the model again, or repair the graph with the tool that wrote it"
_LISTED = 4


def read(path: Path) -> onnx.ModelProto:
    """The checked model, its nodes sorted; external data stay where they are.

    Raises:
        UnsupportedModelError: damaged, cyclic, with a name defined twice or a function that calls
            itself, invalid by onnx's checker, or with external data that are missing or lie
            outside the folder.
        UsageError: the file cannot be read.
    """
    model = _parse(path)
    if not model.HasField("graph") or not model.graph.output:
        raise refuse(path, "an ONNX model without a graph, or one that has no output", _AGAIN)
    try:
        # protobuf gives bytes where text is not UTF-8.
        if not all(isinstance(text, str) for text in all_texts(model)):
            raise UnsupportedModelError("it has names that are not UTF-8 text")
        _no_duplicates(model.graph)
        _sort(model.graph)
        _no_recursion(model)
        check_external(path, model)
        _check(path, model)
    except UnsupportedModelError as error:
        raise refuse(path, f"an invalid ONNX model: {error}", _EXPORT) from error
    return model


def counts(model: onnx.ModelProto) -> tuple[int, int]:
    """Nodes of the graph, and floating-point values of its initializers."""
    floating = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
    total = 0
    for tensor in model.graph.initializer:
        if tensor.data_type in floating:
            size = 1
            for dim in tensor.dims:
                size *= dim
            total += size
    return len(model.graph.node), total


def custom_operators(model: onnx.ModelProto) -> tuple[str, ...]:
    """A warning that names operators of domains nobody here knows; they are kept as they are."""
    local = {(f.domain, f.name) for f in model.functions}
    names = sorted(
        {
            f"{node.domain}.{node.op_type}"
            for node in all_nodes(model)
            if node.domain not in KNOWN_DOMAINS and (node.domain, node.op_type) not in local
        }
    )
    return (f"operators of other domains are kept as they are: {', '.join(names)}",) * bool(names)


def _parse(path: Path) -> onnx.ModelProto:
    model = onnx.ModelProto()
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise refuse(
                path,
                f"an ONNX file of {size / 2**30:.1f} GiB in one piece; a protobuf ends at 2 GiB",
                "save its weights beside it, with onnx.save_model(..., save_as_external_data=True)",
            )
        model.ParseFromString(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except DecodeError as error:
        raise refuse(path, f"a damaged ONNX file ({first_line(error)})", _AGAIN) from error
    return model


def _no_duplicates(graph: onnx.GraphProto) -> None:
    stored = [t.name for t in graph.initializer]
    # Older files list their weights among the inputs as well.
    given = [i.name for i in graph.input if i.name not in set(stored)]
    made = [name for node in graph.node for name in node.output if name]
    seen: set[str] = set()
    twice = dict.fromkeys(n for n in [*stored, *given, *made] if n in seen or seen.add(n))  # type: ignore[func-returns-value]
    if twice:
        raise UnsupportedModelError(
            f"{len(twice)} values have a name that is defined twice: "
            f"{', '.join(list(twice)[:_LISTED])}"
        )


def _sort(graph: onnx.GraphProto) -> None:
    """Nodes in an order in which each follows what it reads; some tools write another."""
    makers = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    after = {
        i: {makers[name] for name in reads(node) if name in makers}
        for i, node in enumerate(graph.node)
    }
    if all(before < i for i, others in after.items() for before in others):
        return
    try:
        order = list(TopologicalSorter(after).static_order())
    except CycleError as error:
        circle = [graph.node[i].name or graph.node[i].op_type for i in error.args[1]]
        raise UnsupportedModelError(
            f"its nodes form a cycle: {' -> '.join(circle[: _LISTED + 1])}"
        ) from error
    nodes = [onnx.NodeProto.FromString(graph.node[i].SerializeToString()) for i in order]
    del graph.node[:]
    graph.node.extend(nodes)


def _no_recursion(model: onnx.ModelProto) -> None:
    """Functions that call themselves end the process that opens them, with no error to catch."""
    calls = {
        (f.domain, f.name): {(n.domain, n.op_type) for n in nodes_within(f.node)}
        for f in model.functions
    }
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as error:
        circle = [name for _, name in error.args[1]]
        raise UnsupportedModelError(
            f"its functions call each other in a circle: {' -> '.join(circle[: _LISTED + 1])}"
        ) from error


def _check(path: Path, model: onnx.ModelProto) -> None:
    """onnx's own checker; it looks for external data beside a file, so there it needs the path."""
    external = any(t.data_location == TensorProto.EXTERNAL for t in model.graph.initializer)
    try:
        checker.check_model(str(path) if external else model)
    except checker.ValidationError as error:
        if external and "topologically sorted" in str(error):
            return  # What was sorted here; ONNX Runtime sorts as well.
        raise UnsupportedModelError(first_line(error)) from error
