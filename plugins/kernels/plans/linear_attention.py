"""Kernels of LinearAttention: tiles, routes, and the arguments each needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from linexport.errors import UnsupportedModelError
from linexport.plugins.kernels.launch import (
    ONE,
    TYPES,
    Argument,
    Extent,
    Kernel,
    Launch,
    Plan,
    Route,
    Scratch,
)
from linexport.plugins.ops.linear_attention import LinearAttentionSpec, view
from linexport.plugins.ops.linear_attention.spec import Sizes
from linexport.plugins.ops.op import Node

OP_TYPE = "LinearAttention"
WIDEST = 256
"""Largest d_k and d_v: the state of one head must fit the registers of a few blocks."""

DECODE_LENGTH = 4
FUSED_MAPS = ("identity", "relu", "elu1", "exp")

SCALARS = ("length", "segments", "chunks_per_segment")


@dataclass(frozen=True)
class Tile:
    """Rows of a chunk, columns of values and keys a block holds, warps and pipeline stages."""

    chunk: int
    block_v: int
    block_k: int
    warps: int
    stages: int


def output_tile(block_k: int, d_v: int, type_: str, sm: int) -> Tile:
    """Of ``segment_output``: what compiles without spills and without serialised wgmma."""
    wide = 4 if type_ == "fp32" else 2
    block_v = min(_power(d_v), 64 * 64 * 4 // (block_k * wide))
    return Tile(32, max(block_v, 16), block_k, 4 if block_k <= 64 else 8, 2)


def state_tile(block_k: int, d_v: int, type_: str, sm: int) -> Tile:
    """Of ``segment_state``; its chunk is that of ``segment_output``."""
    return Tile(32, min(_power(d_v), 64), min(block_k, 64), 4, 2)


def plan(node: Node, dtype: str, sm: int, precision: str) -> Plan:
    """See ``plugins.kernels.plan``."""
    return _Planner(node, dtype, sm, precision).plan()


class _Planner:
    """The plan of one node."""

    def __init__(self, node: Node, dtype: str, sm: int, precision: str) -> None:
        self.spec, self.sizes = view(node)
        self.map = str(node.attributes.get("feature_map", "identity"))
        self.inputs = {name for name in node.inputs if name}
        self.type, self.sm, self.precision = TYPES[dtype], sm, precision
        self._refuse()
        block_k = max(_power(self.sizes.d_k), 16)
        self.output = output_tile(block_k, self.sizes.d_v, self.type, sm)
        self.state = state_tile(block_k, self.sizes.d_v, self.type, sm)

    def _refuse(self) -> None:
        spec, sizes = self.spec, self.sizes
        for name, width in (("d_k", sizes.d_k), ("d_v", sizes.d_v)):
            if width > WIDEST:
                raise UnsupportedModelError(
                    f"LinearAttention has {name} = {width}; the kernels take at most {WIDEST}."
                )
        if self.map not in FUSED_MAPS:
            raise UnsupportedModelError(
                f"No kernel fuses the feature map {self.map!r}; expected one of "
                f"{', '.join(FUSED_MAPS)}. Leave the map a node of its own."
            )
        if spec.has_beta or sizes.decay_per_channel or not spec.causal:
            raise UnsupportedModelError(
                f"No kernel computes update_rule {spec.update_rule!r} with these inputs yet."
            )

    def plan(self) -> Plan:
        """All routes."""
        return Plan(
            single=Route((self._output(segmented=False),)),
            segmented=self._segmented(),
            chunk=self.output.chunk,
            blocks=self.spec.kv_num_heads * -(-self.sizes.d_v // self.output.block_v),
        )

    def _segmented(self) -> Route:
        heads, slot = self.spec.kv_num_heads, self.sizes.d_k * (self.sizes.d_v + 1)
        pairs = ("batch", "segments")
        scratch = [Scratch("segment_states", "fp32", Extent(heads * slot, pairs))]
        if self.spec.has_decay:
            scratch.append(Scratch("segment_decays", "fp32", Extent(heads, pairs)))
        launches = (self._state(), self._scan(), self._output(segmented=True))
        return Route(launches, tuple(scratch))

    def _state(self) -> Launch:
        tile, sizes = self.state, self.sizes
        tiles = -(-sizes.d_k // tile.block_k) * -(-sizes.d_v // tile.block_v)
        parameters = (
            *("key", "value", "decay", "key_mask", "segment_states", "segment_decays"),
            *SCALARS,
        )
        kernel = self._kernel(
            "linear.segment_state", parameters, tile, self._present("segment_states")
        )
        grid = (Extent(self.spec.kv_num_heads * tiles, ("batch",)), Extent(1, ("segments",)), ONE)
        return Launch(kernel, grid)

    def _scan(self) -> Launch:
        sizes, block = self.sizes, 1024
        parameters = (
            *("segment_states", "segment_decays", "past_state", "past_normalizer"),
            *("present_state", "present_normalizer", "segments"),
        )
        present = self._present("segment_states") - {"present_state", "present_normalizer"}
        constants: dict[str, Any] = {
            "D_K": sizes.d_k,
            "D_V": sizes.d_v,
            "DECAYS": int(self.spec.has_decay),
            "BLOCK": block,
        }
        kernel = _kernel("linear.segment_scan", parameters, present, self.type, constants, 4, 1)
        blocks = -(-sizes.d_k * (sizes.d_v + 1) // block)
        return Launch(kernel, (Extent(self.spec.kv_num_heads * blocks, ("batch",)), ONE, ONE))

    def _output(self, segmented: bool) -> Launch:
        tile = self.output
        parameters = (
            *("query", "key", "value", "decay", "key_mask", "past_state", "past_normalizer"),
            *("segment_states", "output", "present_state", "present_normalizer"),
            *SCALARS,
        )
        present = self._present("segment_states") if segmented else self._present()
        if segmented:
            present -= {"past_state", "past_normalizer"}
        kernel = self._kernel("linear.segment_output", parameters, tile, present)
        tiles = self.spec.kv_num_heads * -(-self.sizes.d_v // tile.block_v)
        return Launch(kernel, (Extent(tiles, ("batch",)), Extent(1, ("segments",)), ONE))

    def _present(self, *more: str) -> set[str]:
        """Names of tensors there are."""
        names = {*self.inputs, "output", "present_state", *more}
        if self.spec.normalize:
            names.add("present_normalizer")
        if self.spec.has_decay and "segment_states" in more:
            names.add("segment_decays")
        return names

    def _kernel(
        self, function: str, parameters: tuple[str, ...], tile: Tile, present: set[str]
    ) -> Kernel:
        constants = _constants(self.spec, self.sizes, self.map, self.precision)
        constants |= {"BLOCK_K": tile.block_k, "BLOCK_V": tile.block_v, "CHUNK": tile.chunk}
        if function == "linear.segment_state":
            for name in ("QUERY_HEADS", "NORMALIZE", "SCALE", "EPS"):
                del constants[name]
        return _kernel(function, parameters, present, self.type, constants, tile.warps, tile.stages)


def _constants(
    spec: LinearAttentionSpec, sizes: Sizes, feature_map: str, precision: str
) -> dict[str, Any]:
    return {
        "HEADS": spec.kv_num_heads,
        "KEY_HEADS": sizes.key_heads,
        "QUERY_HEADS": spec.q_num_heads,
        "D_K": sizes.d_k,
        "D_V": sizes.d_v,
        "MAP": feature_map,
        "NORMALIZE": spec.normalize,
        "SCALE": spec.scale,
        "EPS": spec.eps,
        "PRECISION": precision,
    }


ACTIVATIONS = ("query", "key", "value", "decay", "beta", "output")


def _kernel(
    function: str,
    parameters: tuple[str, ...],
    present: set[str],
    type_: str,
    constants: dict[str, Any],
    warps: int,
    stages: int,
) -> Kernel:
    """A kernel whose tensors that are not present are constants without a value."""
    arguments = []
    for name in parameters:
        if name in ("length", "segments", "chunks_per_segment"):
            arguments.append(Argument(name, "i32"))
        elif name in present:
            element = type_ if name in ACTIVATIONS else "i8" if name == "key_mask" else "fp32"
            arguments.append(Argument(name, f"*{element}"))
        else:
            constants[name] = None
    return Kernel(function, tuple(arguments), tuple(constants.items()), warps, stages)


def _power(width: int) -> int:
    """The least power of two that holds ``width``, at least 16: what tensor cores take."""
    return max(16, 1 << (width - 1).bit_length())
