"""Memory of an engine for logits of a real vocabulary: of all tokens, and of those that are read.

    python tools/engine_logits.py --json docs/data/engine_logits.json

A small language model with 248,320 words, in fp16 and with the default profile, is built by
TensorRT-RTX, which needs no GPU. The memory of activations is what the builder reports; that of the
logits, and of their half-precision form where the engine allocates it in each call, follows from
the shapes of the largest call. None of it was run.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import measurement
import numpy as np
import onnx
from onnx import numpy_helper

import linexport
from linexport import models
from linexport.graph.dims import DimRange
from linexport.plugins.tensorrt.flavour import RTX
from linexport.targets import Converted
from linexport.targets.runtime.options import LOGITS_TO_KEEP
from linexport.targets.trt import parser_form
from linexport.targets.trt.build import build_engine
from linexport.targets.trt.engine_form import engine_form

WORDS, SM = 248_320, 89
MODEL = {"dim": 40, "layers": 1, "num_heads": 2}
BYTES = 256
"""Words of the model that is converted: no other of its sizes is that one."""


def with_words(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with so many words, whose embeddings are zeros: memory depends on sizes."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for tensor in made.graph.initializer:
        shape = [WORDS if size == BYTES else size for size in tensor.dims]
        if shape != list(tensor.dims):
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            tensor.CopyFrom(numpy_helper.from_array(np.zeros(shape, dtype), tensor.name))
    for value in (*made.graph.output, *made.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value == BYTES:
                dim.dim_value = WORDS
    return made


def built(converted: Converted) -> dict[str, int]:
    """Return the bytes that an engine needs for activations and logits in its largest call."""
    loaded = onnx.load_model(str(converted.model), load_external_data=False)
    form = engine_form(with_words(parser_form.parsable(loaded)), converted)
    engine = build_engine(RTX, parser_form.only(form.model, SM), converted.model, form.profiles, SM)
    dims = form.profiles[0].dims
    rows, kept = dims["batch"][2], dims.get(LOGITS_TO_KEEP, dims["seq"])[2]
    allocated = any(layer["type"] == "allocate" for layer in engine.layers)
    return {
        "tokens": kept,
        "activation_bytes": engine.activations,
        "allocated_bytes": rows * kept * WORDS * 2 if allocated else 0,
        "logits_bytes": rows * kept * WORDS * 4,
    }


def main() -> None:
    """Build both engines and print what they need."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    measurement.add_option(options)
    given = options.parse_args()
    model = models.build("language_model", MODEL)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "out"
        manifest = linexport.convert(
            model.eval(),
            args=model.example_inputs(2, 16, 0),
            dynamic_shapes=model.dynamic_shapes(),
            output=place,
            target="tensorrt-rtx",
            sms=(SM,),
            precision="fp16",
            bench=False,
        )
        ranges = {n: DimRange(d.min, d.opt, d.max, d.batch) for n, d in manifest.dims.items()}
        tensors = manifest.inputs, manifest.outputs, manifest.states
        converted = Converted(
            place / "model.onnx", ranges, *tensors, logits=manifest.outputs[0].name
        )
        found = {
            "all": built(replace(converted, logits=None)),
            "kept": built(converted),
        }
    dims = {name: limits.max for name, limits in ranges.items()}
    for name, row in found.items():
        print(name, row, flush=True)
    measurement.write(given.json, {"words": WORDS, "dims": dims, "version": RTX.version(), **found})


if __name__ == "__main__":
    main()
