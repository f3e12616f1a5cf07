"""Rewrites of the traced graph, on onnx-graphsurgeon: one pass a file.

A pass is a module of this folder with ``PASS``, or an entry point ``linexport.passes`` of another
package; see ``contract.Pass``. Stages run in order; within a stage the order of passes does not
matter. All of it is imported when it is first used: an artifact is opened without PyTorch.
"""

from typing import TYPE_CHECKING

from linexport.system.first_use import on_first_use

if TYPE_CHECKING:
    from linexport.graph.contract import (
        STAGES,
        STATELESS,
        NoMatchError,
        Pass,
        PassResult,
        rewrite_matches,
    )
    from linexport.passes.dump import RESULT, GraphDump
    from linexport.passes.registry import all_passes, find_pass, target_passes
    from linexport.passes.rewriting import Rewritten, rewrite, run

__all__ = [
    "RESULT",
    "STAGES",
    "STATELESS",
    "GraphDump",
    "NoMatchError",
    "Pass",
    "PassResult",
    "Rewritten",
    "all_passes",
    "find_pass",
    "rewrite",
    "rewrite_matches",
    "run",
    "target_passes",
]

_CONTRACT = ("STAGES", "STATELESS", "NoMatchError", "Pass", "PassResult", "rewrite_matches")
_HOMES = {
    **dict.fromkeys(_CONTRACT, "linexport.graph.contract"),
    **dict.fromkeys(("RESULT", "GraphDump"), ".dump"),
    **dict.fromkeys(("all_passes", "find_pass", "target_passes"), ".registry"),
    **dict.fromkeys(("Rewritten", "rewrite", "run"), ".rewriting"),
}

__getattr__ = on_first_use(__name__, _HOMES)
