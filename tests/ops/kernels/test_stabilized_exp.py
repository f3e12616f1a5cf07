"""StabilizedExp's kernels in Triton's interpreter, against the op's oracle in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linexport.errors import UnsupportedModelError
from linexport.plugins.kernels.architectures import ARCHITECTURES
from linexport.plugins.kernels.plan import plan_launches
from linexport.plugins.kernels.run import run
from linexport.plugins.kernels.sources import function
from linexport.plugins.ops.linear_attention import INPUTS as LINEAR_INPUTS
from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from linexport.plugins.ops.op import Node
from linexport.plugins.ops.stabilized_exp import INPUTS, LOWEST, stabilized_exp

OUTPUTS = ("query_features", "key_features", "present_decay", "present_key_max")
SIZES = [(1, 1), (4, 2), (2, 4)]
"""Query heads and heads."""


def node(queries: int, heads: int, features: int, causal: bool, *optional: str) -> Node:
    """A node; ``optional``: of past_key_max, key_mask, decay and decay_per_head."""
    shapes: dict[str, Any] = {
        "query": ("B", "T", queries * features),
        "key": ("B", "T", heads * features),
        "past_key_max": ("B", heads, features),
        "key_mask": ("B", "T"),
        "decay": ("B", "T", heads * ("decay_per_head" not in optional or 1) * features),
    }
    if "decay_per_head" in optional:
        shapes["decay"], optional = ("B", "T", heads), (*optional, "decay")
    shapes = {n: s for n, s in shapes.items() if n in ("query", "key", *optional)}
    names = tuple(name if name in shapes else "" for name in INPUTS)
    attributes = {"q_num_heads": queries, "k_num_heads": heads, "causal": int(causal)}
    return Node("StabilizedExp", attributes, names, shapes)


def arrays(made: Node, batch: int, length: int, seed: int, size: float = 1.0) -> Any:
    """Random inputs: exponents of up to a few times ``size``, and decays of all strengths."""
    rng = np.random.default_rng(seed)
    found: dict[str, np.ndarray] = {}
    for name, shape in made.shapes.items():
        x = rng.normal(size=[{"B": batch, "T": length}.get(n, n) for n in shape])
        if name == "key_mask":
            found[name] = x > -0.5
        elif name == "decay":
            found[name] = np.float32(-np.abs(x) * 10.0 ** rng.integers(-2, 3, x.shape))
        else:
            found[name] = np.float32(x * size)
    return found


def computed(
    made: Node, given: Any, batch: int, length: int, processors: int, in_place: bool = False
) -> list[np.ndarray]:
    """The outputs of the kernels, which have to write every value of them."""
    wanted = stabilized_exp(*attributes_of(made), **given)
    tensors = {name: torch.from_numpy(x.copy()) for name, x in given.items()}
    for name, want in zip(OUTPUTS, wanted, strict=True):
        tensors[name] = torch.full(want.shape, np.nan)
    if in_place:
        tensors["present_key_max"] = tensors["past_key_max"]
    run(plan_launches(made, "bfloat16", 90), tensors, batch, length, processors)
    return [tensors[name].numpy() for name in OUTPUTS]


def attributes_of(made: Node) -> tuple[int, int, bool]:
    values = made.attributes
    return values["q_num_heads"], values["k_num_heads"], bool(values["causal"])


def assert_equal(found: list[np.ndarray], wanted: tuple[np.ndarray, ...], size: float) -> None:
    """Features to 1e-6 of 1; exponents and decays, to float32's rounding of the largest."""
    for x, want in zip(found[:2], wanted[:2], strict=True):
        np.testing.assert_allclose(x, want, rtol=0, atol=1e-6 * max(size, 1.0))
    for x, want in zip(found[2:], wanted[2:], strict=True):
        np.testing.assert_allclose(x, want, rtol=1e-6, atol=1e-6 * max(size, 1.0))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_kernels_equal_the_oracle(data: Any) -> None:
    """Any length and number of segments, with and without past, mask and decay, in place too."""
    causal = data.draw(st.booleans())
    heads = data.draw(st.sampled_from(SIZES))
    features, batch = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 2))
    length, processors = data.draw(st.integers(0, 300)), data.draw(st.sampled_from([1, 5, 132]))
    optional = ["key_mask"] if data.draw(st.booleans()) else []
    past = causal and data.draw(st.booleans())
    optional += ["past_key_max"] * past
    if causal:
        optional += data.draw(st.sampled_from([[], ["decay"], ["decay_per_head"]]))
    size = data.draw(st.sampled_from([0.1, 1.0, 100.0]))
    made = node(*heads, features, causal, *optional)
    given = arrays(made, batch, length, data.draw(st.integers(0, 2**32 - 1)), size)
    found = computed(made, given, batch, length, processors, past and data.draw(st.booleans()))
    assert_equal(found, stabilized_exp(*attributes_of(made), **given), size)


