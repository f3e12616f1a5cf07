"""Rotary embeddings of ONNX Runtime's operator as elementwise nodes, for a program.

    RotaryEmbedding(Transpose(x), positions, cos, sin)
        ->  Concat(x_1 cos - x_2 sin, x_2 cos + x_1 sin, rest of x)

of x (B, T, H, d), with x_1 and x_2 the halves of its first channels. Only of tables that have a row
for each token, in order, as conversions write them (``exporter/passes/ort/rotary.py``): there cos
and sin are values of the token, which no position has to look up.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import helper

from linexport.plugins.ops.body import MICROSOFT
from linexport.targets.cpu_fusion.lookup import KnownShape, Lookup, NewNodes, UnmatchedError
from linexport.targets.cpu_fusion.nodes import attributes

OP = "RotaryEmbedding"


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding.

    Attributes:
        name: of the result.
        x: what is turned, (B, H, T, d).
        cos: of each token, half of its channels or more: (B, T, n), or (1, T, n) or (T, n).
        sin: as cos.
        lead: their axes in front of the channels.
        half: pairs of channels.
    """

    name: str
    x: str
    cos: str
    sin: str
    lead: KnownShape
    half: int


def find_rotary(graph: Lookup, name: str) -> Rotary | None:
    """Return the rotary embedding that makes a value, None where another operator does.

    Raises:
        UnmatchedError: it looks up other tables, or has attributes that are not known.
    """
    node = graph.producer(name, OP, MICROSOFT)
    if node is None:
        return None
    own, (x, positions, *tables) = attributes(node), node.input
    half = own.get("rotary_embedding_dim", 0) // 2
    if own.keys() - {"num_heads", "rotary_embedding_dim"} or half < 1 or len(tables) != 2:
        raise UnmatchedError(f"{name} is of a rotary embedding with other attributes")
    (cos, sin), turned = (_source(graph, table, half) for table in tables), graph.shape(x, 4)
    given, other = (graph.stated(n)[:-1] for n in (cos, sin))
    lead: KnownShape = (turned[0], turned[2])
    if graph.integers(positions) == [0] and given == other and given in (lead[1:], (1, lead[1])):
        return Rotary(name, x, cos, sin, given, half)
    numbered = graph.expect(positions, "Reshape")
    sizes = graph.expect(numbered.input[1], "Shape", start=0, end=2)
    numbers = graph.expect(numbered.input[0], "Range")
    count = graph.expect(numbers.input[1], "ReduceProd", keepdims=0)
    if (
        [graph.integers(numbers.input[i]) for i in (0, 2)] != [[0], [1]]
        or [*count.input] != [sizes.output[0]]
        or any(graph.shape(n, 3)[:2] != lead for n in (sizes.input[0], cos, sin))
    ):
        raise UnmatchedError(f"{name} is of tables without a row for each token, in order")
    return Rotary(name, x, cos, sin, lead, half)


def _source(graph: Lookup, name: str, half: int) -> str:
    """Return the value (B, T, n) of whose first channels a table is the rows."""
    rows = graph.expect(name, "Reshape")
    cut = graph.expect(rows.input[0], "Slice")
    sizes = [graph.integers(given) for given in (rows.input[1], *cut.input[1:])]
    if sizes[:3] != [[-1, half], [0], [half]] or sizes[3:] not in ([[-1]], [[2]]):
        raise UnmatchedError(f"{name} is not made of the first {half} channels of every token")
    return str(cut.input[0])


def on_tokens(new: NewNodes, rotary: Rotary, x: str, shape: KnownShape) -> str:
    """Add nodes that turn channels of tokens before heads; return what they make.

    Args:
        new: gets the nodes.
        rotary: found in the graph.
        x: what is turned, (B, T, H, d).
        shape: of it.
    """
    name, half, (*lead, heads, width) = f"{rotary.name}/tokens", rotary.half, shape
    assert isinstance(width, int)
    counts = [half, half, width - 2 * half]
    counts = [count for count in counts if count]
    parts = [f"{name}/{i}" for i in range(len(counts))]
    if name not in new.values:
        read = [x, new.integers(counts)]
        new.nodes.append(helper.make_node("Split", read, parts, f"{name}/parts", axis=-1))
    for part, count in zip(parts, counts, strict=True):
        new.know(part, (*lead, heads, count))
    cos, sin = (
        _for_heads(new, source, half, f"{name}/{what}", rotary.lead)
        for what, source in (("cos", rotary.cos), ("sin", rotary.sin))
    )

    def add(op: str, what: str, first: str, second: str) -> str:
        return new.add(op, [first, second], f"{name}/{what}", (*lead, heads, half))

    first, second, *rest = parts
    turned = [
        add("Sub", "x", add("Mul", "x cos", first, cos), add("Mul", "y sin", second, sin)),
        add("Add", "y", add("Mul", "y cos", second, cos), add("Mul", "x sin", first, sin)),
    ]
    return new.add("Concat", [*turned, *rest], name, shape, axis=-1)


def _for_heads(new: NewNodes, source: str, half: int, name: str, lead: KnownShape) -> str:
    """Add what makes (B, T, 1, half) of (B, T, n), for this program alone and so within it."""
    cut = [source, *(new.integers([number]) for number in (0, half, -1))]
    first = new.add("Slice", cut, f"{name}/first", (*lead, half))
    batch = (1,) * (2 - len(lead))
    axes = new.integers([0, 2] if batch else [2])
    return new.add("Unsqueeze", [first, axes], name, (*batch, *lead, 1, half))
