"""The op ``linexport.FeatureMap``: phi applied to every head of a packed tensor.

    x (B, T, H*d) -> y (B, T, H*M)

``kind`` names the map and ``side`` which of its two formulas, that of queries or that of keys;
``log = 1`` gives the logarithm of the features, in float32, where the map defines it. The formulas
live with the map itself (``linexport.models.feature_maps``), which registers here how to write them
in standard operators; its parameters, such as frozen projections, follow x as inputs. They are
float32 or int64 whatever the dtype of x, and formulas are then computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from onnx import TensorProto, defs, helper

from linexport.errors import OpError
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.op import (
    DOMAIN,
    VERSION,
    Attributes,
    Node,
    Op,
    activations,
    parameter,
)
from linexport.plugins.ops.shapes import PartialShape, width_per_head

if TYPE_CHECKING:
    from torch import Tensor

PARAMETERS = 4
"""Most tensors a map may take besides x."""

NAMES = tuple(f"parameter_{i}" for i in range(PARAMETERS))
"""Their formal names."""

PARAMETER_TYPES = ["tensor(float)", "tensor(int64)"]

SIDES = ("query", "key")


class Parameter(NamedTuple):
    """A tensor a formula takes besides x: the name of its value and its shape, all fixed."""

    name: str
    shape: tuple[int, ...]


Formula = Callable[..., str]
"""``formula(body, x, width, *parameters)``, each a ``Parameter``: x is (..., width) in float32, and
the value returned (..., M) as well. An elementwise formula takes any float type and ignores width.
"""

FeatureCount = Callable[..., int]
"""``features(width, *shapes)``: M for head width d and parameters of these shapes."""

Eager = Callable[..., "Tensor"]
"""``eager(x, parameters, num_heads, side, log)``: phi in PyTorch on a packed tensor."""


@dataclass(frozen=True)
class Pairs:
    """phi(x) = [first(x), s x_i^2, s sqrt2 x_i x_j (i < j)], pairs ordered by i, then j.

    Attributes:
        scale: s, by the width d.
        first: the features ahead of the pairs; not called where there are none.
    """

    scale: Callable[[int], float]
    first: Formula


@dataclass(frozen=True)
class Formulas:
    """How one kind of map is written in standard operators.

    Attributes:
        query: phi of queries.
        key: phi of keys; the same formula for a symmetric map.
        features: M.
        eager: the same formulas in differentiable PyTorch.
        module: where they are defined.
        elementwise: a feature depends on one component of x only, and M = d.
        over_time: keys are normalised over the whole sequence: axis 1 of (B, T, H*d), so tokens
            cannot be mapped in blocks.
        kappa: where phi(q) . phi(k) is a function of the scalar q . k alone:
            ``kappa(body, t, width, *parameters)`` of any tensor t of such products.
        pairs: where the map is made of pairs of components, and symmetric.
        log_query, log_key: logarithms of the features, for maps that are exponentials.
    """

    query: Formula
    key: Formula
    features: FeatureCount
    eager: Eager
    module: str
    elementwise: bool = False
    over_time: bool = False
    kappa: Formula | None = None
    pairs: Pairs | None = None
    log_query: Formula | None = None
    log_key: Formula | None = None

    def side(self, side: str, log: bool = False) -> Formula:
        """The formula of queries or keys, or of its logarithm.

        Raises:
            OpError: no such side, or no logarithm.
        """
        if side not in SIDES:
            raise OpError(f"FeatureMap has side {side!r}; expected one of {', '.join(SIDES)}.")
        query, key = (self.log_query, self.log_key) if log else (self.query, self.key)
        formula = query if side == "query" else key
        if formula is None:
            raise OpError("FeatureMap has log=1, but the features of this kind are no exponential.")
        return formula

    def packed(self, side: str) -> bool:
        """The formula takes (B, T, H*d) as it is, with no axis for heads."""
        return self.elementwise or (self.over_time and side == "key")


_formulas: dict[str, Formulas] = {}


def register(kind: str, formulas: Formulas) -> None:
    """Make ``kind`` known.

    Raises:
        ValueError: the kind is taken by formulas of another module.
    """
    known = _formulas.get(kind)
    if known and known.module != formulas.module:
        raise ValueError(f"feature map {kind!r} is defined twice")
    _formulas[kind] = formulas


def formulas(kind: object) -> Formulas:
    """The formulas of a kind.

    Raises:
        OpError: there is none; importing ``linexport.models.feature_maps`` registers all maps.
    """
    if not isinstance(kind, str) or kind not in _formulas:
        raise OpError(
            f"FeatureMap has kind {kind!r}; expected one of {', '.join(sorted(_formulas))}."
        )
    return _formulas[kind]


def fixed_shape(name: str, shape: PartialShape) -> tuple[int, ...]:
    """The shape of a parameter.

    Raises:
        OpError: a dimension is not a number.
    """
    sizes = tuple(d for d in shape if isinstance(d, int))
    if len(sizes) != len(shape):
        raise OpError(f"{name} has shape {tuple(shape)}; a map's parameter has a fixed one.")
    return sizes


def _log(attributes: Attributes) -> bool:
    return bool(attributes.get("log", 0))


def _side(attributes: Attributes) -> str:
    return str(attributes.get("side", SIDES[0]))


def parameters_of(node: Node, names: Sequence[str]) -> tuple[Parameter, ...]:
    """The inputs of those names that a node has, as parameters of its map.

    Raises:
        OpError: one has no fixed shape.
    """
    present = [name for name in node.inputs if name in names]
    return tuple(Parameter(name, fixed_shape(name, node.shapes[name])) for name in present)


def _infer(node: Node) -> Sequence[PartialShape]:
    found = formulas(node.attributes.get("kind"))
    found.side(_side(node.attributes), _log(node.attributes))
    heads = node.attributes.get("num_heads")
    if not isinstance(heads, int) or heads < 1:
        raise OpError(f"FeatureMap has num_heads {heads!r}; expected at least 1.")
    x = node.shapes["x"]
    shapes = (p.shape for p in parameters_of(node, NAMES))
    return [(*x[:-1], heads * found.features(width_per_head("x", x, heads), *shapes))]


def eager(
    x: Tensor,
    parameters: Sequence[Tensor],
    kind: str,
    num_heads: int,
    side: str = "query",
    log: bool = False,
) -> Tensor:
    """Return phi of one side in differentiable PyTorch, as the map registered it."""
    return formulas(kind).eager(x, parameters, num_heads, side, log)


def _oracle(attributes: Attributes, inputs: Mapping[str, object]) -> tuple[Any, ...]:
    """Return the map's PyTorch formula in float64; its own tests compare that with theory."""
    import torch

    x, *parameters = (torch.from_numpy(np.asarray(inputs[n])) for n in inputs)
    y = formulas(attributes["kind"]).eager(
        x.double(),
        [p.double() if p.is_floating_point() else p for p in parameters],
        attributes["num_heads"],
        _side(attributes),
        _log(attributes),
    )
    return (y.numpy(),)


