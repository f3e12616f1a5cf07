"""Metadata of exporters: the user's source lines, which are kept, and all else, which is not.

Stack traces hold local paths, which do not belong in an artifact: of a path its last part is kept.
"""

from __future__ import annotations

import re
from pathlib import PurePath

import onnx

from linexport.trace.user_frames import OWN

STACK_TRACE = "pkg.torch.onnx.stack_trace"
FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+), in [^\n]*\n[ \t]*(?P<code>[^\n]+)')
LIBRARY = re.compile(r"(^|[/\\])torch[/\\]")
"""Files of torch itself, whose lines say nothing of a model."""


def source_lines(model: onnx.ModelProto) -> dict[str, str]:
    """Return "file.py:12: the code" for nodes, and for the values they compute, by name.

    Nodes without a stack trace, or with one through torch alone, are left out.
    """
    found: dict[str, str] = {}
    for node in model.graph.node:
        trace = next((p.value for p in node.metadata_props if p.key == STACK_TRACE), "")
        frame = last_frame(trace)
        if frame is not None:
            text = f"{PurePath(frame['path']).name}:{frame['line']}: {frame['code'].strip()}"
            found |= dict.fromkeys([node.name, *node.output], text)
    return found


def last_frame(trace: str) -> re.Match[str] | None:
    """Return the last frame of a stack trace outside torch and linexport: path, line and code."""
    frames = [f for f in FRAME.finditer(trace) if not LIBRARY.search(f["path"])]
    # Code that torch has made has a name in angle brackets, and is in no file.
    own = [f for f in frames if not f["path"].startswith(("<", *OWN))]
    return own[-1] if own else None


def drop_metadata(model: onnx.ModelProto) -> None:
    """Remove the metadata of a graph, in place."""
    graph = model.graph
    for item in [model, graph, *graph.node, *graph.value_info, *graph.input, *graph.output]:
        del item.metadata_props[:]
