"""An ONNX file becomes a LoadedModel: the graph itself, and itself in ONNX Runtime as reference.

`document` reads and checks the file, `external` its weights in files beside it, `sizes` finds its
dynamic dimensions and example inputs, `module` runs it.
"""

from __future__ import annotations

from pathlib import Path

from linexport.errors import UnsupportedModelError
from linexport.graph.retyped import BFLOAT16, has_bfloat16, retyped
from linexport.sources.files import refuse
from linexport.sources.loaded_model import LoadedModel, OnnxGraph, Source
from linexport.sources.onnx_file.document import counts, custom_operators, overridable, read
from linexport.sources.onnx_file.external import data_files, digest, weights_with_nan
from linexport.sources.onnx_file.random_ops import reject_nondeterminism


def load_onnx_file(path: Path, *, seed: int, run: bool = True) -> LoadedModel:
    """Load an ONNX file of any exporter, its weights inside or beside it.

    Args:
        path: of the ``.onnx`` file.
        seed: of the example inputs.
        run: the file is to be run; else operators of unknown domains may be in it, which ONNX
            Runtime does not have.

    Returns:
        The graph, with a module that runs the file in ONNX Runtime.

    Raises:
        UnsupportedModelError: the file is damaged or contradicts itself, its weights are missing,
            NaN, or lie outside its folder, it draws random numbers, or ONNX Runtime does not run
            it.
        UsageError: the file cannot be read.
    """
    model = read(path)
    files = data_files(path, model)
    try:
        reject_nondeterminism(model)
    except UnsupportedModelError as error:
        raise refuse(path, f"an ONNX model that is not converted: {error}", _FREEZE) from error

    nan = next(weights_with_nan(path, model), None)
    if nan is not None:
        raise refuse(
            path,
            f"an ONNX model whose weight {nan}, so that nothing can be compared with its outputs",
            "correct it, or take the file from its author again",
        )

    from linexport.sources.onnx_file.dynamic_shapes import examples, interface
    from linexport.sources.onnx_file.equal_sizes import fitted
    from linexport.sources.onnx_file.integer_kernels import integer_kernels
    from linexport.sources.onnx_file.module import OnnxModule, Unrunnable

    unknown = custom_operators(model)
    low = has_bfloat16(model)
    try:
        module = Unrunnable() if unknown and not run else OnnxModule(path, model)
        if low:
            model = retyped(model, BFLOAT16)
        shapes, dims = interface(model)
        shapes, dims = fitted(model, module, shapes, dims, seed)
        found = examples(model, module, shapes, dims, seed)
    except UnsupportedModelError as error:
        raise refuse(path, f"an ONNX model that is not converted: {error}", _ADVICE) from error
    nodes, parameters = counts(model)
    args = found.draw(found.sizes)
    warnings = [*unknown, *overridable(model), *([_BFLOAT16] if low else [])]
    if isinstance(module, OnnxModule):
        warnings += integer_kernels(path, model, module, args)
    return LoadedModel(
        module=module,
        args=args,
        kwargs={},
        dynamic_shapes=None,
        source=Source(
            kind="onnx",
            location=str(path),
            sha256=digest(path, files),
            description=f"ONNX graph, {nodes} nodes, {parameters:,} parameters",
        ),
        graph=OnnxGraph(path, nodes, shapes, dims, found.sizes, found.draw),
        integer_ranges=found.integer_ranges,
        warnings=tuple(warnings),
    )


_ADVICE = "export it again for operators that ONNX Runtime runs on the CPU, or convert its source"
_BFLOAT16 = (
    "The file computes in bfloat16, for which ONNX Runtime has no CPU kernels: it is converted, "
    "and compared, in float32, as are its inputs and outputs in bfloat16."
)
_FREEZE = (
    "export it again with dropout off (module.eval()) and random features drawn once, as buffers"
)
