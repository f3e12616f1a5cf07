"""A folder of diffusers (config.json and safetensors) becomes a LoadedModel.

The library builds the class that ``_class_name`` names, in float32 and without anything being
downloaded; the folder is data. ``models`` says which classes those are, and how each is called.
"""

from __future__ import annotations

from pathlib import Path

from linexport.sources.diffusers.build import built
from linexport.sources.diffusers.folder import NAME, read_config, weights_of
from linexport.sources.diffusers.models import CALLS
from linexport.sources.files import first_line, refuse
from linexport.sources.hugging_face.folder import CONFIG, digest
from linexport.sources.loaded_model import LoadedModel, Source
from linexport.sources.weights import check_finite, named_tensors, parameter_summary


def load_diffusers(folder: Path, *, location: str | None = None) -> LoadedModel:
    """Load the model of a folder of diffusers, such as the ``transformer`` of a pipeline.

    Args:
        folder: with config.json and ``diffusion_pytorch_model.safetensors``.
        location: what the user called it, where that is not the folder.

    Returns:
        The model in eval mode, with a dynamic batch, height and width.

    Raises:
        EnvironmentProblemError: diffusers is not installed, or has no such class.
        UsageError: a file cannot be read.
        UnsupportedModelError: a class that is not among ``CALLS``, settings that it does not have,
            or weights that are missing, damaged or do not fit.
    """
    location = location or str(folder)
    config = read_config(folder)
    weights = weights_of(folder, config)
    model = built(folder, config, weights)
    check_finite(named_tensors(model), location)
    name = str(config[NAME])
    about = parameter_summary(name, model)
    try:
        call = CALLS[name](model)
    except Exception as error:  # any value of its configuration may be wrong
        raise refuse(
            folder / CONFIG,
            f"settings of {name} that its inputs cannot be drawn from ({first_line(error)})",
            "compare it with that of a published model of the same class",
        ) from error
    return LoadedModel(
        module=call.module.eval(),
        args=call.args,
        kwargs={},
        dynamic_shapes=call.dynamic_shapes,
        source=Source(
            kind="diffusers",
            location=location,
            sha256=digest([folder / CONFIG, *weights.files]),
            description=f"{about}, {call.part}" if call.part else about,
        ),
        integer_ranges=call.integer_ranges,
        defaults=call.defaults,
        outputs=call.outputs,
        ranges=call.ranges,
        warnings=call.warnings,
    )
