"""A feature map that a LinearAttention node applies to its query and key itself.

    output = LinearAttention(phi_q(query), phi_k(key), value, ...)

so that a lowering may compute features a few tokens at a time, next to where they are used, rather
than for the whole sequence; and, where phi represents a scalar kernel, products of features as
kappa(q . k) without any features: docs/math.md, "Scores without features".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from linexport.errors import OpError
from linexport.plugins.ops import feature_map
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.op import Node
from linexport.plugins.ops.shapes import PartialShape, static_width, width_per_head


@dataclass(frozen=True)
class AbsorbedMap:
    """The map of one node.

    Attributes:
        formulas: of its kind.
        width: of a head before the map.
        parameters: values the formulas take.
    """

    formulas: feature_map.Formulas
    width: int
    parameters: tuple[feature_map.Parameter, ...]

    @property
    def features(self) -> int:
        """M, the width of a head behind the map."""
        return self.formulas.features(self.width, *(p.shape for p in self.parameters))

    def apply(self, b: Body, side: str, x: str) -> str:
        """phi of one side on (..., width), float32, as (..., M)."""
        return self.formulas.side(side)(b, x, self.width, *self.parameters)

    def apply_packed(self, b: Body, side: str, x: str, heads: int) -> str:
        """phi on every head of (B, T, heads * width), as (B, T, heads * M)."""
        return feature_map.write(b, self.formulas, side, x, heads, self.width, self.parameters)

    def kappa(self, b: Body, products: str) -> str | None:
        """phi(q) . phi(k) from the products q . k, where the map has that form."""
        if self.formulas.kappa is None:
            return None
        return self.formulas.kappa(b, products, self.width, *self.parameters)

    def mapped(
        self, shapes: Mapping[str, PartialShape], query_heads: int
    ) -> dict[str, PartialShape]:
        """Shapes of query and key behind the map."""
        key_width = static_width("key", shapes["key"])
        if key_width % self.width:
            raise OpError(
                f"key has width {key_width}, which is not a multiple of d = {self.width} "
                f"(query width {shapes['query'][-1]} over {query_heads} heads)."
            )
        heads = {"query": query_heads, "key": key_width // self.width}
        return {name: (*shapes[name][:-1], n * self.features) for name, n in heads.items()}


def absorbed_map(node: Node) -> AbsorbedMap | None:
    """The map a node applies, if any.

    Raises:
        OpError: an unknown map, or one whose formula does not fit the node.
    """
    kind = node.attributes.get("feature_map", "")
    parameters = feature_map.parameters_of(node, feature_map.NAMES)
    if not kind:
        if parameters:
            raise OpError("LinearAttention has parameters of a feature_map, but names none.")
        return None
    formulas = feature_map.formulas(kind)
    if formulas.over_time:
        raise OpError(
            f"feature_map {kind!r} looks at the whole sequence: LinearAttention cannot "
            "apply it token by token. Use a FeatureMap node."
        )
    width = width_per_head("query", node.shapes["query"], node.attributes["q_num_heads"])
    return AbsorbedMap(formulas, width, parameters)
