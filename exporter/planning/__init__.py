"""Memory and the bound on speed of a model on a device, before it runs there."""

from __future__ import annotations

from pathlib import Path

from linexport import manifest as manifests
from linexport.errors import UsageError
from linexport.planning.device import chosen_device
from linexport.planning.estimate import DevicePlan, estimate


def plan(
    path: str | Path,
    *,
    device: str | None = None,
    context: int,
    batch: int = 1,
    memory: float | None = None,
    bandwidth: float | None = None,
) -> DevicePlan:
    """Return what a model takes on a device, and how many tokens a second it can make at most.

    Args:
        path: an artifact, or a folder of transformers, of which config.json is enough.
        device: a GPU's name; None for a CPU, whose memory and bandwidth are then given.
        context: tokens of each sequence, prompt and answer together.
        batch: sequences at once.
        memory: GiB, in place of the device's.
        bandwidth: GB/s, in place of the device's.

    Raises:
        UsageError: an unknown device, or a path that is neither an artifact nor such a folder.
        UnsupportedModelError: a model that transformers does not build.
        EnvironmentProblemError: a folder of transformers, which is not installed.
    """
    chosen, folder = chosen_device(device, memory, bandwidth), Path(path)
    if manifests.has_manifest(folder):
        from linexport.planning.from_artifact import planned
    elif (folder / "config.json").is_file():
        from linexport.planning.from_configuration import planned
    else:
        raise UsageError(
            f"{folder} is neither an artifact of linexport convert nor a model folder with a "
            "config.json. Expected one of these; other sources are converted first."
        )
    return estimate(planned(folder), chosen, context, batch)
