"""From a manifest and an original: the subject that parity and timing work on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import onnx

from linexport import targets
from linexport.graph.dims import DimRange
from linexport.graph.states import State
from linexport.loaders.model import LoadedModel
from linexport.parity import Subject
from linexport.parity.tolerances import TOLERANCES, Tolerance
from linexport.plugins.ops.registry import dim
from linexport.targets import Session


def tensors(infos: Iterable[onnx.ValueInfoProto]) -> list[dict[str, Any]]:
    """Name, dtype and shape of graph inputs or outputs, as written to the manifest."""
    return [
        {
            "name": info.name,
            "dtype": onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type).name,
            "shape": [dim(d) for d in info.type.tensor_type.shape.dim],
        }
        for info in infos
    ]


def subject_of(
    manifest: dict[str, Any], loaded: LoadedModel, open_session: Callable[[], Session]
) -> Subject:
    """The converted model of a manifest beside its original."""
    states = [State.from_json(s) for s in manifest["states"]]
    pasts = {s.past for s in states}
    presents = {s.present for s in states}
    inputs = [i for i in manifest["inputs"] if i["name"] not in pasts]
    outputs = [o for o in manifest["outputs"] if o["name"] not in presents]
    return Subject(
        loaded=loaded,
        open=open_session,
        input_names=[i["name"] for i in inputs],
        input_shapes=[i["shape"] for i in inputs],
        output_names=[o["name"] for o in outputs],
        output_shapes=[o["shape"] for o in outputs],
        states=states,
        dims={
            n: DimRange(d["min"], d["opt"], d["max"], d["batch"])
            for n, d in manifest["dims"].items()
        },
        traced={n: d["traced"] for n, d in manifest["dims"].items()},
        tolerance=tolerance_of(manifest),
    )


def tolerance_of(manifest: dict[str, Any]) -> Tolerance:
    """Of the coarsest dtype that the artifact rounds to: the one asked for, or its outputs'."""
    kinds = {targets.DTYPES[manifest.get("precision", "fp32")]}
    kinds |= {output["dtype"] for output in manifest["outputs"]}
    return TOLERANCES[next(k for k in ("bfloat16", "float16", "float32") if k in kinds)]
