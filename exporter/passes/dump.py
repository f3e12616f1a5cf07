"""Writing the graph before and after each pass that changed it, with a readable difference.

    00_traced.onnx               the graph before the first pass
    03_simplify.before.onnx      the graph before the third pass, which changed it
    03_simplify.after.onnx       and after it
    03_simplify.diff             nodes removed, added and changed, as text
    result.onnx                  the graph after the last pass that ran

Weights larger than ``LARGE`` bytes are left out: their initializers keep name, type and shape and
name ``external_data.LOCATION`` as the file of their values. A viewer such as Netron opens the
files; ``onnx.load(path, load_external_data=False)`` reads them.
"""

from __future__ import annotations

import logging
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs

from linexport.errors import UsageError
from linexport.graph import surgeon
from linexport.graph.contract import Pass
from linexport.passes.diff import graph_diff
from linexport.system.terminal import printable

log = logging.getLogger(__name__)

LARGE = 2**10
"""Bytes from which a weight is left out of a dump."""

RESULT = "result.onnx"


class GraphDump:
    """A folder of dumps.

    Args:
        folder: made if it is not there.

    Raises:
        UsageError: the folder holds something already, or cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            taken = any(folder.iterdir())
        except OSError as error:
            raise UsageError(
                f"Cannot make the folder {folder} for dumps: {error.strerror}. Choose another."
            ) from None
        if taken:
            raise UsageError(f"The folder for dumps, {folder}, is not empty. Choose a new one.")
        self.folder = folder
        self.used = False
        self._before = onnx.ModelProto()

    def begin(self, graph: gs.Graph) -> None:
        """Write the graph before the first pass."""
        self.used = True
        self._before = _without_weights(graph)
        self._save("00_traced.onnx", self._before)

    def write(self, number: int, found: Pass, graph: gs.Graph) -> None:
        """Write the graphs before and after a pass, and their difference."""
        stem, after = f"{number:02}_{found.name}", _without_weights(graph)
        self._save(f"{stem}.before.onnx", self._before)
        self._save(f"{stem}.after.onnx", after)
        heading = f"{found.name} (stage {found.stage})\nensures that {found.ensures}\n\n"
        text = heading + graph_diff(self._before, after)
        (self.folder / f"{stem}.diff").write_text(printable(text), encoding="utf-8")
        self._before = after
        log.info("written: %s", self.folder / f"{stem}.diff")

    def end(self) -> None:
        """Write the graph after the last pass that ran."""
        self._save(RESULT, self._before)

    def below(self, name: str) -> GraphDump:
        """Return the dump of another run of the passes, in a folder inside this one."""
        return GraphDump(self.folder / name)

    def _save(self, name: str, model: onnx.ModelProto) -> None:
        (self.folder / name).write_bytes(model.SerializeToString())


def _without_weights(graph: gs.Graph) -> onnx.ModelProto:
    weights = surgeon.externalize_constants(graph, LARGE)
    try:
        return surgeon.to_model(graph)
    finally:
        surgeon.restore_constants(graph, weights)
