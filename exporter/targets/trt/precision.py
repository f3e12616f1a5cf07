"""float32 graph -> the same in half precision, with every type written out.

TensorRT takes networks as they are typed, so precision is a rewrite. The rule is autocast's:

    products and linexport ops    half precision, accumulated in float32 by their kernels
    sums, exponentials, ratios    float32
    everything else               the widest type among its inputs

States, decays, and the graph's inputs and outputs, are float32, but for keys and values of softmax
layers where these are to be in half precision, in which their products take them. A constant that
half precision would take for zero or infinity keeps its operation in float32: an epsilon keeps its
value.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

from linexport.errors import UnsupportedModelError
from linexport.graph import external_data
from linexport.graph.states import is_rows
from linexport.plugins.ops.op import DOMAIN, attribute_value
from linexport.plugins.ops.registry import all_ops
from linexport.targets.base import OrtSession
from linexport.targets.runtime.options import FLOAT_PRODUCTS

ELEMENTS: dict[str, int] = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
ARRAYS: dict[int, Any] = {TensorProto.FLOAT16: np.float16, TensorProto.BFLOAT16: ml_dtypes.bfloat16}

PRODUCTS = {"MatMul", "Gemm", "Conv", "ConvTranspose"}
SENSITIVE = {
    *("ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceSumSquare"),
    *("ReduceProd", "CumSum", "Exp", "Log", "Pow", "Sqrt", "Reciprocal", "Div", "Softplus"),
    *("Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "GroupNormalization"),
    *("InstanceNormalization", "Einsum", "Resize"),
}


def half(
    model: onnx.ModelProto,
    precision: str,
    takes: Collection[str] | None = None,
    norms: Collection[str] = (),
    half_caches: bool = False,
) -> onnx.ModelProto:
    """The model in ``precision``; in "fp32" it is the model itself.

    Args:
        model: with its ops' shapes known.
        precision: one of fp32, fp16, bf16.
        takes: standard operators that there are kernels of in that precision, None for all; others
            stay in float32.
        norms: operators that take and give half precision, and sum in float32.
        half_caches: keys and values of softmax layers are states in fp16, where that is the
            precision. (NumPy has no bfloat16.)

    Raises:
        UnsupportedModelError: it has branches or loops, whose types this does not follow.
    """
    if precision == "fp32":
        return model
    rewrite = _Rewrite(model, ELEMENTS[precision], takes, norms)
    if half_caches and precision == "fp16":
        rewrite.keep_caches()
    return rewrite.run()


class _Rewrite:
    """One model on its way to half precision."""

    def __init__(
        self,
        model: onnx.ModelProto,
        lower: int,
        takes: Collection[str] | None,
        norms: Collection[str],
    ) -> None:
        self.model = shape_inference.infer_shapes(model)
        self.graph, self.lower, self.takes = self.model.graph, lower, takes
        self.sensitive = SENSITIVE - {*norms}
        self.types = {t.name: t.data_type for t in self.graph.initializer}
        for info in [*self.graph.output, *self.graph.value_info, *self.graph.input]:
            self.types[info.name] = info.type.tensor_type.elem_type
        self.infos = {
            i.name: i for i in [*self.graph.output, *self.graph.value_info, *self.graph.input]
        }
        self.constants = {t.name: numpy_helper.to_array(t) for t in self.graph.initializer}
        self.nodes: list[onnx.NodeProto] = []
        self.made: dict[tuple[str, int], str] = {}
        self.presents: set[str] = set()
        """Caches of keys and values that are in half precision."""

    def keep_caches(self) -> None:
        """Have keys and values that a Concat makes longer be states in half precision."""
        outputs = {o.name: o for o in self.graph.output}
        inputs = {i.name: i for i in self.graph.input if is_rows(i.name)}
        for node in self.graph.node:
            if node.op_type != "Concat" or node.output[0] not in outputs:
                continue
            pasts = [name for name in node.input if name in inputs]
            if len(pasts) != 1 or self.types[pasts[0]] != TensorProto.FLOAT:
                continue
            for info in (inputs[pasts[0]], outputs[node.output[0]]):
                info.type.tensor_type.elem_type = self.types[info.name] = self.lower
            self.presents.add(node.output[0])

    def run(self) -> onnx.ModelProto:
        """See ``half``."""
        outputs = {o.name for o in self.graph.output}
        for node in self.graph.node:
            self._node(node, outputs)
        del self.graph.node[:]
        self.graph.node.extend(self.nodes)
        used = {name for node in self.nodes for name in node.input} | outputs
        kept = [t for t in self.graph.initializer if t.name in used]
        del self.graph.initializer[:]
        self.graph.initializer.extend(kept)
        for info in self.graph.value_info:
            info.type.tensor_type.elem_type = self.types[info.name]
        return self.model

    def _node(self, node: onnx.NodeProto, outputs: set[str]) -> None:
        if any(a.type in (a.GRAPH, a.GRAPHS) for a in node.attribute):
            raise UnsupportedModelError(
                f"{node.op_type} {node.name!r} holds a graph of its own; --precision follows types "
                "through plain graphs only. Use --precision fp32."
            )
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            value = node.attribute[0].t
            self.types[node.output[0]] = value.data_type
            self.constants[node.output[0]] = numpy_helper.to_array(value)
            self.nodes.append(node)
            return
        targets, given = self._types(node)
        for i, name in enumerate(node.input):
            if name and self._floating(name) and targets[i]:
                node.input[i] = self._as(name, targets[i])
        self.nodes.append(node)
        for i, name in enumerate(node.output):
            kind = given[i]
            if name in self.presents or not name or not kind:
                continue
            if self.types.get(name, TensorProto.FLOAT) != TensorProto.FLOAT:
                continue
            self.types[name] = kind
            if name in outputs and kind != TensorProto.FLOAT:
                self._restore(node, i)

    def _types(self, node: onnx.NodeProto) -> tuple[list[int], list[int]]:
        """Return the floating type to cast each input to and of each output; 0: as it is."""
        if node.domain == DOMAIN:
            schema, by_kind = all_ops()[node.op_type].schema, self._allowed(node)
            inputs, outputs = schema.inputs, schema.outputs
            return (
                [by_kind.get(inputs[i].type_str, 0) for i in range(len(node.input))],
                [by_kind.get(outputs[i].type_str, 0) for i in range(len(node.output))],
            )
        if node.op_type in ("Cast", "Shape", "Size"):
            return [0] * len(node.input), [0] * len(node.output)
        kind = self.lower if node.output[0] in self.presents else self._kind(node)
        return [kind] * len(node.input), [kind] * len(node.output)

    def _allowed(self, node: onnx.NodeProto) -> dict[str, int]:
        """Half precision where the op takes it, by type parameter; float32 where it does not."""
        name = f"tensor({TensorProto.DataType.Name(self.lower).lower()})"
        op = all_ops()[node.op_type]
        found = {
            c.type_param_str: self.lower if name in c.allowed_type_strs else TensorProto.FLOAT
            for c in op.schema.type_constraints
        }
        attributes = {a.name: attribute_value(a) for a in node.attribute}
        return found | dict.fromkeys(op.float32(attributes), TensorProto.FLOAT)

    def _kind(self, node: onnx.NodeProto) -> int:
        floating = [name for name in node.input if name and self._floating(name)]
        if node.op_type in self.sensitive or any(self._lost(name) for name in floating):
            return TensorProto.FLOAT
        if self.takes is not None and not node.domain and node.op_type not in self.takes:
            return TensorProto.FLOAT
        if node.op_type in PRODUCTS:
            return self.lower
        values = [name for name in floating if name not in self.constants]
        widest = any(self.types[name] == TensorProto.FLOAT for name in values)
        return TensorProto.FLOAT if widest or not floating else self.lower

    def _floating(self, name: str) -> bool:
        return self.types.get(name, TensorProto.FLOAT) in (TensorProto.FLOAT, self.lower)

    def _lost(self, name: str) -> bool:
        """A constant with a value that is zero or infinite in half precision, and is not."""
        if name not in self.constants:
            return False
        wide = self.constants[name].astype(np.float32)
        with np.errstate(over="ignore"):
            narrow = wide.astype(ARRAYS[self.lower]).astype(np.float32)
        lost = (np.isinf(narrow) & np.isfinite(wide)) | ((narrow == 0) & (wide != 0))
        # In a weight, a value that vanishes is noise; alone or nearly so it is an epsilon.
        return bool(lost.any()) and (wide.size <= 16 or bool(np.isinf(narrow).any()))

    def _as(self, name: str, kind: int) -> str:
        """The value in that type: a converted constant, or a Cast, one for all its readers."""
        if self.types.get(name, TensorProto.FLOAT) == kind:
            return name
        if (name, kind) not in self.made:
            made = self._typed(name, kind)
            self.made[name, kind] = made
            self.types[made] = kind
            if name in self.constants:
                array = self.constants[name].astype(ARRAYS.get(kind, np.float32))
                self.graph.initializer.append(numpy_helper.from_array(array, made))
            else:
                self.nodes.append(helper.make_node("Cast", [name], [made], f"{made}/Cast", to=kind))
        return self.made[name, kind]

    def _typed(self, name: str, kind: int) -> str:
        """A name for the value in that type, with the same shape."""
        made = f"{name}_{TensorProto.DataType.Name(kind).lower()}"
        known = self.infos.get(name)
        if known is not None:
            info = self.graph.value_info.add()
            info.CopyFrom(known)
            info.name, info.type.tensor_type.elem_type = made, kind
        return made

    def _restore(self, node: onnx.NodeProto, position: int) -> None:
        """An output of the graph: the node's value gets another name, and is cast back."""
        name = node.output[position]
        inner = self._typed(name, self.types[name])
        node.output[position] = inner
        self.types[inner], self.types[name] = self.types[name], TensorProto.FLOAT
        # Readers of the output inside the graph take what was computed.
        self.made[name, self.types[inner]] = inner
        cast = helper.make_node("Cast", [inner], [name], f"{name}/Cast", to=TensorProto.FLOAT)
        self.nodes.append(cast)


