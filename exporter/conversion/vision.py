"""vision tower -> ``vision.onnx`` in the artifact's folder, and the record of it."""

from __future__ import annotations

from linexport.conversion.context import Job
from linexport.conversion.write_submodel import write_beside
from linexport.graph.interface import input_records, tensor_records
from linexport.manifest.file_names import VISION, VISION_DATA
from linexport.manifest.records import VisionRecord
from linexport.sources import LoadedModel
from linexport.sources.hugging_face.vision.grid import example_tower


def write_tower(job: Job, loaded: LoadedModel) -> VisionRecord | None:
    """Write the tower of a model, nothing proven yet; None for a model without one.

    Raises:
        BuildError, UnsupportedModelError: see ``trace.trace``.
    """
    vision = loaded.vision
    if vision is None:
        return None
    with job.watch.stage("vision"):
        tower = example_tower(vision, loaded.source)
        model, _ = write_beside(job, tower, (VISION, VISION_DATA))
    return VisionRecord(
        file=VISION,
        image_token=vision.image_token,
        merge=vision.merge,
        grid_positions=vision.grid_positions,
        inputs=input_records(model.graph.input),
        outputs=tensor_records(model.graph.output),
    )