def _causal(attributes: Attributes) -> bool:
    """A map that normalises keys over the sequence reads all of it."""
    return not (formulas(attributes.get("kind")).over_time and _side(attributes) == "key")


def _portable(node: Node) -> tuple[Body, list[str]]:
    heads = int(node.attributes["num_heads"])
    width = width_per_head("x", node.shapes["x"], heads)
    found, parameters = formulas(node.attributes["kind"]), parameters_of(node, NAMES)
    b, log, side = Body(), _log(node.attributes), _side(node.attributes)
    return b, [write(b, found, side, node.inputs[0], heads, width, parameters, log)]


def write(
    b: Body,
    found: Formulas,
    side: str,
    x: str,
    heads: int,
    width: int,
    parameters: Sequence[Parameter],
    log: bool = False,
) -> str:
    """Append phi of one side on every head of (B, T, heads * width), as (B, T, heads * M)."""
    formula = found.side(side, log)
    if found.packed(side):
        return formula(b, b.Cast(x, to=TensorProto.FLOAT) if log else x, width, *parameters)
    leading = b.Shape(x, start=0, end=2)
    x_f = b.Cast(x, to=TensorProto.FLOAT)
    split = b.Reshape(x_f, b.Concat(leading, b.const([heads, width]), axis=0), allowzero=1)
    y = formula(b, split, width, *parameters)
    packed = b.const([heads * found.features(width, *(p.shape for p in parameters))])
    y = b.Reshape(y, b.Concat(leading, packed, axis=0), allowzero=1)
    return str(y if log else b.CastLike(y, x))


_FLOATING = activations("T")[0][1]

OP = Op(
    schema=defs.OpSchema(
        "FeatureMap",
        DOMAIN,
        VERSION,
        doc=__doc__ or "",
        inputs=[
            parameter("x", "T", "(B, T, H * d)"),
            *(parameter(name, f"P{i}", "Of the map.", "Optional") for i, name in enumerate(NAMES)),
        ],
        outputs=[parameter("y", "Y", "(B, T, H * M)")],
        type_constraints=[
            *activations("T"),
            ("Y", _FLOATING, "T, or float with log = 1."),
            *((f"P{i}", PARAMETER_TYPES, "Never in half precision.") for i in range(PARAMETERS)),
        ],
        attributes=[
            defs.OpSchema.Attribute("kind", defs.OpSchema.AttrType.STRING, "Name of the map."),
            defs.OpSchema.Attribute("num_heads", defs.OpSchema.AttrType.INT, "H."),
            defs.OpSchema.Attribute("side", helper.make_attribute("side", SIDES[0])),
            defs.OpSchema.Attribute("log", helper.make_attribute("log", 0)),
        ],
    ),
    infer=_infer,
    portable=_portable,
    torch_schema="""feature_map(
        Tensor x, Tensor[] parameters, str kind, int num_heads, str side="query", bool log=False
    ) -> Tensor""",
    eager=eager,
    oracle=_oracle,
    token_axis={"x": 1, "y": 1},
    causal=_causal,
    float32=lambda attributes: {"Y"} if _log(attributes) else (),
    kernels="linexport.plugins.kernels.plans.feature_map",
    describe=lambda node: f"{node.attributes['kind']}, {node.attributes['num_heads']} heads",
    summary="The function applied to queries and keys in place of softmax.",
)
