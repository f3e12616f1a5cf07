"""Softmax attention over a cache as conversions write it, and what it computes in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.support.layouts import one_op_model
from tests.support.runtimes import Arrays

OUTPUTS = ("output", "keys", "values")
LOW = float(np.finfo(np.float32).min)
"""What transformers adds to the scores of hidden keys."""


@dataclass(frozen=True)
class Sizes:
    """An attention.

    Attributes:
        queries: heads of them.
        heads: of keys and values.
        d_k: channels of a query and key.
        d_v: channels of a value.
        half: pairs of channels that turn; 0 for no rotary embedding.
        packed: the output has one axis for heads and channels.
        scale: of the scores; None for scores that are not multiplied.
        seen: the mask is made of key_mask (B, P + T), for queries that see no later keys.
        angles: axes of them in front of their pairs: of each row, of all rows, or tokens alone.
        apart: scores are those of heads where a mask is added, not of heads one below the other.
    """

    queries: int = 4
    heads: int = 2
    d_k: int = 8
    d_v: int = 6
    half: int = 0
    packed: bool = True
    scale: float | None = 0.3
    seen: bool = False
    angles: tuple[int | str, ...] = ("B", "T")
    apart: bool = False


def model(sizes: Sizes, masks: int | str = "B") -> onnx.ModelProto:
    """Inputs are query, key and value of (B, T, H d), past_key, past_value, mask, angles."""
    q, h, d_k, d_v = sizes.queries, sizes.heads, sizes.d_k, sizes.d_v
    shapes: dict[str, Sequence[int | str]] = {
        "query": ("B", "T", q * d_k),
        "key": ("B", "T", h * d_k),
        "value": ("B", "T", h * d_v),
        "past_key": ("B", h, "P", d_k),
        "past_value": ("B", h, "P", d_v),
        "mask": (masks, 1, "T", "P + T"),
    }
    inner: dict[str, Sequence[int | str]] = {}
    nodes: list[onnx.NodeProto] = []
    constants: dict[str, np.ndarray] = {}

    def add(
        op: str, given: Sequence[str], made: str, shape: Sequence[int | str], **settings: Any
    ) -> str:
        nodes.append(helper.make_node(op, given, [made], made, **settings))
        inner[made] = shape
        return made

    def constant(values: object) -> str:
        array = np.asarray(values)
        name = f"constant {array.tolist()}" + (" as float" if array.dtype.kind == "f" else "")
        constants[name] = array
        return name

    if sizes.seen:
        del shapes["mask"]
        nodes += _seen(constant)
        inner["mask"] = ("B", 1, "T", "P + T")
    if sizes.half:
        shapes["angle"] = (*sizes.angles, sizes.half)
        nodes += _tables(sizes.half, constant, sizes.angles[0] == "B")
        inner |= dict.fromkeys(("cos", "sin"), (*sizes.angles, 2 * sizes.half))
        positions = "positions" if sizes.angles[0] == "B" else constant([0])

    def heads_first(name: str, heads: int, width: int) -> str:
        parted = constant([0, 0, heads, width])
        four = add("Reshape", [name, parted], f"{name}_parted", ("B", "T", heads, width))
        turned = ("B", heads, "T", width)
        first = add("Transpose", [four], f"{name}_heads", turned, perm=[0, 2, 1, 3])
        if not sizes.half or name == "value":
            return first
        tables = [first, positions, "cos_rows", "sin_rows"]
        settings = {"num_heads": heads, "rotary_embedding_dim": 2 * sizes.half}
        made = f"{name}_turned"
        return add("RotaryEmbedding", tables, made, turned, domain="com.microsoft", **settings)

    query, key = heads_first("query", q, d_k), heads_first("key", h, d_k)
    value, mask, rows = heads_first("value", h, d_v), "mask", "T"
    keys = add("Concat", ["past_key", key], "keys", ("B", h, "T + P", d_k), axis=-2)
    values = add("Concat", ["past_value", value], "values", ("B", h, "P + T", d_v), axis=-2)
    across = add("Transpose", [keys], "keys_across", ("B", h, d_k, "P + T"), perm=[0, 1, 3, 2])
    if q != h:
        rows = f"{q // h}*T"
        query = add("Reshape", [query, constant([0, h, -1, d_k])], "grouped", ("B", h, rows, d_k))
    if q != h and not sizes.apart:
        copies = ["mask"] * (q // h)
        mask = add("Concat", copies, "masks", (masks, 1, rows, "P + T"), axis=2)
    scored = ("B", h, rows, "P + T")
    scores = add("MatMul", [query, across], "products", scored)
    parted = q != h and sizes.apart
    if parted:
        scored = ("B", q, "T", "P + T")
        scores = add("Reshape", [scores, constant([0, q, -1, 0])], "of_heads", scored)
    if sizes.scale is not None:
        scores = add("Mul", [scores, constant(np.float32(sizes.scale))], "scaled", scored)
    scores = add("Add", [scores, mask], "scores", scored)
    weights = add("Softmax", [scores], "weights", scored, axis=-1)
    if parted:
        below = ("B", h, rows, "P + T")
        weights = add("Reshape", [weights, constant([0, h, -1, 0])], "weights_below", below)
    summed = add("MatMul", [weights, values], "summed", ("B", h, rows, d_v))
    if q != h:
        summed = add("Reshape", [summed, constant([0, q, -1, d_v])], "parted", ("B", q, "T", d_v))
    shape = ("B", "T", q, d_v)
    result = "together" if sizes.packed else "output"
    add("Transpose", [summed], result, shape, perm=[0, 2, 1, 3])
    if sizes.packed:
        wide = ("B", "T", q * d_v)
        add("Reshape", [result, constant([0, 0, q * d_v])], "output", wide)
    given, ends = ({**shapes}, {n: inner.pop(n) for n in OUTPUTS})
    infos = [
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in some.items()]
        for some in (given, ends, inner)
    ]
    if sizes.seen:
        infos[0].append(helper.make_tensor_value_info("key_mask", TensorProto.INT64, SEEN["kept"]))
        for name, shape in SEEN.items():
            kind = TensorProto.INT64 if name in ("numbers", "rows", "column") else TensorProto.BOOL
            infos[2].append(helper.make_tensor_value_info(name, kind, shape))
    made = one_op_model(nodes, *infos)
    made.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in constants.items())
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return made


def lengths(tokens: int, past: int = 40) -> dict[str, int]:
    """Sizes of the model's axes for so many tokens, besides that of these."""
    return {"P": past, "P + T": past + tokens}


