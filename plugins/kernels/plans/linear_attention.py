"""Kernels of LinearAttention: the routes of a node, and the arguments and constants of each."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from linexport.errors import UnsupportedModelError
from linexport.plugins.kernels.launch import (
    ONE,
    TYPES,
    Argument,
    Extent,
    Kernel,
    Launch,
    LaunchPlan,
    Route,
    Scratch,
)
from linexport.plugins.kernels.plans import fused_maps, tiles
from linexport.plugins.kernels.plans.parameters import (
    CONSTANTS,
    DECAYED,
    OPERANDS,
    PARAMETERS,
    PAST,
    PRESENT,
    SCALARS,
    SEQUENCES,
)
from linexport.plugins.kernels.plans.tile import Shape, Tile
from linexport.plugins.ops.linear_attention import view
from linexport.plugins.ops.op import Node
from linexport.plugins.ops.shapes import width_per_head

WIDEST = 256
"""Largest d_k and d_v: the state of one head must fit the registers of a few blocks."""

NO_EXPRESSIONS: dict[str, Any] = {
    "PROGRAM": None,
    "PLACES": (-1,) * len(OPERANDS),
    "QUERY_CONVOLUTIONS": (),
    "KEY_CONVOLUTIONS": (),
    "VALUE_CONVOLUTIONS": (),
}
"""Constants of kernels whose operands are tensors."""

DECODE_LENGTH = 4
"""Tokens up to which going through them one by one is preferred to a chunk."""


class Planner:
    """The plan of one node."""

    def __init__(self, node: Node, dtype: str, sm: int, precision: str) -> None:
        self.node = node
        self.spec, self.sizes = view(node)
        self.map = str(node.attributes.get("feature_map") or "identity")
        self.width = width_per_head("query", node.shapes["query"], self.spec.q_num_heads)
        self.inputs = {name for name in node.inputs if name}
        self.type, self.sm, self.precision = TYPES[dtype], sm, precision
        self._refuse()
        self.decays = int(self.spec.has_decay)
        if self.sizes.decay_per_channel:
            self.decays = self.sizes.d_k
        shape = Shape(
            d_k=self.sizes.d_k,
            d_v=self.sizes.d_v,
            type=self.type,
            sm=sm,
            decays=self.decays,
            delta=self.spec.has_beta,
            map=self.map,
            normalize=self.spec.normalize,
            grouped=self.spec.q_num_heads > self.spec.kv_num_heads,
            causal=self.spec.causal,
        )
        self.in_segments = shape.segmented
        self.output, self.state = tiles.output(shape), tiles.state(shape)
        self.step = tiles.step(shape)
        self.scores, self.inverse = tiles.scores(shape), tiles.inverse(shape)
        self.transition, self.scan = tiles.transition(shape), tiles.transition_scan(shape)

    def _refuse(self) -> None:
        for name, width in (("d_k", self.sizes.d_k), ("d_v", self.sizes.d_v)):
            if width > WIDEST:
                raise UnsupportedModelError(
                    f"LinearAttention has {name} = {width}; the kernels take at most {WIDEST}."
                )
        fused_maps.known(self.map)
        queries, keys = (self.node.shapes[name][1] for name in ("query", "key"))
        if queries != keys:
            raise UnsupportedModelError(
                f"LinearAttention has {queries} queries and {keys} keys; the kernels take as many "
                "of both."
            )

    def plan(self) -> LaunchPlan:
        """All routes."""
        if not self.spec.causal:
            route = self._bidirectional()
            return LaunchPlan(
                route,
                route,
                chunk=self.output.chunk,
                blocks=self._state_blocks(),
                resident=min(self.state.resident, self.output.resident),
            )
        single = self._delta() if self.spec.has_beta else self._with_output()
        segmented = self._segmented_delta() if self.spec.has_beta else self._segmented()
        return LaunchPlan(
            single,
            segmented if self.in_segments else None,
            self.decode(),
            DECODE_LENGTH,
            self.output.chunk,
            self._heads(self.output),
            self.output.resident,
            in_place=self._in_place(),
        )

    def decode(self) -> Route:
        """The route of a few tokens."""
        return Route((self._step(),))

    def _step(self) -> Launch:
        return self._launch("recurrent.step", self.step, self._heads(self.step))

    def _in_place(self) -> tuple[str, ...]:
        """A state belongs to one block; its normaliser to all blocks that share d_v's columns.

        One of them writes it, and the others may not have read it yet.
        """
        alone = self.sizes.d_v <= min(self.output.block_v, self.step.block_v)
        return PRESENT if self.spec.normalize and alone else PRESENT[:1]

    def _segmented(self) -> Route:
        launches = (self._state(), self._scan(without={*PRESENT}))
        return self._with_output(launches, self._segment_scratch(), {*PAST})

    def _bidirectional(self) -> Route:
        output_heads = self.spec.output_heads * _tiles(self.sizes.d_v, self.output.block_v)
        output = self._launch("bidirectional.segment_output", self.output, output_heads, True)
        return Route(
            (self._state(), self._scan(without=frozenset()), output), self._segment_scratch()
        )

    def _delta(self) -> Route:
        return self._with_output((self._inverse(),), (self._inverses(),))

    def _segmented_delta(self) -> Route:
        heads, sizes = self.spec.kv_num_heads, self.sizes
        launches = (self._inverse(), self._transition(), self._transition_scan())
        slots = Extent(heads * sizes.d_k * sizes.d_k, ("batch", "segments"))
        transitions = Scratch("transitions", "fp32", slots)
        scratch = (self._inverses(), self._segment_states(), transitions)
        return self._with_output(launches, scratch, {*PAST})

    def _with_output(
        self,
        launches: tuple[Launch, ...] = (),
        scratch: tuple[Scratch, ...] = (),
        without: Set[str] = frozenset(),
    ) -> Route:
        """The causal output last; ``channels`` first, where every key channel has a decay."""
        if self.decays > 1:
            launches, scratch = (self._scores(), *launches), (*scratch, *self._decayed())
        output = self._causal_output(without, tuple(buffer.name for buffer in scratch))
        return Route((*launches, output), scratch)

    def _decayed(self) -> tuple[Scratch, ...]:
        """Memory of what ``channels`` writes for all chunks at once."""
        if self.decays <= 1:
            return ()
        heads, queries, chunk = self.spec.kv_num_heads, self.spec.output_heads, self.output.chunk

        def rows(name: str, number: int) -> Scratch:
            extent = Extent(number * self.sizes.d_k, ("batch", "chunks"))
            return Scratch(name, self._element(name), extent)

        stored = (rows("key_from_start", heads * chunk),) if self.spec.has_beta else ()
        return (
            self._squares("channel_scores", queries),
            rows("query_from_start", queries * chunk),
            *stored,
            rows("key_to_end", heads * chunk),
            rows("chunk_decays", heads),
        )

    def _decayed_names(self) -> tuple[str, ...]:
        return tuple(buffer.name for buffer in self._decayed())

    def _scores(self) -> Launch:
        heads, scratch = self.spec.output_heads, self._decayed_names()
        return self._by_chunk("channels.chunk_scores", self.scores, heads, scratch)

    def _transition(self) -> Launch:
        tile, sizes = self.transition, self.sizes
        columns = _tiles(sizes.d_v, tile.block_v) + _tiles(sizes.d_k, tile.block_v)
        scratch = ("segment_states", "transitions", "inverses", *self._decayed_names())
        return self._launch(
            "transitions.segment_transition",
            tile,
            self.spec.kv_num_heads * columns,
            True,
            scratch=scratch,
        )

    def _transition_scan(self) -> Launch:
        tile = self.scan
        kernel = self._kernel(
            "transitions.transition_scan",
            tile,
            {"BLOCK_K": tile.block_k, "BLOCK_V": tile.block_v, "PRECISION": self._exact()},
            scratch=("segment_states", "transitions"),
        )
        return Launch(kernel, (Extent(self._heads(tile), ("batch",)), ONE, ONE))

    def _inverses(self) -> Scratch:
        return self._squares("inverses", self.spec.kv_num_heads)

    def _squares(self, name: str, heads: int) -> Scratch:
        """A matrix for each chunk of some heads."""
        elements = heads * self.output.chunk**2
        return Scratch(name, "fp32", Extent(elements, ("batch", "chunks")))

    def _inverse(self) -> Launch:
        heads = self.spec.kv_num_heads
        return self._by_chunk("delta.chunk_inverse", self.inverse, heads, ("inverses",))

    def _by_chunk(self, function: str, tile: Tile, heads: int, scratch: tuple[str, ...]) -> Launch:
        """A kernel with one program for each chunk of some heads."""
        size = self.output.chunk
        constants = {
            "BLOCK_K": tile.block_k,
            "CHUNK": size,
            "LEVELS": size.bit_length() - 1,
            "PRECISION": self._exact(),
        }
        kernel = self._kernel(function, tile, constants, scratch=scratch)
        return Launch(kernel, (Extent(heads, ("batch", "chunks")), ONE, ONE))

    def _segment_states(self) -> Scratch:
        slot = self.spec.kv_num_heads * self.sizes.d_k * (self.sizes.d_v + 1)
        return Scratch("segment_states", "fp32", Extent(slot, ("batch", "segments")))

    def _segment_scratch(self) -> tuple[Scratch, ...]:
        states = self._segment_states()
        if not self.decays:
            return (states,)
        decays = Extent(self.spec.kv_num_heads * self.decays, ("batch", "segments"))
        return states, Scratch("segment_decays", "fp32", decays)

    def _state_blocks(self) -> int:
        tile, sizes = self.state, self.sizes
        parts = _tiles(sizes.d_k, tile.block_k) * _tiles(sizes.d_v, tile.block_v)
        return self.spec.kv_num_heads * parts

    def _heads(self, tile: Tile) -> int:
        return self.spec.kv_num_heads * _tiles(self.sizes.d_v, tile.block_v)

    def _state(self) -> Launch:
        scratch = ("segment_states", "segment_decays")[: 1 + (self.decays > 0)]
        scratch = (*scratch, *self._decayed_names())
        blocks = self._state_blocks()
        return self._launch("segments.segment_state", self.state, blocks, True, scratch=scratch)

    def _scan(self, without: Set[str]) -> Launch:
        scratch = ("segment_states", "segment_decays")[: 1 + (self.decays > 0)]
        kernel = self._kernel(
            "segments.segment_scan", tiles.SCAN, {"BLOCK": tiles.SCAN_BLOCK}, without, scratch
        )
        blocks = _tiles(self.sizes.d_k * (self.sizes.d_v + 1), tiles.SCAN_BLOCK)
        return Launch(kernel, (Extent(self.spec.kv_num_heads * blocks, ("batch",)), ONE, ONE))

    def _causal_output(self, without: Set[str], scratch: tuple[str, ...]) -> Launch:
        blocks = self._heads(self.output)
        return self._launch("linear.segment_output", self.output, blocks, True, without, scratch)

    def _launch(
        self,
        function: str,
        tile: Tile,
        blocks: int,
        by_segment: bool = False,
        without: Set[str] = frozenset(),
        scratch: tuple[str, ...] = (),
    ) -> Launch:
        """A kernel with ``blocks`` programs for each sequence of the batch, or each segment."""
        block = {"BLOCK_K": tile.block_k, "BLOCK_V": tile.block_v}
        if by_segment:
            block["CHUNK"] = tile.chunk
        kernel = self._kernel(function, tile, block, without, scratch)
        segments = Extent(1, ("segments",)) if by_segment else ONE
        return Launch(kernel, (Extent(blocks, ("batch",)), segments, ONE))

    def _kernel(
        self,
        function: str,
        tile: Tile,
        more: dict[str, Any],
        without: Set[str] = frozenset(),
        scratch: tuple[str, ...] = (),
    ) -> Kernel:
        """A kernel that is given the tensors there are, except ``without``, and ``scratch``."""
        values = self._values()
        constants = {name: values[name] for name in CONSTANTS[function]} | more
        tensors = {*self.inputs, "output", "present_state", *scratch} - without
        if self.spec.normalize and "present_normalizer" not in without:
            tensors.add("present_normalizer")
        arguments = []
        for name in PARAMETERS[function]:
            if name in SCALARS:
                arguments.append(Argument(name, "i32"))
            elif name in tensors:
                arguments.append(Argument(name, f"*{self._element(name)}"))
            else:
                constants[name] = None
        return Kernel(function, tuple(arguments), tuple(constants.items()), tile.warps, tile.stages)

    def product_precision(self) -> str:
        """Precision of float32 products; half-precision values need no more digits than they have.

        A projection is an exponent: its error is one of the feature, many times over.
        """
        exact = self.type == "fp32" or self.map == "favor+"
        return self.precision if exact else "tf32"

    def _exact(self) -> str:
        """Precision of products of factors and transitions, which later ones multiply again."""
        return "ieee" if self.precision == "ieee" else "tf32x3"

    def _element(self, name: str) -> str:
        if name == "key_mask":
            return "i8"
        if name in DECAYED:
            return "fp32" if self.map in fused_maps.PAIRS else self.type
        return self.type if name in SEQUENCES else "fp32"

    def _values(self) -> dict[str, Any]:
        spec, sizes = self.spec, self.sizes
        return {
            "HEADS": spec.kv_num_heads,
            "KEY_HEADS": sizes.key_heads,
            "QUERY_HEADS": spec.q_num_heads,
            "BETA_HEADS": spec.kv_num_heads if sizes.beta_per_head else 1,
            "WIDTH": self.width,
            "D_K": sizes.d_k,
            "D_V": sizes.d_v,
            "DECAYS": self.decays,
            "DELTA": spec.has_beta,
            "MAP": self.map,
            "NORMALIZE": spec.normalize,
            "SCALE": spec.scale,
            "EPS": spec.eps,
            "PRECISION": self.product_precision(),
            **NO_EXPRESSIONS,
        }


def _tiles(width: int, block: int) -> int:
    return -(-width // block)
