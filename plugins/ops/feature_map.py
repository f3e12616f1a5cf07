"""The op ``linexport.FeatureMap``: phi applied to every head of a packed tensor.

    x (B, T, H*d) -> y (B, T, H*M)

``kind`` names the map. Its formula lives with the map itself (``linexport.models.feature_maps``),
which registers here how to write it in standard operators; parameters such as frozen projections
follow x as inputs.
"""

from __future__ import annotations

from collections.abc import Callable

from onnx import defs

from linexport.errors import OpError
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.op import DOMAIN, VERSION, Node, Op, activations, for_runtimes, parameter
from linexport.plugins.ops.shapes import width_per_head

PARAMETERS = 4
"""Most tensors a map may take besides x."""

Formula = Callable[..., str]
"""``formula(body, x, *parameters)``: x is (..., d) and the value returned (..., M)."""

_formulas: dict[str, tuple[Formula, bool]] = {}


def register(kind: str, formula: Formula, elementwise: bool) -> None:
    """Make ``kind`` known; an elementwise formula is applied without unpacking the heads.

    Raises:
        ValueError: the kind is taken by another formula.
    """
    known = _formulas.get(kind)
    if known and known[0].__module__ != formula.__module__:
        raise ValueError(f"feature map {kind!r} is defined twice")
    _formulas[kind] = (formula, elementwise)


def _check(node: Node) -> None:
    kind = node.attributes.get("kind")
    if kind not in _formulas:
        raise OpError(
            f"FeatureMap has kind {kind!r}; expected one of {', '.join(sorted(_formulas))}."
        )
    heads = node.attributes.get("num_heads")
    if not isinstance(heads, int) or heads < 1:
        raise OpError(f"FeatureMap has num_heads {heads!r}; expected at least 1.")
    width_per_head("x", node.shapes["x"], heads)


def _heads(node: Node) -> int:
    return int(node.attributes["num_heads"])


def _portable(node: Node) -> tuple[Body, list[str]]:
    formula, elementwise = _formulas[node.attributes["kind"]]
    x = node.inputs[0]
    parameters = [name for name in node.inputs[1:] if name]
    b = Body()
    if elementwise:
        return b, [formula(b, x, *parameters)]
    heads = _heads(node)
    width = width_per_head("x", node.shapes["x"], heads)
    leading = b.Shape(x, start=0, end=2)
    split = b.Reshape(x, b.Concat(leading, b.const([heads, width]), axis=0), allowzero=1)
    y = formula(b, split, *parameters)
    packed = b.Mul(b.const([heads]), b.Shape(y, start=3, end=4))
    return b, [b.Reshape(y, b.Concat(leading, packed, axis=0), allowzero=1)]


OP = Op(
    schema=defs.OpSchema(
        "FeatureMap",
        DOMAIN,
        VERSION,
        doc=__doc__ or "",
        inputs=[
            parameter("x", "T", "(B, T, H * d)"),
            *(
                parameter(f"parameter_{i}", "T", "Of the map.", "Optional")
                for i in range(PARAMETERS)
            ),
        ],
        outputs=[parameter("y", "T", "(B, T, H * M)")],
        type_constraints=activations("T"),
        attributes=[
            defs.OpSchema.Attribute("kind", defs.OpSchema.AttrType.STRING, "Name of the map."),
            defs.OpSchema.Attribute("num_heads", defs.OpSchema.AttrType.INT, "H."),
            *for_runtimes(),
        ],
    ),
    check=_check,
    portable=_portable,
)
