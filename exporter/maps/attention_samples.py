"""Queries, keys and values to compare maps on: random ones, or those of a model's own layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from linexport.errors import UsageError
from linexport.models import multihead_attention
from linexport.models.attention import LinearAttention
from linexport.models.attention_masks import understood
from linexport.models.linear_attention_layer import LinearAttentionLayer
from linexport.models.registry import ReferenceModel
from linexport.models.softmax_calls import Attending, Call, ComputeAttention
from linexport.sources import load_model
from linexport.sources.loaded_model import LoadedModel

Array = NDArray[np.float64]

RANDOM_HEADS = 4
MOST_HEADS = 12
"""Heads of a model that are looked at, spread evenly over its layers."""


@dataclass(frozen=True)
class HeadSamples:
    """Queries, keys and values that every head of some layers was given.

    Attributes:
        queries: (heads, T, d), before any feature map, not scaled.
        keys: (heads, T, d).
        values: (heads, T, d_v).
        fit_queries: (n, d) further queries, for maps that are fitted.
        fit_keys: (n, d) further keys, likewise.
        causal: whether a token attends only to those before it.
        layer_heads: heads of one layer, which times are measured for.
        source: for people.
    """

    queries: Array
    keys: Array
    values: Array
    fit_queries: Array
    fit_keys: Array
    causal: bool
    layer_heads: int
    source: str


def random_samples(d: int, length: int, seed: int) -> HeadSamples:
    """Independent standard normal entries, causal."""
    random = np.random.default_rng(seed)
    q, k, v = random.standard_normal((3, RANDOM_HEADS, length, d))
    fit_q, fit_k = random.standard_normal((2, 4 * length, d))
    source = f"standard normal queries, keys and values, {RANDOM_HEADS} heads"
    return HeadSamples(q, k, v, fit_q, fit_k, True, RANDOM_HEADS, source)


def model_samples(source: str | Path, length: int, seed: int, inputs: Path | None) -> HeadSamples:
    """Sample the attention of a model, run on ``inputs`` or on random ones.

    Layers of ``linexport.models`` with linear attention, and self-attention by
    ``F.scaled_dot_product_attention`` in any module.

    Args:
        source: as for ``linexport.convert``.
        length: of the random inputs; a model of fixed length keeps its own.
        seed: of them.
        inputs: ``.npz`` of the model's arguments, in order; None: random ones.

    Raises:
        UsageError: the model has no such attention, its layers differ in head width, or the inputs
            do not fit it.
    """
    loaded = load_model(source, seed=seed)
    shown = _run(loaded, _read(inputs) if inputs else _draw(loaded, length, seed))
    others = _run(loaded, _draw(loaded, length, seed + 1)) if inputs is None else shown
    widths = {(s.queries.shape[2], s.values.shape[2]) for s in shown}
    if len(widths) != 1:
        raise UsageError(
            f"The layers of {source} have heads of different widths: {sorted(widths)}. Maps are "
            "compared at one width."
        )
    q, k, v = (
        np.concatenate([getattr(s, n) for s in shown]) for n in ("queries", "keys", "values")
    )
    chosen = np.unique(np.linspace(0, len(q) - 1, min(MOST_HEADS, len(q))).round().astype(int))
    fit_q, fit_k = (
        np.concatenate([getattr(s, n) for s in others]).reshape(-1, q.shape[2])
        for n in ("queries", "keys")
    )
    what = f"{loaded.source.description}: {len(chosen)} of {len(q)} heads in {len(shown)} layers"
    how = f"inputs from {inputs}" if inputs else "random inputs"
    return HeadSamples(
        q[chosen],
        k[chosen],
        v[chosen],
        fit_q,
        fit_k,
        all(s.causal for s in shown),
        shown[0].queries.shape[0],
        f"{what}, on {how}",
    )


@dataclass(frozen=True)
class Layer:
    """Inputs of one layer, (heads, T, width) each; keys repeated for the heads they serve."""

    queries: Array
    keys: Array
    values: Array
    causal: bool


def _draw(loaded: LoadedModel, length: int, seed: int) -> tuple[object, ...]:
    if isinstance(loaded.module, ReferenceModel):
        return loaded.module.example_inputs(1, length, seed)
    return loaded.args


def _read(path: Path) -> tuple[torch.Tensor, ...]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return tuple(torch.from_numpy(file[name]) for name in file.files)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{path} cannot be read as inputs ({error}). Write them with numpy.savez, one array "
            "for each argument of the model, in order."
        ) from error


def _run(loaded: LoadedModel, args: tuple[object, ...]) -> list[Layer]:
    """Inputs of all attention in one call of the model."""
    seen: list[Layer] = []
    multihead_attention.swap(loaded.module)
    with _hooked(loaded.module, seen), Attending(_of_softmax(seen)), torch.no_grad():
        try:
            loaded.module(*args, **loaded.kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(f"The model does not run on these inputs: {first}") from error
    if not seen:
        raise UsageError(
            f"{loaded.source.location} ({loaded.source.description}) has no attention to take "
            "queries and keys from: expected layers of linexport.models, or self-attention by "
            "F.scaled_dot_product_attention to all keys or to earlier ones."
        )
    return seen


@contextmanager
def _hooked(module: torch.nn.Module, seen: list[Layer]) -> Iterator[None]:
    handles = []
    for layer in module.modules():
        if isinstance(layer, LinearAttentionLayer):
            handles.append(layer.register_forward_pre_hook(_of_arguments(seen)))
        elif isinstance(layer, LinearAttention):
            handles.append(layer.register_forward_pre_hook(_of_projections(seen)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _of_arguments(seen: list[Layer]) -> Any:
    return lambda layer, args: seen.append(_layer(layer.spec, *args[:3]))


def _of_projections(seen: list[Layer]) -> Any:
    def hook(layer: LinearAttention, args: tuple[torch.Tensor, ...]) -> None:
        x = args[0]
        seen.append(_layer(layer.spec, layer.query(x), layer.key(x), layer.value(x)))

    return hook


def _of_softmax(seen: list[Layer]) -> ComputeAttention:
    def record(index: int, call: Call) -> torch.Tensor:
        mask = _mask(call)
        if mask in ("keys", "causal"):
            # Kernels are of q . k / sqrt(d), whatever the scale of this call.
            query = call.query * (call.factor * call.query.shape[-1] ** 0.5)
            q, k, v = (x[0].detach().double() for x in (query, call.key, call.value))
            k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
            seen.append(Layer(q.numpy(), k.numpy(), v.numpy(), mask == "causal"))
        return call.softmax()

    return record


def _mask(call: Call) -> str:
    """Return "keys" or "causal", or why a call attends neither to all keys nor to earlier ones."""
    if call.query.shape[-2] != call.key.shape[-2]:
        return "cross-attention"
    if call.attn_mask is None:
        return "causal" if call.is_causal else "keys"
    return understood(call.attn_mask, call.query.shape[-2], call.key.shape[-2])


def _layer(spec: Any, *packed: torch.Tensor) -> Layer:
    """The first of the batch, by head."""
    heads = (spec.q_num_heads, spec.kv_num_heads, spec.kv_num_heads)
    split = []
    for x, count in zip(packed, heads, strict=True):
        one = x[0].detach().double().unflatten(-1, (count, -1)).transpose(0, 1)
        split.append(one.repeat_interleave(spec.output_heads // count, 0).numpy())
    q, k, v = split
    return Layer(q, k, v, spec.causal)
