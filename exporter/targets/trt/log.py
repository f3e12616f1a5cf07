"""TensorRT's log while it parses and builds, read for errors, memory and layers.

Without a GPU, the log is the only place where TensorRT tells what is in an engine.

    Layer: NAME Host Persistent: N bytes Device Persistent: N bytes Scratch Memory: N bytes
    Max Scratch Memory: N bytes          once for each profile
    Total Activation Memory: N bytes     once for each profile
    Name: NAME, LayerType: TYPE, ...     with detailed profiling verbosity, after the build
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

from linexport.errors import BuildError

SCRATCH = re.compile(r"^Max Scratch Memory: (\d+) bytes")
ACTIVATIONS = re.compile(r"^Total Activation Memory: (\d+) bytes")
LAYER_SCRATCH = re.compile(r"^Layer: (.+) Host Persistent: .* Scratch Memory: (\d+) bytes")
LAYER = re.compile(r"^Name: (.+?), LayerType: (\w+),", re.MULTILINE)


class Log:
    """Messages by severity. ``sink(module)`` is what TensorRT is given to write to."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str]] = []

    def sink(self, module: ModuleType) -> object:
        """A logger of TensorRT's that writes here."""
        messages = self.messages

        class Sink(module.ILogger):  # type: ignore[name-defined]
            def __init__(self) -> None:
                module.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                messages.append((severity.name, message))

        return Sink()

    def errors(self) -> list[str]:
        """Error messages in order, without the places in TensorRT's source."""
        return [
            re.sub(r"\s*In \S+ at \S+$", "", message.strip().splitlines()[0])
            for severity, message in self.messages
            if severity in ("ERROR", "INTERNAL_ERROR")
        ]

    def layers(self) -> list[dict[str, str]]:
        """Name and type of every layer of the engine, in order of execution."""
        listing = next((m for _, m in self.messages if m.lstrip().startswith("Layers:")), "")
        return [{"name": name, "type": kind} for name, kind in LAYER.findall(listing)]

    def scratch(self) -> int:
        """Bytes of scratch memory of the layer that needs most, in the profile that needs most.

        Raises:
            BuildError: this version of TensorRT does not say.
        """
        return self._largest(SCRATCH, "scratch memory")

    def activations(self) -> int:
        """Bytes an execution context needs for activations and scratch memory together.

        Raises:
            BuildError: this version of TensorRT does not say.
        """
        return self._largest(ACTIVATIONS, "activation memory")

    def layer_scratch(self) -> dict[str, int]:
        """Bytes of scratch memory by layer, the most of any profile."""
        found: dict[str, int] = {}
        for _, message in self.messages:
            match = LAYER_SCRATCH.match(message)
            if match:
                name, size = match[1], int(match[2])
                found[name] = max(size, found.get(name, 0))
        return found

    def _largest(self, pattern: re.Pattern[str], what: str) -> int:
        found = [int(m[1]) for _, text in self.messages if (m := pattern.match(text))]
        if not found:
            raise BuildError(f"TensorRT does not report the {what} of the engine it built.")
        return max(found)
