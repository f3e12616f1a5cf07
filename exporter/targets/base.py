"""What a target is, and the session its models run in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx

from linexport.targets.lowering import Candidates


class Session(Protocol):
    """An opened model."""

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name for inputs by name."""
        ...


def unchanged(model: onnx.ModelProto) -> onnx.ModelProto:
    """The default of ``Target.prepare``."""
    return model


@dataclass(frozen=True)
class Target:
    """Where an artifact runs.

    Attributes:
        name: as users choose it.
        summary: one line of help.
        candidates: lowerings of each op that are correct there, best first.
        open: opens a model, from its file or its bytes, for running here; keyword ``threads``
            bounds the number of threads (0: the runtime's choice).
        prepare: changes the graph before its ops are lowered.
    """

    name: str
    summary: str
    candidates: Candidates
    open: Callable[..., Session]
    prepare: Callable[[onnx.ModelProto], onnx.ModelProto] = unchanged


class OrtSession:
    """A model in ONNX Runtime.

    Args:
        model: a file, or a serialised model.
        threads: number of threads, 0 for ONNX Runtime's choice.
        providers: execution providers; those of the default are the CPU.

    Raises:
        onnxruntime exceptions: the model does not load.
    """

    def __init__(
        self,
        model: Path | bytes,
        threads: int = 0,
        providers: tuple[str, ...] = ("CPUExecutionProvider",),
    ) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = threads
        source: Any = model if isinstance(model, bytes) else str(model)
        self.inner = onnxruntime.InferenceSession(source, options, providers=list(providers))
        self.output_names = [o.name for o in self.inner.get_outputs()]

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See ``Session``."""
        values = self.inner.run(None, dict(inputs))
        return dict(zip(self.output_names, values, strict=True))
