"""The weights, states and scratch memory of an artifact, from its manifest and its graph.

PyTorch is not needed. Of weights, a few rows are read where a table may be tied to a product.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import get_args

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from linexport import manifest as manifests
from linexport.artifact import opening
from linexport.artifact.folder_files import FolderFiles
from linexport.artifact.text.language_interface import logits_of
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.graph import external_data
from linexport.graph.footprint import Footprint
from linexport.manifest import Manifest
from linexport.manifest.records import StateRecord
from linexport.planning.planned_model import PlannedModel
from linexport.planning.weights import Kind, PlannedWeight, Role
from linexport.plugins.ops.registry import known_shapes
from linexport.targets.lowering.kept_logits import with_kept_logits
from linexport.targets.runtime.options import LOGITS_FROM

PASSED_ON = ("Transpose", "Cast", "DequantizeLinear", "Reshape", "Identity")
"""Operators between a weight and the node that computes with it."""

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)

COMPARED = 4
"""Rows by which a table is compared with a product."""

LOOKUPS = ("Gather", "GatherBlockQuantized")
PRODUCTS = ("MatMul", "Gemm", "MatMulNBits", "MatMulBnb4")
EXPERTS = ("MixtureOfExperts", "QMoE")

PARTS = ("values", "scales", "zeros")
"""Last words of the names of what a quantised weight consists of."""


def planned(folder: Path) -> PlannedModel:
    """Read an artifact.

    Raises:
        UsageError: the folder is not an artifact that this version reads.
    """
    files = FolderFiles(folder)
    manifest = opening.read_manifest(files)
    try:
        graph = opening.read_graph(files, manifests.MODEL)
    except EnvironmentProblemError as error:
        raise UsageError(f"{folder} cannot be read. {error}") from None
    found = planned_artifact(manifest, graph)
    return replace(found, weights=_joined(found.weights, folder / manifests.MODEL))


def planned_artifact(manifest: Manifest, model: onnx.ModelProto) -> PlannedModel:
    """Return what planning needs of an artifact with this graph, whose weights may be external."""
    footprint = Footprint(_last_logits(manifest, model))
    batch = {name for name, dim in manifest.dims.items() if dim.batch}
    pasts = _grown_dims(manifest.states)

    def scratch(rows: int, tokens: int, past: int) -> int:
        dims = {d for i in manifest.inputs for d in i.shape if isinstance(d, str)}
        sizes = {d: rows if d in batch else past if d in pasts else tokens for d in dims}
        return footprint.at(sizes)

    fixed = sum(_bytes(s.dtype, s.shape) for s in manifest.states if s.grows is None)
    growing = [s for s in manifest.states if s.grows is not None]
    return PlannedModel(
        _description(manifest),
        tuple(_weights(manifest, model)),
        fixed,
        sum(_bytes(s.dtype, s.shape) for s in growing),
        scratch,
        bool(manifest.states),
        manifest.target,
        _kind(manifest),
        sum(_tensor_bytes(t) for t in _initializers(model)),
        any(s.dtype == "float16" for s in growing),
    )


def _description(manifest: Manifest) -> str:
    """Return one line for people, with what is not counted."""
    weights = manifest.quantisation.weights if manifest.quantisation else _kind(manifest)
    about = f"{manifest.source.description}, for target {manifest.target} with weights in {weights}"
    beside = [one.file for one in (manifest.vision, manifest.mtp) if one is not None]
    return f"{about}, without {' and '.join(beside)}" if beside else about


def _last_logits(manifest: Manifest, model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph of calls that need the logits of one token, as steps and prompts do."""
    logits = logits_of(manifest)
    kept = model if logits is None else with_kept_logits(model, logits)
    if kept is not model:
        kept.graph.initializer.append(numpy_helper.from_array(np.full(1, -1), LOGITS_FROM))
    return kept


def _kind(manifest: Manifest) -> Kind | None:
    """Return the kind of an artifact's weights; None where there are several."""
    if manifest.quantisation is None:
        return "fp16" if manifest.precision in ("fp16", "bf16") else "float32"
    named = "fp16" if manifest.quantisation.weights == "bf16" else manifest.quantisation.weights
    return next((kind for kind in get_args(Kind) if kind == named), None)


def _grown_dims(states: Sequence[StateRecord]) -> set[str]:
    """Return the names of the dimensions that count earlier tokens."""
    grown = {s.shape[s.grows] for s in states if s.grows is not None}
    return {dim for dim in grown if isinstance(dim, str)}


def _bytes(dtype: str, shape: Sequence[int | str | None]) -> int:
    """Return the bytes of a state of one row and, where it grows, one token."""
    return np.dtype(dtype).itemsize * prod(size for size in shape if isinstance(size, int))


