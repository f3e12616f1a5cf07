"""Softmax attention over a cache of keys and values as one node of the CPU library.

    k, v = Concat(past_key, key), Concat(past_value, value)
    Softmax(scale query k^T + mask) v  ->  linexport.cpu.CachedAttention

Queries, keys and values have tokens before heads, as products make them, or are transposed: the
node reads and writes them so, and scores with all keys are not in memory. Several heads of queries
may share one of keys. Rotary embeddings, which ONNX Runtime's operator takes with heads first,
become nodes of a program. A mask that says no more than which keys are seen is not made.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper, parser

from linexport.plugins.ops.op import name_overload
from linexport.plugins.ops.shapes import Dim
from linexport.targets.cpu_fusion.groups import add_functions, drop_unused, ordered
from linexport.targets.cpu_fusion.lookup import KnownShape, Lookup, NewNodes, UnmatchedError, terms
from linexport.targets.cpu_fusion.nodes import attributes
from linexport.targets.cpu_fusion.rotary import Rotary, find_rotary, on_tokens
from linexport.targets.cpu_fusion.seen_keys import SeenKeys, find_seen_keys

log = logging.getLogger(__name__)

OP = "CachedAttention"

PASTS, PRESENTS = slice(3, 5), slice(1, 3)
"""Places of the caches among its inputs and outputs."""

MASK, CACHED = 5, 6
"""Places among its inputs: of the mask, int64 where the node has the attribute ``low``, and of the
tokens that caches hold, where these have memory for more; see ``cache_capacity``."""

HEADS_FIRST = [0, 2, 1, 3]
"""Axes of (B, T, H, d) in their order in (B, H, T, d), and back."""

BODY = """
    <domain: "{domain}", opset_import: ["": {opset}]>
    CachedAttention <{settings}> (query, key, value, past_key, past_value, mask)
        => (output, present_key, present_value) {{
      key_sizes = Constant <value_ints: ints = [0, 0, {heads}, {d_k}]> ()
      value_sizes = Constant <value_ints: ints = [0, 0, {heads}, {d_v}]> ()
      query_sizes = Constant <value_ints: ints = [0, 0, {heads}, {group}, {d_k}]> ()
      output_sizes = Constant <value_ints: ints = [0, 0, {width}]> ()
      group_axis = Constant <value_ints: ints = [2]> ()
      scale = Constant <value_float: float = @scale> ()
      key_heads = Reshape (key, key_sizes)
      value_heads = Reshape (value, value_sizes)
      query_heads = Reshape (query, query_sizes)
      own_key = Transpose <perm: ints = [0, 2, 1, 3]> (key_heads)
      own_value = Transpose <perm: ints = [0, 2, 1, 3]> (value_heads)
      own_query = Transpose <perm: ints = [0, 2, 3, 1, 4]> (query_heads)
      present_key = Concat <axis: int = 2> (past_key, own_key)
      present_value = Concat <axis: int = 2> (past_value, own_value)
      turned_key = Transpose <perm: ints = [0, 1, 3, 2]> (present_key)
      all_keys = Unsqueeze (turned_key, group_axis)
      all_values = Unsqueeze (present_value, group_axis)
{mask}
      of_heads = Unsqueeze (added, group_axis)
      products = MatMul (own_query, all_keys)
      scaled = Mul (products, scale)
      scores = Add (scaled, of_heads)
      weights = Softmax <axis: int = -1> (scores)
      summed = MatMul (weights, all_values)
      turned = Transpose <perm: ints = [0, 3, 1, 2, 4]> (summed)
      output = Reshape (turned, output_sizes)
    }}