def open_here(model: external_data.ModelSource, **keywords: Any) -> OrtSession:
    """Open the ONNX model in ONNX Runtime, as ``OrtSession`` does.

    ONNX Runtime has no CPU kernels of bfloat16: such a model is run with its rounded weights in
    float32. Products with integer weights take activations as they are, as engines do.
    """
    if isinstance(model, bytes):
        graph = onnx.load_from_string(model)
    else:
        graph = external_data.read_graph(model)
    if _has_bfloat16(graph):
        whole = graph if isinstance(model, bytes) else external_data.read_whole(model)
        widen(whole)
        model = whole.SerializeToString()
    settings = {**FLOAT_PRODUCTS, **(keywords.pop("settings", None) or {})}
    return OrtSession(model, settings=settings, **keywords)


def _has_bfloat16(model: onnx.ModelProto) -> bool:
    """Return whether a value is of that type, of a model whose weights may be left out."""
    nodes = [*model.graph.node, *(n for f in model.functions for n in f.node)]
    types = [t.data_type for t in model.graph.initializer]
    types += [value.type.tensor_type.elem_type for value in model.graph.value_info]
    types += [a.t.data_type for n in nodes for a in n.attribute]
    types += [a.i for n in nodes if n.op_type == "Cast" for a in n.attribute if a.name == "to"]
    return TensorProto.BFLOAT16 in types


def widen(model: onnx.ModelProto, lower: int = TensorProto.BFLOAT16) -> bool:
    """Make every bfloat16 value float32, in place; False where there is none.

    So are the inputs and outputs of the graph.

    Args:
        model: external initializers get the type, and their values are left to the caller.
        lower: the type of half precision, where it is another one.
    """
    found = False
    tensors = list(model.graph.initializer)
    for node in [*model.graph.node, *(n for f in model.functions for n in f.node)]:
        for attribute in node.attribute:
            tensors += [attribute.t] if attribute.HasField("t") else []
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == lower:
                attribute.i, found = TensorProto.FLOAT, True
    for tensor in tensors:
        if tensor.data_type == lower:
            if tensor.data_location == TensorProto.EXTERNAL:
                tensor.data_type = TensorProto.FLOAT
            else:
                wide = numpy_helper.to_array(tensor).astype(np.float32)
                tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))
            found = True
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == lower:
            value.type.tensor_type.elem_type, found = TensorProto.FLOAT, True
    del model.graph.value_info[:]
    return found
