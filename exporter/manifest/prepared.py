"""Records of an artifact that was prepared on one machine, for engines that are built on others."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class PreparedGpuRecord:
    """A GPU that an engine can be built on.

    Attributes:
        sm: its compute capability, ten times its number.
        engine: name of the engine's file, once it is built.
        timing_cache: name of the file for kernels' times, once it is built.
        cuda: version of the CUDA toolkit that assembled its kernels; None where the model has none.
        driver: oldest Linux driver that loads them, by its major version; None likewise.
        trtexec: arguments that build the engine without Python; None where that cannot be done.
    """

    sm: int
    engine: str
    timing_cache: str
    cuda: str | None
    driver: int | None
    trtexec: tuple[str, ...] | None


@dataclass(frozen=True)
class PreparedRecord:
    """Everything to build engines of, and to run them.

    Attributes:
        runtime: the flavour of TensorRT.
        gpus: those it was prepared for.
        plugin_source: file of the plugin library's source; None where engines need no library.
        script: shell script that builds library and engine without Python; None where that cannot
            be done.
        loaders: files of programs that run an engine.
        graph: ONNX file that the script builds of; None for ``model.onnx``.
    """

    runtime: str
    gpus: tuple[PreparedGpuRecord, ...]
    plugin_source: str | None
    script: str | None
    loaders: tuple[str, ...]
    graph: str | None = None

    def described(self, built: Collection[int]) -> str:
        """Return in words which GPUs lack an engine; ``built`` are compute capabilities."""
        left = [gpu.sm for gpu in self.gpus if gpu.sm not in built]
        if not left:
            return "an engine was built for every GPU it was prepared for"
        more = " yet" if not built else " for these"
        return (
            f"prepared for compute capability {', '.join(f'{sm / 10:.1f}' for sm in left)}; no "
            f"engine{more}, so nothing was checked on such a GPU"
        )
