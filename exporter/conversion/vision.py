"""vision tower -> ``vision.onnx`` in the artifact's folder, and the record of it."""

from __future__ import annotations

from linexport import passes, targets, trace
from linexport.artifact import write
from linexport.conversion.stages import Job
from linexport.graph.external_data import with_weights
from linexport.graph.interface import input_records, tensor_records
from linexport.loaders import LoadedModel
from linexport.loaders.hugging_face.vision.grid import example_tower
from linexport.manifest.file_names import VISION, VISION_DATA
from linexport.manifest.records import VisionRecord
from linexport.targets.inlined import inlined
from linexport.targets.lowering import lower


def write_tower(job: Job, loaded: LoadedModel) -> VisionRecord | None:
    """Write the tower of a model, nothing proven yet; None for a model without one.

    Raises:
        BuildError, UnsupportedModelError: see ``trace.trace``.
    """
    vision = loaded.vision
    if vision is None:
        return None
    with job.watch.stage("vision"):
        traced = trace.trace(example_tower(vision, loaded.source))
        target = job.target
        found = passes.rewrite(traced.graph, passes.STATELESS, traced.weights, target=target.name)
        model, weights = found.model, found.weights
        if target.prepare is not targets.unchanged:
            model, weights = target.prepare(with_weights(model, weights)), {}
        model, _ = lower(model, target.candidates)
        model = inlined(model) if job.options.inline else model
        write.save_model(model, job.folder, weights, names=(VISION, VISION_DATA))
    return VisionRecord(
        file=VISION,
        image_token=vision.image_token,
        merge=vision.merge,
        grid_positions=vision.grid_positions,
        inputs=input_records(model.graph.input),
        outputs=tensor_records(model.graph.output),
    )