"""
"""The function of a node, in standard operators."""

ADDED = "      added = Identity (mask)"
"""The part for a mask that is added to the scores."""

SEEN = """
      low = Constant <value_float: float = @low> ()
      zero = Constant <value_float: float = 0.0> ()
      first = Constant <value_int: int = 0> ()
      step = Constant <value_int: int = 1> ()
      first_axis = Constant <value_ints: ints = [0]> ()
      second_axis = Constant <value_ints: ints = [1]> ()
      inner_axes = Constant <value_ints: ints = [1, 2]> ()
      keys = Shape <start: int = 2, end: int = 3> (present_key)
      length = Shape <start: int = 1, end: int = 2> (query)
      end = Squeeze (keys)
      numbers = Range (first, end, step)
      past = Sub (keys, length)
      rows = Slice (numbers, past, keys, first_axis)
      column = Unsqueeze (rows, second_axis)
      earlier = LessOrEqual (numbers, column)
      kept = Cast <to: int = 9> (mask)
      kept_of_heads = Unsqueeze (kept, inner_axes)
      seen = And (earlier, kept_of_heads)
      added = Where (seen, zero, low)"""
"""The part for a mask that says which keys are seen."""


@dataclass(frozen=True)
class _Tokens:
    """Queries, keys or values of the call's tokens.

    Attributes:
        source: (B, T, H, d), or (B, H, T, d).
        heads_first: the latter.
        lead: B and T.
        heads: H.
        width: d.
        rotary: what turns pairs of channels.
    """

    source: str
    heads_first: bool
    lead: tuple[Dim, Dim]
    heads: int
    width: int
    rotary: Rotary | None

    @property
    def packed(self) -> KnownShape:
        """Shape with all heads of a token one behind the other."""
        return (*self.lead, self.heads * self.width)


@dataclass(frozen=True)
class _Cache:
    """Keys or values of all tokens.

    Attributes:
        past: (B, H, P, d).
        added: of the call.
        present: (B, H, P + T, d).
    """

    past: str
    added: _Tokens
    present: str


@dataclass(frozen=True)
class _Attention:
    """An attention.

    Attributes:
        query: of the call.
        key: of all tokens.
        value: of all tokens.
        mask: what is added to the scores of a query head, (B or 1, 1, T, P + T).
        seen: what that says, where it says no more than which keys are seen.
        scale: of the scores.
        output: (B, T, H, d), or (B, H, T, d).
        heads_first: the latter.
    """

    query: _Tokens
    key: _Cache
    value: _Cache
    mask: str
    seen: SeenKeys | None
    scale: float
    output: str
    heads_first: bool


def with_cached_attention(model: onnx.ModelProto, domain: str) -> onnx.ModelProto:
    """Return the model with such nodes in the place of attentions, itself where it has none.

    Args:
        model: attentions that are not of float32 are left.
        domain: of the nodes.
    """
    graph = Lookup(model)
    found = []
    for node in model.graph.node:
        if (node.domain, node.op_type) == ("", "Softmax"):
            try:
                found.append(_matched(graph, node))
            except UnmatchedError as error:
                log.debug("%s is not of attention over a cache: %s", node.name, error)
    if not found:
        return model
    log.info("%d attentions over a cache are nodes of the CPU library", len(found))
    opset = next(o.version for o in model.opset_import if not o.domain)
    new, functions, gone = NewNodes(), {}, set()
    for one in found:
        function = _function(one, domain, opset)
        functions[function.overload] = function
        gone |= {*_add(new, graph, one, function)}
    made = onnx.ModelProto()
    made.CopyFrom(model)
    kept = [node for node in model.graph.node if gone.isdisjoint(node.output)]
    del made.graph.node[:]
    made.graph.node.extend(ordered([*kept, *new.nodes]))
    made.graph.value_info.extend(
        value for name, value in new.values.items() if not graph.stated(name)
    )
    made.graph.initializer.extend(new.initializers.values())
    add_functions(made, functions.values(), domain)
    drop_unused(made.graph)
    return made


def _matched(graph: Lookup, softmax: onnx.NodeProto) -> _Attention:
    """Return the attention that a Softmax is of.

    Raises:
        UnmatchedError: it is of none, or of another one.
    """
    if attributes(softmax).get("axis", -1) not in (-1, 3):
        raise UnmatchedError("another axis")
    added = graph.expect(softmax.input[0], "Add")
    scores, mask = added.input if _is_product(graph, added.input[0]) else reversed(added.input)
    product, scale = _product(graph, scores)
    key = _cache(graph, graph.expect(product.input[1], "Transpose", perm=[0, 1, 3, 2]).input[0])
    weights = graph.only_reader(softmax.output[0], "Reshape") or softmax
    combined = graph.expect_reader(weights.output[0], "MatMul")
    value = _cache(graph, combined.input[1])
    query, output = product.input[0], combined.output[0]
    grouped, parted = graph.producer(query, "Reshape"), graph.only_reader(output, "Reshape")
    if grouped is not None and parted is not None:
        query, output = grouped.input[0], parted.output[0]
    turned = graph.only_reader(output, "Transpose")
    moved = turned is not None and attributes(turned).get("perm") == HEADS_FIRST
    if turned is not None and moved:
        output = turned.output[0]
    tokens, mask = _tokens(graph, query), _mask(graph, mask)
    seen = find_seen_keys(graph, mask)
    found = _Attention(tokens, key, value, mask, seen, scale, output, not moved)
    _check_shapes(graph, found, product.output[0])
    return found


def _is_product(graph: Lookup, name: str) -> bool:
    return any(graph.producer(name, op) is not None for op in ("Mul", "MatMul", "Reshape"))


def _product(graph: Lookup, scores: str) -> tuple[onnx.NodeProto, float]:
    """Return the product of queries and keys, and the number that it is multiplied by."""
    scaled = graph.producer(scores, "Mul")
    if scaled is None:
        return graph.expect(_grouped(graph, scores), "MatMul"), 1.0
    for name, factor in (scaled.input, reversed(scaled.input)):
        number = graph.number(factor)
        if number is not None:
            return graph.expect(_grouped(graph, name), "MatMul"), number
    raise UnmatchedError("scores that are not multiplied by a number")


def _grouped(graph: Lookup, scores: str) -> str:
    """Return scores of the heads that share keys one below the other, (B, G, r T, S).

    They are what a Reshape to (B, G r, T, S) takes, where masks are of the heads themselves.
    """
    apart = graph.producer(scores, "Reshape")
    return scores if apart is None else apart.input[0]


def _cache(graph: Lookup, present: str) -> _Cache:
    joined = graph.expect(present, "Concat")
    if attributes(joined).get("axis") not in (2, -2) or len(joined.input) != 2:
        raise UnmatchedError(f"{present} is not the past and the call's tokens")
    if not graph.has_one_reader(present):
        raise UnmatchedError(f"{present} is read elsewhere")
    past, added = joined.input
    return _Cache(past, _tokens(graph, added), present)


def _tokens(graph: Lookup, name: str) -> _Tokens:
    rotary = find_rotary(graph, name)
    x = rotary.x if rotary else name
    turned = graph.producer(x, "Transpose")
    if turned is not None and attributes(turned).get("perm") == HEADS_FIRST:
        source, heads_first = turned.input[0], False
        batch, length, heads, width = graph.shape(source, 4)
    else:
        source, heads_first = x, True
        batch, heads, length, width = graph.shape(source, 4)
    if not isinstance(heads, int) or not isinstance(width, int) or min(heads, width) < 1:
        raise UnmatchedError(f"{name} has no fixed heads and channels")
    return _Tokens(source, heads_first, (batch, length), heads, width, rotary)


def _mask(graph: Lookup, name: str) -> str:
    """Return what is added to the scores of one query head, where several have a head of keys."""
    repeated = graph.producer(name, "Concat")
    if repeated is None:
        return name
    if len({*repeated.input}) > 1 or attributes(repeated).get("axis") not in (2, -2):
        raise UnmatchedError("a mask of several parts")
    return repeated.input[0]


def _check_shapes(graph: Lookup, found: _Attention, scores: str) -> None:
    """Check that shapes are those of the operator.

    What is between follows: a Reshape from (B, H, T, d) to (B, G, n, d) puts H / G heads of queries
    one below the other, as the mask's copies are.

    Raises:
        UnmatchedError: they are not.
    """
    query, key, value = found.query, found.key.added, found.value.added
    (batch, length), heads = query.lead, key.heads
    scored, mask = graph.shape(scores, 4), graph.shape(found.mask, 4)
    pasts = [graph.shape(cache.past, 4) for cache in (found.key, found.value)]
    output = graph.shape(found.output, 4)
    fits = (
        key.lead == value.lead == query.lead
        and key.width == query.width
        and value.heads == heads
        and query.heads % heads == 0
        and scored[:2] == (batch, heads)
        and output == _sizes(found)
        and mask[0] in (1, batch)
        and mask[1:3] == (1, length)
        and terms(mask[3]) == terms(scored[3])
        and all(
            (*past[:2], past[3]) == (batch, heads, own.width)
            for past, own in zip(pasts, (key, value), strict=True)
        )
    )
    if not fits:
        raise UnmatchedError("shapes of another attention")


def _sizes(found: _Attention) -> KnownShape:
    """Return the shape of the output."""
    (batch, length), heads = found.query.lead, found.query.heads
    middle = (heads, length) if found.heads_first else (length, heads)
    return (batch, *middle, found.value.added.width)


def _function(found: _Attention, domain: str, opset: int) -> onnx.FunctionProto:
    """Return what the node of an attention computes; those of equal sizes are equal."""
    query, key, value = found.query, found.key.added, found.value.added
    text = BODY.format(
        domain=domain,
        opset=opset,
        settings="scale, low" if found.seen else "scale",
        mask=SEEN if found.seen else ADDED,
        heads=key.heads,
        group=query.heads // key.heads,
        d_k=key.width,
        d_v=value.width,
        width=query.heads * value.width,
    )
    function = parser.parse_function(text)
    name_overload(function)
    return function


def _add(
    new: NewNodes, graph: Lookup, found: _Attention, function: onnx.FunctionProto
) -> list[str]:
    """Add the nodes of an attention, and return what they make that others made before."""
    tokens = (found.query, found.key.added, found.value.added)
    inputs = [_packed(new, graph, one) for one in tokens]
    settings: dict[str, Any] = {"scale": found.scale}
    settings |= {"low": found.seen.low} if found.seen else {}
    mask = found.seen.key_mask if found.seen else found.mask
    inputs += [found.key.past, found.value.past, mask]
    shape = (*found.query.lead, found.query.heads * found.value.added.width)
    joined = None if found.heads_first else graph.only_reader(found.output, "Reshape")
    if joined is not None and graph.has_shape(joined.output[0], shape):
        result = output = joined.output[0]
    else:
        result, output = found.output, f"{found.output}/packed"
        sizes = found.query.heads, found.value.added.width
        parted = f"{result}/of_heads" if found.heads_first else result
        new.know(output, shape)
        new.add("Reshape", [output, new.integers([0, 0, *sizes])], parted, (*shape[:2], *sizes))
        if found.heads_first:
            new.add("Transpose", [parted], result, graph.shape(result, 4), perm=HEADS_FIRST)
    outputs = [output, found.key.present, found.value.present]
    new.nodes.append(
        helper.make_node(
            OP,
            inputs,
            outputs,
            f"{result}/cached_attention",
            domain=function.domain,
            overload=function.overload,
            **settings,
        )
    )
    return [result, *outputs[1:]]


def _packed(new: NewNodes, graph: Lookup, tokens: _Tokens) -> str:
    """Return the value (B, T, H d) of tokens, to which a node is added where there is none."""
    source, shape = tokens.source, (*tokens.lead, tokens.heads, tokens.width)
    if tokens.heads_first:
        name = f"{source}/tokens_first"
        source = new.add("Transpose", [source], name, shape, perm=HEADS_FIRST)
    parted = graph.producer(source, "Reshape")
    if tokens.rotary is not None:
        source = on_tokens(new, tokens.rotary, source, shape)
    elif parted is not None and graph.has_shape(parted.input[0], tokens.packed):
        return parted.input[0]
    sizes = new.integers([0, 0, tokens.heads * tokens.width])
    return new.add("Reshape", [source, sizes], f"{source}/packed", tokens.packed)