def _initializers(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Yield the initializers of the main graph and the constants of all nodes and functions."""
    yield from model.graph.initializer
    for nodes in (model.graph.node, *(f.node for f in model.functions)):
        for node in nodes:
            yield from (a.t for a in node.attribute if a.HasField("t"))


def _tensor_bytes(tensor: TensorProto) -> int:
    half = tensor.data_type in (TensorProto.INT4, TensorProto.UINT4)
    bits = 4 if half else 8 * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return -(-prod(tensor.dims) * bits // 8)


class _Readers:
    """The nodes that compute with each weight, behind those that pass it on."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.nodes: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in node.input:
                self.nodes.setdefault(name, []).append(node)
        self.shapes = known_shapes(model)

    def of(self, name: str) -> list[tuple[onnx.NodeProto, bool]]:
        """Return the nodes that compute with a weight; see ``behind``."""
        return list(self.behind(name))

    def behind(self, name: str, turned: bool = False) -> Iterator[tuple[onnx.NodeProto, bool]]:
        """Yield nodes that read a value, and whether it was transposed on the way."""
        for node in self.nodes.get(name, ()):
            if node.op_type in PASSED_ON and not node.domain:
                yield from self.behind(node.output[0], turned ^ (node.op_type == "Transpose"))
            else:
                yield node, turned

    def chosen(self, node: onnx.NodeProto) -> int | None:
        """Return how many experts of a token a node computes with; None where nothing says it."""
        given = next((a.i for a in node.attribute if a.name == "k"), 0)
        if given or node.op_type == "QMoE":
            return given or 1
        found = (self.shapes.get(node.input[1]) or (None,))[-1]
        return found if isinstance(found, int) else None


def _weights(manifest: Manifest, model: onnx.ModelProto) -> Iterator[PlannedWeight]:
    """Yield the weights of the main graph, those in fewer bits under their own names."""
    readers = _Readers(model)
    shapes: Mapping[str, tuple[int, int]] = {
        t.name: (t.outputs, t.inputs)
        for t in (manifest.quantisation.tensors if manifest.quantisation else ())
    }
    stored = {tensor.name for tensor in model.graph.initializer}
    for name, (outputs, inputs) in shapes.items():
        if not any(own == name or own.startswith(f"{name}/") for own in stored):
            yield PlannedWeight(name, "product", outputs, inputs)  # stored together with others
    for tensor in model.graph.initializer:
        name, _, part = tensor.name.rpartition("/")
        quantised = part in PARTS and name in shapes
        if quantised and part != PARTS[0]:
            continue
        if quantised or tensor.data_type in FLOATS:
            own, dims = name if quantised else tensor.name, tuple(tensor.dims)
            yield _weight(own, dims, shapes.get(own), readers.of(tensor.name), readers)


def _weight(
    name: str,
    dims: Sequence[int],
    shape: tuple[int, int] | None,
    uses: Sequence[tuple[onnx.NodeProto, bool]],
    readers: _Readers,
) -> PlannedWeight:
    """Return a weight from its recorded shape, or its dimensions and the nodes that read it."""
    role = _role({node.op_type for node, _ in uses}, len(dims))
    if shape is None and role == "product" and len(dims) == 2:
        turned = next(t for node, t in uses if node.op_type in PRODUCTS)
        shape = (dims[0], dims[1]) if turned else (dims[1], dims[0])
    if shape is None:
        shape = (prod(dims[:-1]), dims[-1]) if len(dims) > 1 else (prod(dims), 1)
    if role != "experts":
        return PlannedWeight(name, role, *shape)
    node = next(node for node, _ in uses if node.op_type in EXPERTS)
    return PlannedWeight(
        name, role, *shape, experts=dims[0], chosen=readers.chosen(node) or dims[0]
    )


def _role(readers: Collection[str], axes: int) -> Role:
    """Return the role of a weight of so many axes, by the operators that read it."""
    multiplied, looked_up = (any(op in readers for op in ops) for ops in (PRODUCTS, LOOKUPS))
    if axes > 2 and any(op in readers for op in EXPERTS):
        return "experts"
    if multiplied and axes > 1:
        return "tied" if looked_up else "product"
    return "table" if looked_up and axes == 2 else "other"


def _joined(weights: Sequence[PlannedWeight], path: Path) -> tuple[PlannedWeight, ...]:
    """Return weights with each table that a product has the values of as one, as quantising does.

    Args:
        weights: of a graph, whose float32 file may have such values twice.
        path: its file, from which a few rows of either are compared. Those in fewer bits are not:
            quantising has joined what is equal.
    """
    products = {(w.outputs, w.inputs): w for w in weights if w.role == "product"}
    pairs = [(w, products.get((w.outputs, w.inputs))) for w in weights if w.role == "table"]
    if not any(product for _, product in pairs):
        return tuple(weights)
    model, values = external_data.read_mapped(path)
    inside = {t.name: t for t in model.graph.initializer if t.name not in values}
    stored = inside.keys() | values.keys()

    def rows(weight: PlannedWeight) -> NDArray:
        found = values.get(weight.name)
        found = numpy_helper.to_array(inside[weight.name]) if found is None else found
        by_output = found if found.shape == (weight.outputs, weight.inputs) else found.T
        return by_output[:COMPARED]

    twice = {
        product.name: table
        for table, product in pairs
        if product is not None
        and {table.name, product.name} <= stored
        and np.array_equal(rows(table), rows(product))
    }
    tables = {table.name for table in twice.values()}
    kept = (w for w in weights if w.name not in tables)
    return tuple(replace(w, role="tied") if w.name in twice else w for w in kept)
