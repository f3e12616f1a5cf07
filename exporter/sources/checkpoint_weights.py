"""Stored weights of a source, without the model that they are of."""

from __future__ import annotations

from pathlib import Path

from linexport.sources.detect import Kind, recognise
from linexport.sources.packed import StoredWeights

_FOLDERS = (Kind.HUGGING_FACE_FOLDER, Kind.ADAPTER_FOLDER)


def checkpoint_weights(source: str | Path, trust_remote_code: bool = False) -> StoredWeights:
    """Return the weights of a Hugging Face folder, of a hub name or of a GGUF file, none yet read.

    Args:
        source: of a conversion; an adapter stands for the model that it changes.
        trust_remote_code: as for the conversion; nothing is run here.

    Returns:
        The weights; of any other source, none.

    Raises:
        UsageError: a file cannot be read.
        UnsupportedModelError: the weights are in a format that is not read.
        EnvironmentProblemError: the package that reads them is not installed.
    """
    path = _place(source)
    kind = recognise(path) if path is not None else None
    if path is not None and kind in (Kind.GGUF, Kind.GGUF_FOLDER):
        from linexport.sources.gguf import gguf_in, gguf_weights

        return gguf_weights(gguf_in(path))
    if path is not None and kind is Kind.DIFFUSERS_FOLDER:
        from linexport.sources.diffusers import folder as of_diffusers

        return of_diffusers.weights_of(path, of_diffusers.read_config(path))
    if path is None or kind not in _FOLDERS:
        return StoredWeights((), {})
    from linexport.sources.hugging_face.folder import model_of, read_config, weights_of
    from linexport.sources.hugging_face.lora import base_folder

    folder = base_folder(path) if kind is Kind.ADAPTER_FOLDER else model_of(path)
    return weights_of(folder, read_config(folder, trust_remote_code))


def _place(source: str | Path) -> Path | None:
    """Return where a source is; None for code."""
    from linexport.sources.hugging_face.hub import cached_folder, is_hub_name

    path = Path(source)
    if path.exists():
        return path
    return cached_folder(str(source)) if is_hub_name(source) else None
