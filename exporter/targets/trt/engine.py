"""An engine deserialised on a GPU: its tensors, and a context for each of its profiles.

Calls follow each other, so that the contexts share the memory of their activations. TensorRT-RTX
compiles kernels for the GPU when they are first used: it keeps them in a file from one process to
the next, and captures its own CUDA graphs, since it replaces kernels while it runs.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from linexport.errors import EnvironmentProblemError
from linexport.manifest.engines import EngineRecord
from linexport.plugins.tensorrt.flavour import Flavour
from linexport.plugins.tensorrt.plugin import register
from linexport.targets.trt.device import Device
from linexport.targets.trt.log import Log

log = logging.getLogger(__name__)

ARRAYS = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
}


class OpenedEngine:
    """An opened engine.

    Args:
        flavour: the library.
        content: of the engine's file.
        record: of it.
        device: it runs on.

    Attributes:
        inputs: names.
        outputs: names.
        dtypes: of both, by name.
        host: names of those in the host's memory: what shapes are computed from.
        contexts: one for each profile.
        captures: graphs of its calls are for us to capture.

    Raises:
        EnvironmentProblemError: the library cannot open it, or has no memory for it.
    """

    def __init__(
        self, flavour: Flavour, content: bytes, record: EngineRecord, device: Device
    ) -> None:
        module = flavour.load()
        creators = register(flavour) if record.plugin_library else ()
        self.log, self._device = Log(), device
        self._runtime = module.Runtime(self.log.sink(module))
        self._engine = self._runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            failures = [str(c.failure) for c in creators if c.failure]
            reason = "; ".join([*failures, *self.log.errors()][:2]) or "it gives no reason"
            raise EnvironmentProblemError(f"{flavour.title} cannot open {record.file}: {reason}")
        engine = self._engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        given = module.TensorIOMode.INPUT
        self.inputs = [n for n in names if engine.get_tensor_mode(n) == given]
        self.outputs = [n for n in names if n not in self.inputs]
        self.dtypes = {n: np.dtype(ARRAYS[engine.get_tensor_dtype(n).name]) for n in names}
        host = module.TensorLocation.HOST
        self.host = {n for n in names if engine.get_tensor_location(n) == host}
        self.captures = not hasattr(module, "CudaGraphStrategy")
        self._cache_file = cache_folder() / f"{record.sha256[:32]}-{device.sm}.kernels"
        self._config = self._configured(module)
        self.contexts = [self._context(i) for i in range(engine.num_optimization_profiles)]

    def close(self) -> None:
        """Keep the kernels that were compiled, and give up the contexts before the engine."""
        if self._engine is None:
            return
        self._keep_kernels()
        self.contexts = []
        self._config = self._engine = self._runtime = None

    def _configured(self, module: ModuleType) -> Any:
        """Return what contexts are made with: in the first versions of TensorRT 10, a strategy."""
        sizes = map(
            self._engine.get_device_memory_size_for_profile_v2,
            range(self._engine.num_optimization_profiles),
        )
        self._memory = max(sizes, default=0)
        self._activations = self._device.allocate(self._memory)
        strategy = module.ExecutionContextAllocationStrategy.USER_MANAGED
        if not hasattr(module, "IRuntimeConfig"):
            return strategy
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        if not self.captures:
            config.cuda_graph_strategy = module.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            kernels = config.create_runtime_cache()
            if self._cache_file.is_file() and not kernels.deserialize(
                self._cache_file.read_bytes()
            ):
                log.info("%s is of another GPU or driver; kernels are compiled", self._cache_file)
            config.set_runtime_cache(kernels)
        return config

    def _context(self, profile: int) -> Any:
        context = self._engine.create_execution_context(self._config)
        if context is None:
            raise EnvironmentProblemError(
                "TensorRT has no memory for an execution context: "
                + "; ".join(self.log.errors()[:2])
            )
        context.set_device_memory(self._activations, self._memory)
        context.set_optimization_profile_async(profile, self._device.stream)
        self._device.wait()
        return context

    def _keep_kernels(self) -> None:
        """Write what TensorRT-RTX compiled; a folder that cannot be written costs time only."""
        kernels = None if self.captures else self._config.get_runtime_cache()
        if kernels is None:
            return
        content = bytes(kernels.serialize())
        try:
            self._cache_file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._cache_file.parent, delete=False) as file:
                file.write(content)
            os.replace(file.name, self._cache_file)  # noqa: PTH105
        except OSError as error:
            log.info("Compiled kernels were not kept: %s", error)


def cache_folder() -> Path:
    """Return the folder of kernels that TensorRT-RTX compiled, of all engines."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "linexport" / "tensorrt-rtx"
