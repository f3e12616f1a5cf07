"""Attention with what its operands are computed from, as one node of a plugin.

    CausalConvTokens, Split, norms, gates, LinearAttention  ->  linexport.LinearAttentionLayer

A step of a few tokens is then one kernel (``plugins.kernels.plans.attention_layer``) in the place
of one for each of these. The node's function is the nodes themselves, so that other runtimes have
the graph that they had.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper, inliner

from linexport.errors import OpError, UnsupportedModelError
from linexport.plugins.kernels import contract
from linexport.plugins.kernels.contract import LAYER
from linexport.plugins.kernels.description import Description, TensorDescription
from linexport.plugins.kernels.expressions import (
    Convolution,
    Expression,
    Sum,
    parts,
    read_by,
    renumbered,
)
from linexport.plugins.kernels.plans.attention_layer import (
    MOST_STATES,
    MOST_TENSORS,
    AttentionLayer,
)
from linexport.plugins.kernels.plans.parameters import CONVOLVED, GIVEN, OPERANDS
from linexport.plugins.ops import linear_attention
from linexport.plugins.ops.linear_attention.spec import AttentionSizes, LinearAttentionSpec
from linexport.plugins.ops.op import DOMAIN, Node, name_overload
from linexport.plugins.ops.registry import linexport_nodes
from linexport.targets.base import DTYPES, Options
from linexport.targets.cpu_fusion.groups import drop_unused, readers_of
from linexport.targets.cpu_fusion.program import UnfitError
from linexport.targets.cpu_fusion.sizes import with_constant_sizes
from linexport.targets.cpu_fusion.values import LEAD
from linexport.targets.trt.operands import ELEMENTS, Facts, OperandReader, given_inputs
from linexport.targets.trt.parser_form import by_plugin, plugin_attributes
from linexport.targets.trt.projections import joint_projections

log = logging.getLogger(__name__)

CONVOLVES = ("query", "key", "value")
"""Operands that may be computed by convolutions."""


def with_layers(options: Options, lowered: onnx.ModelProto) -> onnx.ModelProto:
    """Return a lowered model with one node in the place of attention and its operands' nodes."""
    if not options.plugins or options.quick:
        return lowered
    model = with_constant_sizes(lowered)
    model = joint_projections(model, {n for layer in _find(model) for n in layer.inputs.values()})
    found = _find(model)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    nodes = {node.output[0]: node for node in made.graph.node}
    gone: set[str] = set()
    for layer in found:
        description = layer.described(options)
        function = _function(model, layer)
        attention = nodes[layer.node.output[0]]
        settings = plugin_attributes(description)
        function.attribute.extend(settings)
        name_overload(function)
        attention.CopyFrom(
            helper.make_node(
                LAYER,
                list(layer.inputs.values()),
                list(layer.outputs.values()),
                layer.node.name,
                domain=DOMAIN,
                overload=function.overload,
                **settings,
            )
        )
        gone |= {one.output[0] for one in layer.removed}
        if all(f.overload != function.overload for f in made.functions):
            made.functions.append(function)
    if not found:
        return lowered
    log.info(
        "%d attentions compute their operands themselves, from %d nodes", len(found), len(gone)
    )
    kept = [n for n in made.graph.node if n.op_type == LAYER or n.output[0] not in gone]
    del made.graph.node[:]
    made.graph.node.extend(kept)
    drop_unused(made.graph)
    used = {(n.domain, n.op_type, n.overload) for n in made.graph.node}
    functions = [f for f in made.functions if (f.domain, f.name, f.overload) in used]
    del made.functions[:]
    made.functions.extend(functions)
    return made


def _find(model: onnx.ModelProto) -> list[_Layer]:
    found, facts = [], Facts.of(model)
    for node, op, view in linexport_nodes(model):
        if op is linear_attention.OP and by_plugin(node):
            try:
                found.append(_layer(model, facts, node, view))
            except (UnfitError, OpError, UnsupportedModelError) as error:
                log.debug("%s keeps its operands as nodes: %s", node.name, error)
    return found


