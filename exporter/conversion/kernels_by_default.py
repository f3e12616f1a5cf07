"""How far an artifact of a quantised file is from it where integer kernels compute it.

Checks open the artifact as its operators say. Programs open it as they open any file, and ONNX
Runtime's integer kernels may round and saturate then: further than in the file that was converted,
if others are fused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from linexport.graph import external_data
from linexport.manifest import Manifest
from linexport.parity import ModelUnderTest
from linexport.parity.tolerances import HALF_ROUNDING
from linexport.sources.onnx_file import integer_kernels
from linexport.sources.onnx_file.module import OnnxModule


def with_kernels_compared(manifest: Manifest, tested: ModelUnderTest, model: Path) -> Manifest:
    """Say where integer kernels take the artifact further from its operators than the file.

    Args:
        manifest: of the artifact.
        tested: the same with its original.
        model: the artifact's model file.
    """
    loaded, module = tested.loaded, tested.loaded.module
    if loaded.graph is None or not isinstance(module, OnnxModule):
        return manifest
    if not integer_kernels.quantises(external_data.read_graph(model)):
        return manifest
    args = [x for x in loaded.args if isinstance(x, torch.Tensor)]
    sizes = dict(loaded.graph.sizes)
    fed = dict(zip(tested.input_names, (x.numpy() for x in args), strict=True))
    found = integer_kernels.run_by_default(
        model, {**fed, **tested.initial_state(tested.batch(sizes))}
    )
    exact = dict(zip(tested.output_names, module(*args), strict=True))
    ours = max((_distance(exact[n], found[n]) for n in exact if n in found), default=0.0)
    graph = external_data.read_graph(loaded.graph.path)
    own = integer_kernels.distance_by_default(loaded.graph.path, graph, module, args)
    if ours <= max(integer_kernels.WORTH_SAYING, HALF_ROUNDING * own):
        return manifest
    said = (
        "ONNX Runtime computes the artifact by integer kernels that round or saturate: as most "
        f"programs open it, its outputs are {ours:.0e} of the largest value away from what the "
        f"operators say, and those of the file {own:.0e}. With the session option "
        "session.disable_quant_qdq = 1 it equals the file."
    )
    return replace(manifest, warnings=(*manifest.warnings, said))


def _distance(exact: torch.Tensor, found: np.ndarray) -> float:
    return integer_kernels.distance(exact, found) if found.shape == exact.shape else 0.0
