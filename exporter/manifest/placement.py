"""Record of the execution provider that ran a model in ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass

ORT_CPU = "CPUExecutionProvider"
"""ONNX Runtime's name of the provider that runs what no other takes."""


@dataclass(frozen=True)
class PlacementRecord:
    """Where ONNX Runtime placed the nodes of a model, by its own record.

    Attributes:
        provider: as users choose it, such as "openvino".
        package: the distribution that has it, with its version.
        nodes: number of nodes by ONNX Runtime's name of the provider that runs them; the bodies of
            functions count node by node.
        on_cpu: what of linexport ops and states runs on the CPU, arithmetic of shapes aside: types
            of ONNX operators and their number, by the type of the op or the names of the states.
        kernels: number of nodes that the CUDA library runs by the kernels they carry.
    """

    provider: str
    package: str
    nodes: dict[str, int]
    on_cpu: dict[str, dict[str, int]]
    kernels: int = 0

    def described(self) -> str:
        """Return what runs where, in words."""
        total, cpu = sum(self.nodes.values()), self.nodes.get(ORT_CPU, 0)
        where = f"{self.provider} ({self.package})"
        own = f", {self.kernels} of them by linexport's kernels" if self.kernels else ""
        text = f"{total - cpu} of {total} nodes run on {where}{own}, {cpu} on the CPU"
        parts = (
            f"{home} ({', '.join(f'{count} {op}' for op, count in ops.items())})"
            for home, ops in self.on_cpu.items()
        )
        return f"{text}, among them parts of {', '.join(parts)}" if self.on_cpu else text
