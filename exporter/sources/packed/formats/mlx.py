"""MLX's affine weights, and the layout of the models that mlx-lm writes.

    weight (outputs, inputs bits / 32) in U32, lowest bits first
    scales, biases (outputs, groups)
    w[o, i] = q[o, i] scales[o, i // group size] + biases[o, i // group size]

Linear layers and embeddings are stored so. mlx-lm changes other weights when it writes a model:
convolutions have their channels last, norms of Qwen are stored with the 1 that the model adds, and
experts are one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from linexport.sources.files import refuse
from linexport.sources.packed.record import PackedTensor, StoredTensor, blocks, unpack
from linexport.sources.packed.stored import StoredTensors
from linexport.system.json_object import JsonObject

TITLE = "MLX"
METHODS = ("mlx",)
IGNORED: tuple[str, ...] = ()

_BITS = (2, 3, 4, 5, 6, 8)
_WORD = 32
_CONVOLUTION = re.compile(r".*\bconv(1d)?\.weight")
_EXPERTS = re.compile(r"(.*)\.switch_mlp\.(\w+)\.weight")
_RAISED = re.compile(
    r".*(input_layernorm|post_attention_layernorm|model\.norm|q_norm|k_norm)\.weight"
)
_RAISING = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Model types whose norms multiply by 1 + weight, and by the weight in MLX."""

_OTHERWISE = ("falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2_moe", "nemotron_h", "rwkv7")
"""Model types whose weights mlx-lm joins or multiplies in ways that are not undone here."""


def weights(
    stored: StoredTensors, settings: JsonObject, config: JsonObject
) -> Iterator[StoredTensor]:
    """Return the weights that have ``scales``, and those that mlx-lm changes."""
    kind = config.get("model_type")
    mode = settings.get("mode") or "affine"
    if mode != "affine" or kind in _OTHERWISE:
        found = f"MLX weights of {kind}" if kind in _OTHERWISE else f"MLX weights in mode {mode!r}"
        raise refuse(
            stored.folder,
            f"{found}; read are affine ones, of models whose weights mlx-lm leaves as they are",
            "take the checkpoint it was quantised from",
        )
    packed = [t for stem in stored.stems(".scales") for t in _packed(stored, stem, settings)]
    taken = {part for tensor in packed for part in tensor.parts}
    others = [t for name in stored if name not in taken for t in _plain(stored, name)]
    for tensor in (*packed, *others):
        yield _named(_restored(tensor, kind), config)


def _packed(stored: StoredTensors, stem: str, settings: JsonObject) -> Iterator[StoredTensor]:
    """Return a weight, or those of the experts that it joins."""
    own = settings.get(stem)
    stated = own if isinstance(own, dict) else settings
    bits, size = (stated.get(key, settings.get(key)) for key in ("bits", "group_size"))
    weight, scales, biases = (f"{stem}.{part}" for part in ("weight", "scales", "biases"))
    *first, words = stored.need(weight, scales).shape
    if bits not in _BITS or not isinstance(size, int) or size < 1:
        raise stored.wrong(f"{weight} of {bits} bits in groups of {size}; read are {_BITS} bits")
    inputs = words * _WORD // bits
    groups = (*first, -(-inputs // size))
    stored.expect(scales, groups)
    stored.need(biases, weight)
    stored.expect(biases, groups)
    parts = frozenset({weight, scales, biases})
    read = partial(_read, stored, stem, bits, size)
    yield from _by_expert(StoredTensor(weight, (*first, inputs), read, parts), read)


def _by_expert(
    joined: StoredTensor, read: Callable[[int], PackedTensor | Tensor]
) -> Iterator[StoredTensor]:
    """Return a weight, or those of the experts that it joins.

    Args:
        joined: the weight.
        read: reads the entry of an expert.
    """
    experts = _EXPERTS.fullmatch(joined.name)
    if experts is None or len(joined.shape) != 3:
        yield joined
        return
    for index in range(joined.shape[0]):
        name = f"{experts[1]}.experts.{index}.{experts[2]}.weight"
        yield replace(joined, name=name, shape=joined.shape[1:], load=partial(read, index))


def _read(
    stored: StoredTensors, stem: str, bits: int, size: int, expert: int | None = None
) -> PackedTensor:
    words, scales, offsets = (
        part.reshape(-1, part.shape[-1])
        for part in (stored.read(f"{stem}.{p}", expert) for p in ("weight", "scales", "biases"))
    )
    codes = unpack(words.view(torch.int32), bits)
    rows, columns = torch.arange(len(codes)), blocks(codes.shape[1], size)
    return PackedTensor(codes, scales, rows, columns, offsets=offsets)


def _plain(stored: StoredTensors, name: str) -> Iterator[StoredTensor]:
    header = stored[name]
    if name.endswith("weight") and header.dtype == "U32":
        stored.need(f"{name.removesuffix('weight')}scales", name)
    read = partial(stored.read, name)
    yield from _by_expert(StoredTensor(name, header.shape, read, frozenset({name})), read)


def _restored(tensor: StoredTensor, kind: str | None) -> StoredTensor:
    """Return a weight as the library of the model has it."""
    if _CONVOLUTION.fullmatch(tensor.name) and len(tensor.shape) == 3:
        outputs, width, inputs = tensor.shape
        return replace(
            tensor, shape=(outputs, inputs, width), load=partial(_channels_first, tensor)
        )
    if kind in _RAISING and _RAISED.fullmatch(tensor.name):
        return replace(tensor, load=partial(_lowered, tensor))
    return tensor


def _channels_first(tensor: StoredTensor) -> Tensor:
    return tensor.read().transpose(1, 2)


def _lowered(tensor: StoredTensor) -> Tensor:
    return tensor.read().float() - 1


def _named(tensor: StoredTensor, config: JsonObject) -> StoredTensor:
    """Return a weight by the name of the library, where mlx-lm has the language model first."""
    first, _, rest = tensor.name.partition(".")
    if first != "language_model":
        return tensor
    if "text_config" not in config:
        return replace(tensor, name=rest)
    inner = rest.removeprefix("model.")
    return replace(tensor, name=rest if inner == rest else f"model.language_model.{inner}")
