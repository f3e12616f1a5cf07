"""Kernels of LinearAttention with operands that are expressions of other tensors.

a few tokens    one kernel, which computes the operands as it reads them
more            a kernel that writes them to scratch memory, then those of LinearAttention
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from linexport.errors import UnsupportedModelError
from linexport.plugins.kernels.expressions import Convolution, Expression, encoded, parts
from linexport.plugins.kernels.launch import Extent, Launch, LaunchPlan, Route, Scratch
from linexport.plugins.kernels.plans.linear_attention import Planner
from linexport.plugins.kernels.plans.parameters import CONVOLVED, GIVEN, OPERANDS
from linexport.plugins.kernels.plans.tile import Tile, power
from linexport.plugins.ops.op import Node

ROWS, COLUMNS = 8, 128
"""Tokens of a block that writes operands, a chunk has a multiple of them; columns of a warp."""

MOST_TENSORS, MOST_STATES = len(GIVEN), len(CONVOLVED)


@dataclass(frozen=True)
class AttentionLayer:
    """A LinearAttention node, and how some of its operands are computed.

    Attributes:
        attention: with all of its operands.
        operands: by formal name; one that is not there is a tensor. Convolutions are in query, key
            and value only.
        types: of the tensors that expressions read, as in ``launch.BYTES``; ``MOST_TENSORS`` at
            most.
        states: how many convolutions leave one; ``MOST_STATES`` at most.
    """

    attention: Node
    operands: Mapping[str, Expression]
    types: tuple[str, ...]
    states: int


def plan(layer: AttentionLayer, dtype: str, sm: int, precision: str = "tf32x3") -> LaunchPlan:
    """Return the launches of a layer; see ``plugins.kernels.plan`` for the rest, and for errors."""
    return _LayerPlanner(layer, dtype, sm, precision).plan()


class _LayerPlanner(Planner):
    """The plan of one layer."""

    def __init__(self, layer: AttentionLayer, dtype: str, sm: int, precision: str) -> None:
        super().__init__(layer.attention, dtype, sm, precision)
        if self.map != "identity":
            raise UnsupportedModelError(
                f"A layer has the feature map {self.map!r}; the kernels take layers without one. "
                "Leave its attention on its own."
            )
        self.layer = layer
        self.given = (*GIVEN[: len(layer.types)], *CONVOLVED[: layer.states])
        self.program, places = encoded(list(layer.operands.values()))
        self.places = tuple(
            places[layer.operands[name]] if name in layer.operands else -1 for name in OPERANDS
        )
        self.convolutions = {
            name: tuple(places[one] for one in _convolutions(layer.operands.get(name)))
            for name in ("query", "key", "value")
        }

    def plan(self) -> LaunchPlan:
        """All routes."""
        found = super().plan()
        return replace(
            found,
            single=self._with_operands(found.single),
            segmented=found.segmented and self._with_operands(found.segmented),
        )

    def _with_operands(self, route: Route) -> Route:
        write = self._write()
        own = [
            Scratch(name, self._element(name), Extent(self._widths()[name], ("batch", "length")))
            for name in self.layer.operands
        ]
        return Route((write, *route.launches), (*own, *route.scratch))

    def _write(self) -> Launch:
        sizes, spec = self.sizes, self.spec
        block_k, block_v = power(sizes.d_k), power(sizes.d_v)
        warps = max(block_k, block_v, COLUMNS) // COLUMNS
        tile = Tile(ROWS, block_k, block_v, warps, 1)
        parts = self.output.chunk // ROWS
        blocks = {"BLOCK_K": tile.block_k, "BLOCK_V": tile.block_v, "CHUNK": ROWS, "PARTS": parts}
        kernel = self._kernel(
            "operands.write",
            tile,
            blocks,
            without={name for name in OPERANDS if name not in self.layer.operands},
            scratch=self.given,
        )
        heads = spec.q_num_heads + sizes.key_heads + spec.kv_num_heads
        return Launch(kernel, (Extent(parts, ("batch", "chunks")), Extent(heads), Extent(1)))

    def _step(self) -> Launch:
        return self._launch(
            "recurrent.step",
            self.step,
            self._heads(self.step),
            without={*self.layer.operands},
            scratch=self.given,
        )

    def _widths(self) -> dict[str, int]:
        sizes, heads = self.sizes, self.spec.kv_num_heads
        return {
            "query": self.spec.q_num_heads * sizes.d_k,
            "key": sizes.key_heads * sizes.d_k,
            "value": heads * sizes.d_v,
            "decay": heads * self.decays,
            "beta": heads if sizes.beta_per_head else 1,
        }

    def _element(self, name: str) -> str:
        if name in GIVEN:
            return self.layer.types[GIVEN.index(name)]
        return super()._element(name)

    def _values(self) -> dict[str, object]:
        return {
            **super()._values(),
            "PROGRAM": self.program,
            "PLACES": self.places,
            **{f"{name.upper()}_CONVOLUTIONS": own for name, own in self.convolutions.items()},
            "REACH": max(
                sum(one.size - 1 for one in _convolutions(operand))
                for operand in self.layer.operands.values()
            ),
        }


def _convolutions(operand: Expression | None) -> dict[Convolution, None]:
    found = parts(operand) if operand is not None else ()
    return dict.fromkeys(one for one in found if isinstance(one, Convolution))
