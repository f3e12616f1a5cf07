"""SplitToSequence read only at fixed places by SequenceAt -> Split.

torch exports ``chunk``, ``split`` and ``unbind`` through a sequence. A sequence hides the shapes of
its members from every later pass, and several runtimes do not take one.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

STAGE = "canonicalise"


def run(graph: gs.Graph) -> None:
    """Apply to every match."""
    # One of constants has been folded by now: what is left of it has no outputs.
    for node in [n for n in graph.nodes if n.op == "SplitToSequence" and n.outputs]:
        sizes = _sizes(node)
        sequence = node.outputs[0]
        readers = list(sequence.outputs)
        places = [_constant(r.inputs[1]) if r.op == "SequenceAt" else None for r in readers]
        if sizes is None or any(p is None for p in places):
            continue
        if sequence in graph.outputs or node.attrs.get("keepdims", 1) == 0:
            continue
        parts = [gs.Variable(f"{sequence.name}_{i}") for i in range(len(sizes))]
        taken: set[int] = set()
        for reader, place in zip(readers, places, strict=True):
            assert place is not None
            index = int(place) % len(sizes)
            output = reader.outputs[0]
            reader.outputs.clear()
            reader.inputs.clear()
            if index not in taken:
                taken.add(index)
                parts[index] = output
            else:
                graph.nodes.append(gs.Node("Identity", inputs=[parts[index]], outputs=[output]))
        data = node.inputs[0]
        node.outputs.clear()
        node.inputs.clear()
        graph.nodes.append(
            gs.Node(
                "Split",
                name=node.name,
                attrs={"axis": node.attrs.get("axis", 0)},
                inputs=[data, gs.Constant(f"{sequence.name}_sizes", sizes.astype(np.int64))],
                outputs=parts,
            )
        )


def _sizes(node: gs.Node) -> np.ndarray | None:
    """Sizes of the parts, if they are known: a list of them, or one size for all but the last."""
    given = _constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if given is None or given.ndim == 1:
        return given
    shape = node.inputs[0].shape
    total = shape[node.attrs.get("axis", 0)] if shape else None
    if not isinstance(total, int):
        return None
    size = int(given)
    return np.asarray([min(size, total - start) for start in range(0, total, size)])


def _constant(tensor: gs.Tensor) -> np.ndarray | None:
    if isinstance(tensor, gs.Constant):
        return np.asarray(tensor.values)
    producer = tensor.inputs[0] if tensor.inputs else None
    if producer is not None and producer.op == "Constant" and "value" in producer.attrs:
        return np.asarray(producer.attrs["value"].values)
    return None
