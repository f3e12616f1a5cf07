"""Write a further model of a source next to ``model.onnx``."""

from __future__ import annotations

import onnx

from linexport import passes, targets, trace
from linexport.artifact import write
from linexport.conversion.context import Job, TracedOriginal
from linexport.conversion.streaming import token_flow_of
from linexport.graph.external_data import with_weights
from linexport.manifest.proof import TokenFlowRecord
from linexport.sources import LoadedModel
from linexport.targets.lowering.choice import lower
from linexport.targets.lowering.inlined import inlined


def write_beside(
    job: Job, loaded: LoadedModel, names: tuple[str, str]
) -> tuple[onnx.ModelProto, TokenFlowRecord | None]:
    """Trace, rewrite, lower and write a model.

    Returns it without weights, and what its nodes do along the tokens where it has states.

    Args:
        job: says where to.
        loaded: the model.
        names: of its file, and of that of its weights.

    Raises:
        BuildError, UnsupportedModelError: see ``trace.trace``.
    """
    traced, target = trace.trace(loaded), job.target
    found = passes.rewrite(traced.graph, passes.STATELESS, traced.weights, target=target.name)
    model, weights = found.model, found.weights
    flow = token_flow_of(TracedOriginal(loaded, traced, traced.dims), found.portable)
    if target.prepare is not targets.unchanged:
        model, weights = target.prepare(with_weights(model, weights)), {}
    model, _ = lower(model, target.candidates)
    model = inlined(model) if job.options.inline else model
    write.save_model(model, job.folder, weights, names=names)
    return model, flow
