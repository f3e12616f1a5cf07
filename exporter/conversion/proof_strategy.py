"""How the float32 model behind quantised weights is proven: as a whole, or layer by layer.

--proof given              that, or an error that names what cannot
memory for the whole       whole
memory for the layers      layers, and a message says so
neither                    an error with the numbers
"""

from __future__ import annotations

from pathlib import Path

from linexport.errors import UsageError
from linexport.manifest import ConvertOptions
from linexport.manifest.options import KEEP
from linexport.quantization import forecast
from linexport.quantization.choose_bits import BITS
from linexport.quantization.forecast import LAYERS, WHOLE
from linexport.sources import LoadedModel
from linexport.sources.hugging_face.lora import model_folder
from linexport.sources.sizes import float32_bytes, vocabulary
from linexport.system.progress import Progress

CONFIG = "config.json"


def announced(
    source: str | Path | LoadedModel, place: Path, config: ConvertOptions, shown: Progress
) -> bool:
    """Say what a conversion takes, and return whether it is proven layer by layer.

    Args:
        source: of the conversion.
        place: the artifact to be made.
        config: its options.
        shown: gets the sentences.

    Raises:
        UsageError: ``--proof`` names no proof, or one that this conversion cannot have.
        EnvironmentProblemError: there is not enough memory or disk.
    """
    if config.proof not in (None, WHOLE, LAYERS):
        raise UsageError(f"--proof is {config.proof!r}; expected {WHOLE} or {LAYERS}.")
    problem = _no_layers(source, config)
    if config.proof == LAYERS and problem:
        raise UsageError(f"--proof layers is not for {problem}. Leave out --proof.")
    if isinstance(source, LoadedModel):
        return config.proof == LAYERS
    model = model_folder(source)
    size = forecast.ModelSize(float32_bytes(model), vocabulary(model))
    if config.proof is None and problem is None and not forecast.fits(WHOLE, size):
        shown.note(
            "Memory is short for a proof of the whole float32 model: each of its layers is proven "
            "in turn (--proof layers), and the quantised model compared as a whole."
        )
        proof = LAYERS
    else:
        proof = config.proof or WHOLE
    forecast.announce(proof, size, place, shown)
    return proof == LAYERS


def _no_layers(source: str | Path | LoadedModel, config: ConvertOptions) -> str | None:
    """Return what cannot be proven layer by layer; None where that can be tried."""
    if config.weights not in (*BITS, KEEP):
        return f"--weights {config.weights}, which runs the whole in float32"
    if config.target != "ort":
        return f"target {config.target}"
    if config.isolated:
        return "--isolated conversions"
    folder = source.source.location if isinstance(source, LoadedModel) else source
    if not (Path(folder) / CONFIG).is_file():
        return f"{folder}, which is not a folder of a Hugging Face model"
    return None