SEEN: dict[str, Sequence[int | str]] = {
    "numbers": ("P + T",),
    "rows": ("T",),
    "column": ("T", 1),
    "earlier": ("T", "P + T"),
    "kept": ("B", "P + T"),
    "kept_once": ("B", 1, "P + T"),
    "kept_of_heads": ("B", 1, 1, "P + T"),
    "both": ("B", 1, "T", "P + T"),
}
"""Shapes of what such a mask is made of."""


def _seen(constant: Callable[[object], str]) -> list[onnx.NodeProto]:
    """A mask of key_mask and of the order of tokens."""

    def make(op: str, given: Sequence[str], made: str, **settings: Any) -> onnx.NodeProto:
        return helper.make_node(op, given, [made], made, **settings)

    axes = [constant([axis]) for axis in (0, 1, 2)]
    part = ["numbers", "past_length", constant([2**63 - 1]), axes[0]]
    return [
        make("Shape", ["key_mask"], "lengths_of_keys", start=1, end=2),
        make("Squeeze", ["lengths_of_keys"], "all_length"),
        make("Shape", ["past_key"], "past_length", start=2, end=3),
        make("Range", [constant(0), "all_length", constant(1)], "numbers"),
        make("Slice", part, "rows"),
        make("Unsqueeze", ["rows", axes[1]], "column"),
        make("LessOrEqual", ["numbers", "column"], "earlier"),
        make("Cast", ["key_mask"], "kept", to=TensorProto.BOOL),
        make("Unsqueeze", ["kept", axes[1]], "kept_once"),
        make("Unsqueeze", ["kept_once", axes[2]], "kept_of_heads"),
        make("And", ["earlier", "kept_of_heads"], "both"),
        make("Where", ["both", constant(np.float32(0)), constant(np.float32(LOW))], "mask"),
    ]