@pytest.mark.parametrize("decay", [(), ("decay",), ("decay_per_head",)])
def test_segments_go_on_from_each_other(decay: tuple[str, ...]) -> None:
    """A maximum of the past that nothing exceeds is carried through all of them."""
    made = node(2, 1, 8, True, "past_key_max", *decay)
    assert plan_launches(made, "float32", 90).symbols(1, 530, 132)["segments"] == 4
    given = arrays(made, 1, 530, 0)
    given["past_key_max"] += np.float32([50, -50] * 4)
    found = computed(made, given, 1, 530, 132)
    assert_equal(found, stabilized_exp(*attributes_of(made), **given), 50)


def test_padding_before_the_first_token_and_hard_resets() -> None:
    made = node(1, 1, 4, True, "key_mask", "decay")
    given = arrays(made, 1, 40, 0)
    given["key_mask"][:] = np.arange(40) >= 20
    given["decay"][:, 30] = -np.inf
    found = computed(made, given, 1, 40, 1)
    assert_equal(found, stabilized_exp(*attributes_of(made), **given), 1)
    assert (found[2][:, 20] < LOWEST / 2).all()


def attention(pieces: list[dict[str, torch.Tensor]], features: int) -> np.ndarray:
    """Outputs of normalised attention by the kernels, of pieces that follow each other."""
    first = node(1, 1, features, True, "past_key_max")
    spec = LinearAttentionSpec(1, 1, "gated", normalize=True)
    shapes: dict[str, Any] = dict.fromkeys(("query", "key", "value", "decay"), ("B", "T", features))
    shapes |= {"past_state": ("B", 1, features, features), "past_normalizer": ("B", 1, features)}
    names = tuple(name if name in shapes else "" for name in LINEAR_INPUTS)
    second = Node("LinearAttention", spec.attributes(), names, shapes)
    state = {"past_key_max": torch.full((1, 1, features), LOWEST)}
    state |= {n: torch.zeros(1, *shapes[n][1:]) for n in ("past_state", "past_normalizer")}
    outputs = []
    for piece in pieces:
        length = piece["value"].shape[1]
        made = {n: torch.full(piece["value"].shape, np.nan) for n in (*OUTPUTS[:3], "output")}
        made |= {n.replace("past", "present"): torch.full_like(x, np.nan) for n, x in state.items()}
        run(plan_launches(first, "float32", 90), piece | state | made, 1, length, 132)
        query, key, decay = (made[name] for name in OUTPUTS[:3])
        given = {"query": query, "key": key, "decay": decay, "value": piece["value"]}
        chosen = plan_launches(second, "float32", 90, "ieee")
        run(chosen, given | state | made, 1, length, 132)
        state = {name: made[name.replace("past", "present")] for name in state}
        outputs.append(made["output"].numpy())
    return np.concatenate(outputs, 1)


@pytest.mark.parametrize("size", [1.0, 60.0])
def test_with_linear_attention_it_is_attention_of_the_exponentials(size: float) -> None:
    """sum_s exp(b_t) . exp(a_s) v_s / sum_s exp(b_t) . exp(a_s), in float64 by its logarithms."""
    features, length, cut = 4, 45, 30
    rng = np.random.default_rng(0)
    b, a, v = (rng.normal(size=(length, features)) * s for s in (size, size, 1.0))
    b, a, v = np.float32(b), np.float32(a), np.float32(v)
    terms = np.float64(b)[:, None] + np.float64(a)[None]
    terms = np.where(np.tri(length, dtype=bool)[:, :, None], terms, -np.inf)
    weights = np.exp(terms - terms.max((1, 2), keepdims=True)).sum(-1)
    wanted = weights @ v / weights.sum(-1, keepdims=True)
    tensors = {"query": b, "key": a, "value": v}
    pieces = [
        {n: torch.from_numpy(x[None, part].copy()) for n, x in tensors.items()}
        for part in (slice(cut), slice(cut, None))
    ]
    np.testing.assert_allclose(attention(pieces, features)[0], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_arguments_are_in_the_order_the_kernel_declares(causal: bool) -> None:
    made = node(4, 2, 64, causal, "key_mask", *(["decay", "past_key_max"] if causal else []))
    for sm in ARCHITECTURES:
        chosen = plan_launches(made, "float16", sm)
        for kernel in chosen.kernels():
            declared, passed = function(kernel).arg_names, [a.name for a in kernel.arguments]
            assert set(declared) == {*passed, *dict(kernel.constants)}
            assert [name for name in declared if name in passed] == passed
        assert chosen.in_place == (("present_key_max",) if causal else ())


def test_a_sequence_without_a_batch_that_fills_the_gpu_is_cut() -> None:
    chosen = plan_launches(node(16, 16, 64, True), "float32", 90)
    assert len(chosen.route(8, 8192, 132).launches) == 2
    assert len(chosen.route(64, 8192, 132).launches) == 1


def test_heads_that_no_block_holds_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="heads of 257 features; the kernel takes"):
        plan_launches(node(1, 1, 257, True), "float32", 90)
