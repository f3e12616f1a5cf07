"""LoadedModel -> exported program -> ONNX graph with linexport ops.

Two gates keep a trace honest. A dimension asked to be dynamic that the model's code fixes is an
error that names the line which fixed it; and where the program has a symbol in an output shape,
the ONNX graph must have one too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx
import torch

from linexport.dims import DimRange
from linexport.errors import BuildError
from linexport.loaders.model import LoadedModel
from linexport.trace.draws import refuse_draws
from linexport.trace.graph import plain_onnx, to_onnx
from linexport.trace.names import name_symbols
from linexport.trace.program import export_program

__all__ = ["Traced", "export_program", "plain_onnx", "trace"]


@dataclass(frozen=True)
class Traced:
    """A traced model.

    Attributes:
        model: ONNX graph; linexport ops are nodes without function bodies.
        program: what it was made from.
        translated: the same after the exporter's decompositions.
        dims: the dynamic dimensions by name, with the range the program allows.
        example_sizes: the size each of them had in the example.
    """

    model: onnx.ModelProto
    program: torch.export.ExportedProgram
    translated: torch.export.ExportedProgram
    dims: Mapping[str, DimRange]
    example_sizes: Mapping[str, int]


def trace(loaded: LoadedModel) -> Traced:
    """Trace a model with its dynamic dimensions.

    Raises:
        UnsupportedModelError: the model's code fixes a dimension that should be dynamic, or it
            draws random numbers.
        BuildError: torch could not trace or translate it for another reason.
    """
    program = loaded.program or export_program(loaded)
    refuse_draws(program)
    names, dims, sizes = name_symbols(program, loaded.dynamic_shapes)
    model, translated = to_onnx(program, names)
    _check_outputs(program, model)
    return Traced(model, program, translated, dims, sizes)


def _check_outputs(program: torch.export.ExportedProgram, model: onnx.ModelProto) -> None:
    """A symbolic size of a program output is symbolic in the graph as well."""
    output = next(node for node in program.graph.nodes if node.op == "output")
    shapes = [getattr(x.meta.get("val"), "shape", ()) for x in output.args[0] if hasattr(x, "meta")]
    for shape, info in zip(shapes, model.graph.output, strict=False):
        for axis, (size, dim) in enumerate(
            zip(shape, info.type.tensor_type.shape.dim, strict=False)
        ):
            if not isinstance(size, int) and dim.HasField("dim_value"):
                raise BuildError(
                    f"The ONNX graph fixes dimension {axis} of the output {info.name} at "
                    f"{dim.dim_value}, where the traced program has {size}."
                )