def _tables(half: int, constant: Callable[[object], str], each: bool) -> list[onnx.NodeProto]:
    """Rows of cos and sin for every token, and the positions that number them where rows differ."""

    def make(op: str, given: Sequence[str], made: str, **settings: Any) -> onnx.NodeProto:
        return helper.make_node(op, given, [made], made, **settings)

    nodes = [make("Concat", ["angle", "angle"], "angles", axis=-1)]
    first = [constant([0]), constant([half]), constant([-1])]
    for name in ("cos", "sin"):
        nodes += [
            make(name.title(), ["angles"], name),
            make("Slice", [name, *first], f"{name}_half"),
            make("Reshape", [f"{name}_half", constant([-1, half])], f"{name}_rows"),
        ]
    if not each:
        return nodes
    return [
        *nodes,
        make("Shape", ["cos"], "lengths", start=0, end=2),
        make("ReduceProd", ["lengths"], "count", keepdims=0),
        make("Range", [constant(0), "count", constant(1)], "numbers"),
        make("Reshape", ["numbers", "lengths"], "positions"),
    ]


def draw(sizes: Sizes, batch: int, length: int, past: int, hidden: float) -> Arrays:
    """Random inputs; ``hidden`` is added to scores of later tokens and of some of the past."""
    rng = np.random.default_rng(length + past)
    q, h, d_k, d_v = sizes.queries, sizes.heads, sizes.d_k, sizes.d_v
    shapes = {
        "query": (batch, length, q * d_k),
        "key": (batch, length, h * d_k),
        "value": (batch, length, h * d_v),
        "past_key": (batch, h, past, d_k),
        "past_value": (batch, h, past, d_v),
    }
    if sizes.half:
        given = {"B": batch, "T": length, 1: 1}
        shapes["angle"] = (*(given[n] for n in sizes.angles), sizes.half)
    x = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    seen = np.arange(past + length) <= past + np.arange(length)[:, None]
    seen = seen & (rng.random((batch, 1, 1, past + length)) > 0.2)
    seen |= np.arange(past + length) == past + np.arange(length)[:, None]
    if sizes.seen:
        kept = rng.random((batch, past + length)) > 0.3
        return x | {"key_mask": kept.astype(np.int64)}
    x["mask"] = np.where(seen, 0, hidden).astype(np.float32)
    return x


def oracle(sizes: Sizes, x: Arrays) -> list[np.ndarray]:
    """Output, keys and values by the definition, in float64."""
    wide = {name: array.astype(np.float64) for name, array in x.items()}

    def heads_first(name: str, heads: int) -> np.ndarray:
        batch, length, width = wide[name].shape
        parted = wide[name].reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)
        if not sizes.half or name == "value":
            return parted
        angle, half = wide["angle"], sizes.half
        angle = angle if angle.ndim == 2 else angle[:, None]
        first, second = parted[..., :half], parted[..., half : 2 * half]
        turned = first * np.cos(angle) - second * np.sin(angle)
        other = second * np.cos(angle) + first * np.sin(angle)
        return np.concatenate([turned, other, parted[..., 2 * half :]], -1)

    keys = np.concatenate([wide["past_key"], heads_first("key", sizes.heads)], 2)
    values = np.concatenate([wide["past_value"], heads_first("value", sizes.heads)], 2)
    query, group = heads_first("query", sizes.queries), sizes.queries // sizes.heads
    scores = query @ np.repeat(keys, group, 1).swapaxes(2, 3)
    mask = wide.get("mask")
    if mask is None:
        rows, every = np.arange(keys.shape[2])[-query.shape[2] or keys.shape[2] :], keys.shape[2]
        seen = (np.arange(every) <= rows[:, None]) & (x["key_mask"][:, None, None] != 0)
        mask = np.where(seen, 0, LOW)
    scores = scores * (1 if sizes.scale is None else np.float32(sizes.scale)) + mask
    largest = scores.max(-1, initial=-np.inf, keepdims=True)
    weights = np.exp(scores - largest)
    weights /= weights.sum(-1, keepdims=True)
    output = (weights @ np.repeat(values, group, 1)).transpose(0, 2, 1, 3)
    shape = (*output.shape[:2], sizes.queries * sizes.d_v) if sizes.packed else output.shape
    return [output.reshape(shape), keys, values]
