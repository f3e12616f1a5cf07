"""Plans: the data by which plugins launch kernels must say what the kernels are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linexport.errors import UnsupportedModelError
from linexport.plugins.kernels.architectures import ARCHITECTURES
from linexport.plugins.kernels.launch import Extent, LaunchPlan, Scratch
from linexport.plugins.kernels.plan import plan_launches
from linexport.plugins.kernels.sources import parameters, places
from linexport.plugins.ops.op import Node
from tests.support import kernels

VARIANTS = ("linear", "elu1", "gated", "channel", "delta", "gated_delta", "kda", "bidirectional")


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("width", [20, 64, 128, 256])
def test_arguments_are_in_the_order_the_kernel_declares(variant: str, width: int, sm: int) -> None:
    """What is no argument is a constant, and the two make up the parameters."""
    for kernel in plan_launches(kernels.node(variant, width), "bfloat16", sm).kernels():
        passed = parameters(kernel)
        constants = dict(kernel.constants)
        assert set(places(kernel)) == {*passed, *constants}, kernel.function
        assert not {*passed} & {*constants}
        for name, argument in passed.items():
            own = kernel.function != "feature_map.apply" or name == "parameter_0"
            assert argument.name.removesuffix("_features") == name or not own


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_pointer_is_a_tensor_of_the_node_or_scratch(variant: str) -> None:
    node = kernels.node(variant, 64)
    chosen = plan_launches(node, "float16", 90)
    outputs = {"output", "present_state", "present_normalizer"}
    for route in (chosen.single, chosen.segmented, chosen.decode):
        if route:
            scratch = {buffer.name for buffer in route.scratch}
            for launch in route.launches:
                pointers = {a.name for a in launch.kernel.arguments if a.is_pointer}
                assert pointers <= {n for n in node.inputs if n} | outputs | scratch


@given(
    st.integers(1, 300), st.integers(0, 300_000), st.integers(1, 200), st.sampled_from([16, 32, 64])
)
def test_segments_cover_the_sequence(
    batch: int, length: int, multiprocessors: int, chunk: int
) -> None:
    empty: Any = None
    chosen = LaunchPlan(empty, object(), chunk=chunk, blocks=16, resident=2)  # type: ignore[arg-type]
    values = chosen.symbols(batch, length, multiprocessors)
    tokens = values["segments"] * values["chunks_per_segment"] * chunk
    assert tokens >= length
    assert tokens - length < values["chunks_per_segment"] * chunk or length == 0
    assert values["segments"] == 1 or values["chunks_per_segment"] >= 8
    assert values["segments"] * batch * 16 <= 2 * multiprocessors or values["segments"] == 1


def test_one_long_sequence_fills_a_gpu_and_a_large_batch_needs_no_segments() -> None:
    chosen = plan_launches(kernels.node("linear", 128, heads=16), "bfloat16", 90)
    assert chosen.symbols(8, 8192, 132)["segments"] == 1
    segments = chosen.symbols(1, 131072, 132)["segments"]
    assert segments * chosen.blocks <= chosen.resident * 132 < (segments + 1) * chosen.blocks
    assert chosen.route(256, 1, 132) is chosen.decode
    assert chosen.route(8, 8192, 132) is chosen.single
    assert chosen.route(1, 131072, 132) is chosen.segmented


@pytest.mark.parametrize("variant", ["delta", "gated_delta", "kda"])
def test_one_long_sequence_of_a_delta_rule_fills_a_gpu(variant: str) -> None:
    """Every launch has as many blocks as 132 multiprocessors hold, or more; a scan one in each."""
    chosen = plan_launches(kernels.node(variant, 128, heads=16), "bfloat16", 90)
    values = chosen.symbols(1, 131072, 132)
    blocks = {
        launch.kernel.function: math.prod(extent.of(values) for extent in launch.grid)
        for launch in chosen.route(1, 131072, 132).launches
    }
    scores = {"channels.chunk_scores"} if variant == "kda" else set()
    assert set(blocks) == scores | {
        *("delta.chunk_inverse", "transitions.segment_transition"),
        *("transitions.transition_scan", "linear.segment_output"),
    }
    scan = blocks.pop("transitions.transition_scan")
    assert scan > 132 - chosen.blocks
    assert min(blocks.values()) > 132 * chosen.resident - chosen.blocks
    assert chosen.route(8, 8192, 132) is chosen.single


@pytest.mark.parametrize(("variant", "before"), [("channel", []), ("kda", ["chunk_inverse"])])
def test_scores_of_channel_decays_are_made_for_all_chunks_at_once(
    variant: str, before: list[str]
) -> None:
    """One program a chunk, not one a sequence: each takes several products, and no state.

    It decays queries and keys as well, which the loops over chunks load.
    """
    chosen = plan_launches(kernels.node(variant, 128, heads=16), "bfloat16", 90)
    route = chosen.route(8, 8192, 132)
    names = [launch.kernel.function.partition(".")[2] for launch in route.launches]
    assert names == ["chunk_scores", *before, "segment_output"]
    values = chosen.symbols(8, 8192, 132)
    blocks = math.prod(extent.of(values) for extent in route.launches[0].grid)
    assert blocks == 8 * 16 * 8192 // chosen.chunk
    sizes = {buffer.name: buffer.bytes(values) for buffer in route.scratch}
    assert sizes["channel_scores"] == blocks * chosen.chunk**2 * 4
    decayed = {"query_from_start", "key_to_end", *(["key_from_start"] if before else [])}
    assert {name: sizes[name] for name in decayed} == dict.fromkeys(
        decayed, 8 * 8192 * 16 * 128 * 2
    )
    assert sizes["chunk_decays"] == blocks * 128 * 4
    assert decayed <= {argument.name for argument in route.launches[-1].kernel.arguments}


@pytest.mark.parametrize(
    ("kind", "width", "dtype", "apart"),
    [
        ("elu1", 128, "bfloat16", True),
        ("exp", 80, "float16", True),
        ("elu1", 64, "bfloat16", False),
        ("elu1", 128, "float32", False),
        ("relu", 128, "bfloat16", False),
        ("favor+", 32, "float32", True),
    ],
)
def test_features_are_computed_once_where_several_blocks_would(
    kind: str, width: int, dtype: str, apart: bool
) -> None:
    """Written to memory before attention, which has no map then; a few tokens take one kernel."""
    parameter = np.ones((width, width)) if kind == "favor+" else None
    chosen = plan_launches(kernels.mapped("LinearAttention", kind, width, parameter), dtype, 90)
    launches = chosen.single.launches
    names = [launch.kernel.function for launch in launches]
    output = dict(launches[-1].kernel.constants)
    assert names[:-1] == ["feature_map.apply"] * 2 * apart
    assert output["MAP"] == ("identity" if apart else kind)
    read = [argument.name for argument in launches[-1].kernel.arguments]
    assert read[:2] == (["query_features", "key_features"] if apart else ["query", "key"])
    assert {buffer.name for buffer in chosen.single.scratch} == {*read[:2]} & {
        *("query_features", "key_features")
    }
    assert chosen.decode
    (step,) = chosen.decode.launches
    assert dict(step.kernel.constants)["MAP"] == kind


def test_scratch_is_a_small_part_of_what_the_decomposition_takes() -> None:
    """elu+1, H = 8, d = 64, T up to 1024: a cumulative sum of outer products takes 273 MB."""
    chosen = plan_launches(kernels.node("elu1", 64, heads=8), "float32", 89)
    most = max(chosen.scratch_bytes(1, length, 128) for length in range(1, 1025))
    assert most < 5e6


def test_an_extent_is_a_product() -> None:
    values = {"batch": 3, "segments": 5}
    assert Extent(2, ("batch", "segments")).of(values) == 30
    assert Scratch("states", "fp32", Extent(7, ("batch",))).bytes(values) == 84


def test_names_tell_kernels_apart() -> None:
    one, other = (plan_launches(kernels.node("elu1", width), "float16", 90) for width in (64, 128))
    names = [k.name for k in (*one.kernels(), *other.kernels())]
    assert len(set(names)) == len(names)
    assert [
        k.name for k in plan_launches(kernels.node("elu1", 64), "float16", 90).kernels()
    ] == names[: len(one.kernels())]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float64"}, "dtype float64"),
        ({"sm": 75}, "compute capability 75"),
        ({"precision": "fp8"}, "precision fp8"),
        ({"width": 257}, "d_k = 257; the kernels take at most 256"),
    ],
)
def test_what_there_is_no_kernel_for_is_refused(change: dict[str, Any], words: str) -> None:
    arguments = {"dtype": "float16", "sm": 90, "precision": "ieee", "width": 64, **change}
    node = kernels.node("linear", arguments.pop("width"))
    with pytest.raises(UnsupportedModelError, match=words):
        plan_launches(node, **arguments)


@pytest.mark.parametrize("variant", ["elu1", "gated", "bidirectional"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_precision_is_of_float32_alone(variant: str, dtype: str) -> None:
    node = kernels.node(variant, 128)
    one, three = (plan_launches(node, dtype, 87, precision) for precision in ("ieee", "tf32x3"))
    assert one == three
    one, three = (plan_launches(node, "float32", 87, precision) for precision in ("ieee", "tf32x3"))
    assert one != three


def test_an_op_without_kernels_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="No kernel computes Softmax; there are"):
        plan_launches(Node("Softmax", {}, (), {}), "float16", 90)


def test_only_what_one_block_owns_is_updated_in_place() -> None:
    """Blocks that share a normaliser may read it after another has written it."""
    assert plan_launches(kernels.node("linear", 128), "bfloat16", 90).in_place == ("present_state",)
    for width in (16, 128):
        chosen = plan_launches(kernels.node("elu1", width), "bfloat16", 90)
        tiles = {dict(k.constants).get("BLOCK_V", width) for k in chosen.kernels()}
        alone = width <= min(t for t in tiles if t)
        assert ("present_normalizer" in chosen.in_place) == alone
    assert plan_launches(kernels.node("bidirectional", 64), "bfloat16", 90).in_place == ()