@dataclass(frozen=True)
class _Layer:
    """One attention with its operands.

    Attributes:
        node: the attention; ``view`` through its op.
        plan: what its kernels are planned from.
        inputs: of the new node, by what the plan calls them; outputs likewise.
        shapes: of what expressions read and of states of convolutions, in batch and length.
        body: the nodes it is in the place of, in order.
        removed: of these, those that nothing else reads.
    """

    node: onnx.NodeProto
    view: Node
    plan: AttentionLayer
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    shapes: Mapping[str, tuple[int | str, ...]]
    body: Sequence[onnx.NodeProto]
    removed: Sequence[onnx.NodeProto]

    def described(self, options: Options) -> Description:
        """Return the description of its plugin, kernels compiled."""
        dtype = DTYPES[options.precision]
        given, made = contract.tensors(linear_attention.OP, self.view, dtype)
        own = {x.name: x for x in (*given, *made) if x is not None}
        types = dict(zip(GIVEN, self.plan.types, strict=False)) | dict.fromkeys(CONVOLVED, "fp32")
        own |= {n: TensorDescription(n, types[n], shape) for n, shape in self.shapes.items()}
        inputs, outputs = ([own[n] for n in names] for names in (self.inputs, self.outputs))
        return contract.describe_layer(self.plan, inputs, outputs, dtype, options.sms)


@dataclass(frozen=True)
class _Operands:
    """Operands of an attention as expressions of tensors of the graph.

    Attributes:
        reader: has read them.
        expressions: by operand; those that are tensors as the graph has them are left out.
        body: the nodes that compute them and the attention, by place in the graph, in order.
        removed: of these, those that nothing else reads.
    """

    reader: OperandReader
    expressions: Mapping[str, Expression]
    body: Sequence[int]
    removed: Sequence[onnx.NodeProto]

    @property
    def tensors(self) -> list[int]:
        """The numbers of the tensors that expressions read, in order."""
        return _tensors_read(self.expressions)

    @property
    def convolutions(self) -> list[int]:
        """The places of the convolutions that have states, in order."""
        return sorted({one.present for x in self.expressions.values() for one in _convolutions(x)})


def _layer(model: onnx.ModelProto, facts: Facts, node: onnx.NodeProto, view: Node) -> _Layer:
    """Return an attention with its operands.

    Raises:
        UnfitError: there is nothing to compute, or not by expressions.
    """
    if view.attributes.get("feature_map") not in (None, "", "identity"):
        raise UnfitError("a feature map")
    spec, sizes = linear_attention.view(view)
    if not spec.causal:
        raise UnfitError("not causal")
    names = dict(zip(linear_attention.INPUTS, given_inputs(node), strict=False))
    operands = _operands(model, facts, node, names, _heads(spec, sizes))
    used, convolved = operands.tensors, operands.convolutions
    if len(used) > MOST_TENSORS or len(convolved) > MOST_STATES:
        raise UnfitError("too many tensors")
    turned = [*operands.reader.convolutions.values()]
    own = [operands.reader.names[t] for t in used]
    given = {n: names[n] for n in names if names[n] and n not in operands.expressions}
    inputs = given | dict(zip(GIVEN, own, strict=False))
    outputs = dict(zip(linear_attention.OP.output_names, node.output, strict=False))
    if not spec.normalize:
        del outputs["present_normalizer"]
    shapes = _given_shapes(facts, own, turned)
    for name, place in zip(CONVOLVED, convolved, strict=False):
        one = turned[place]
        channels, _, taps = facts.constants[given_inputs(one)[1]].dims
        shapes[name] = ("batch", channels, taps - 1)
        outputs[name] = one.output[1]
    tensors = {t: i for i, t in enumerate(used)}
    states = {s: i for i, s in enumerate(convolved)}
    plan = AttentionLayer(
        view,
        {n: renumbered(x, tensors, states) for n, x in operands.expressions.items()},
        tuple(ELEMENTS[facts.types[name]] for name in own),
        len(states),
    )
    # By the first, ONNX Runtime knows the type of the activations.
    kind = facts.types[node.output[0]]
    inputs = dict(sorted(inputs.items(), key=lambda item: facts.types.get(item[1]) != kind))
    body = [model.graph.node[i] for i in operands.body]
    return _Layer(node, view, plan, inputs, outputs, shapes, body, operands.removed)


