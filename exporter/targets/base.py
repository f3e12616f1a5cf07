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
        open: opens a model, from its file or its bytes, for running here; its keywords are those
            of ``OrtSession``.
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
        taking_turns: threads sleep when a call ends. By default they spin for a while in wait of
            the next call, and so slow other sessions that take turns with this one: on two cores,
            2.5 ms become 17.
        providers: execution providers; those of the default are the CPU.

    Raises:
        onnxruntime exceptions: the model does not load.
    """

    def __init__(
        self,
        model: Path | bytes,
        threads: int = 0,
        taking_turns: bool = False,
        providers: tuple[str, ...] = ("CPUExecutionProvider",),
    ) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = threads
        if taking_turns:
            options.add_session_config_entry("session.force_spinning_stop", "1")
        source: Any = model if isinstance(model, bytes) else str(model)
        self.inner = onnxruntime.InferenceSession(source, options, providers=list(providers))
        self.output_names = [o.name for o in self.inner.get_outputs()]

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See ``Session``."""
        values = self.inner.run(None, dict(inputs))
        return dict(zip(self.output_names, values, strict=True))