def _heads(spec: LinearAttentionSpec, sizes: AttentionSizes) -> dict[str, tuple[int, int]]:
    """Return the number of heads and the width of each, by operand."""
    decays = sizes.d_k if sizes.decay_per_channel else 1
    return {
        "query": (spec.q_num_heads, sizes.d_k),
        "key": (sizes.key_heads, sizes.d_k),
        "value": (spec.kv_num_heads, sizes.d_v),
        "decay": (spec.kv_num_heads, decays),
        "beta": (spec.kv_num_heads if sizes.beta_per_head else 1, 1),
    }


def _operands(
    model: onnx.ModelProto,
    facts: Facts,
    node: onnx.NodeProto,
    names: Mapping[str, str],
    heads: Mapping[str, tuple[int, int]],
) -> _Operands:
    """Return the operands of an attention, whose names are given, as expressions.

    Raises:
        UnfitError: all are tensors, or they are computed from something that is no tensor.
    """
    read = {n: heads[n] for n in OPERANDS if names.get(n)}
    blocked = set[str]()
    while True:
        reader = OperandReader(facts, facts.shapes[names["query"]][:LEAD], blocked)
        found = {n: reader.operand(names[n], *own) for n, own in read.items()}
        kept = {n: x for n, x in found.items() if not _is_tensor(x, names[n], reader)}
        if not kept:
            raise UnfitError("its operands are tensors")
        external = {reader.names[t] for t in _tensors_read(kept)}
        body = _body(model, [names[n] for n in kept], external, node)
        removed = [model.graph.node[i] for i in sorted(_removable(model.graph, body))]
        # A convolution that does not fit is a tensor to the next reading, which reads less.
        more = _unfit_convolutions(reader, kept, heads, removed)
        if not more:
            return _Operands(reader, kept, body, removed)
        blocked |= more


def _tensors_read(expressions: Mapping[str, Expression]) -> list[int]:
    return sorted({t for x in expressions.values() for one in parts(x) for t in read_by(one)})


def _given_shapes(
    facts: Facts, own: Sequence[str], convolutions: Sequence[onnx.NodeProto]
) -> dict[str, tuple[int | str, ...]]:
    """Return the shapes of tensors that expressions read, by what the plan calls them."""
    pasts = {given_inputs(one)[3] for one in convolutions if len(one.input) > 3}
    shapes: dict[str, tuple[int | str, ...]] = {}
    for name, value in zip(GIVEN, own, strict=False):
        if value in facts.constants:
            shapes[name] = tuple(facts.constants[value].dims)
            continue
        # The past of a convolution is a state, which has no axis of tokens.
        lead = ("batch",) if value in pasts else ("batch", "length")
        behind = (size for size in facts.shapes[value][len(lead) :] if isinstance(size, int))
        shapes[name] = (*lead, *behind)
    return shapes


def _is_tensor(x: Expression, name: str, reader: OperandReader) -> bool:
    """Return whether an expression is the operand itself, as the graph has it."""
    return [*read_by(x)] == [reader.names.index(name)] if name in reader.names else False


def _convolutions(x: Expression) -> list[Convolution]:
    return [one for one in dict.fromkeys(parts(x)) if isinstance(one, Convolution)]


def _unfit_convolutions(
    reader: OperandReader,
    operands: Mapping[str, Expression],
    heads: Mapping[str, tuple[int, int]],
    removed: Sequence[onnx.NodeProto],
) -> set[str]:
    """Return the convolutions that kernels would not leave whole states of, by their outputs.

    Each channel has to be computed for one head of one operand, and by nobody else.
    """
    order = [*reader.convolutions]
    channels: dict[str, list[int]] = {}
    unfit = set()
    for operand, x in operands.items():
        count, width = heads[operand]
        for one in _convolutions(x):
            name = order[one.present]
            channels.setdefault(name, []).extend(
                one.view.offset + h * one.view.head + i * one.view.component
                for h in range(count)
                for i in range(width)
            )
            inner = [s.width for s in parts(x) if isinstance(s, Sum) and one in parts(s)]
            if operand not in CONVOLVES or any(w != width for w in inner) or _nested(one):
                unfit.add(name)
    gone = {node.output[0] for node in removed}
    for name, own in channels.items():
        every = reader.facts.constants[reader.convolutions[name].input[1]].dims[0]
        if sorted(own) != list(range(every)) or name not in gone:
            unfit.add(name)
    return unfit


def _nested(one: Convolution) -> bool:
    return any(isinstance(x, Sum | Convolution) for x in parts(one.operand))


def _body(
    model: onnx.ModelProto, results: Sequence[str], external: set[str], attention: onnx.NodeProto
) -> list[int]:
    """Return the nodes that compute these from tensors and constants, and the attention, in order.

    Raises:
        UnfitError: they read something else.
    """
    constants = {t.name for t in model.graph.initializer}
    needed, found = set(results), list[int]()
    for index, node in reversed([*enumerate(model.graph.node)]):
        if node.output[0] == attention.output[0]:
            found.append(index)
        elif not needed.isdisjoint(node.output):
            needed -= set(node.output)
            found.append(index)
            needed |= {n for n in given_inputs(node) if n} - external - constants
    if needed:
        raise UnfitError(f"operands are computed from {', '.join(sorted(needed))}")
    return found[::-1]


def _removable(graph: onnx.GraphProto, body: Sequence[int]) -> set[int]:
    """Return those that nothing but each other reads; states of convolutions may be read."""
    readers = readers_of(graph)
    gone = {body[-1]}
    for index in reversed(body[:-1]):
        node = graph.node[index]
        own = node.output[:1] if node.domain == DOMAIN else node.output
        if all(reader in gone for name in own for reader in readers.get(name, ())):
            gone.add(index)
    return gone


def _function(model: onnx.ModelProto, layer: _Layer) -> onnx.FunctionProto:
    """Return the nodes of a layer as its function; those of equal layers are equal."""
    names: dict[str, str] = {}
    external = {*layer.inputs.values()}
    given = [f"x{i}" for i in range(len(layer.inputs))]
    results = [f"y{i}" for i in range(len(layer.outputs))]
    # A tensor may be an operand and in an expression of another: the first is read.
    for name, own in zip(
        (*layer.inputs.values(), *layer.outputs.values()), (*given, *results), strict=True
    ):
        names.setdefault(name, own)
    inner = onnx.ModelProto(ir_version=model.ir_version)
    inner.opset_import.extend(model.opset_import)
    inner.functions.extend(model.functions)
    constants = {t.name: t for t in model.graph.initializer}
    for node in layer.body:
        for name in node.input:
            if name in constants and name not in names:
                names[name] = f"c{len(names)}"
                value = onnx.TensorProto()
                value.CopyFrom(constants[name])
                value.name = ""
                inner.graph.node.append(
                    helper.make_node("Constant", [], [names[name]], value=value)
                )
        made = inner.graph.node.add()
        made.CopyFrom(node)
        made.name = ""
        made.input[:] = [name and names.setdefault(name, f"v{len(names)}") for name in made.input]
        # A node may compute both a given tensor and one that is not given.
        unread = {
            name: f"u{len(names)}_{i}" for i, name in enumerate(made.output) if name in external
        }
        made.output[:] = [
            name and (unread.get(name) or names.setdefault(name, f"v{len(names)}"))
            for name in made.output
        ]
    flat = inliner.inline_local_functions(inner)
    opsets = [o for o in flat.opset_import if o.domain != DOMAIN]
    return helper.make_function(DOMAIN, LAYER, given, results, flat.graph.node, opsets)
