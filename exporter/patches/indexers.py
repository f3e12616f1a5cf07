"""Softmax attention to tokens that an indexer chooses, of Qwen 4 and GLM 5 -> TopK and a mask.

Tokens are in blocks of r, from the first that is not padding. With keys of its own, the indexer
scores the blocks that are complete at token t, and the tokens of the K best are attended to,
together with those behind the last complete block:

    s_tp = sum_h w_th relu(q_th . k_p),   k_p = turn(norm(mean of the keys of block p))       Qwen 4
                                          k_p = sum of its keys, by softmax weights           GLM 5

The library computes the scores token by token (Qwen 4), or leaves out blocks that are incomplete in
all rows, whose number depends on values (GLM 5). Here all blocks have scores, the lowest where they
are incomplete, and K more that never are complete, so that K can be chosen of any number. All
tokens are attended to under the mask: those left out cost what they cost without an indexer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from linexport.errors import ParityError, UnsupportedModelError
from linexport.patches import Patch, Swap, choosing_together
from linexport.patches.latent_attention import attended, latents, queries
from linexport.patches.library import of_file
from linexport.patches.softmax_attention import attend
from linexport.system.untyped import LibraryObject, TorchCallable

INCOMPLETE = -1.0
"""Score of blocks that are not complete; those of others are at least 0."""

CLOSE = 1e-4
"""Difference allowed between the scores of what two programs choose, as a share of the largest."""


def qwen_attention(
    self: LibraryObject,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    cache: LibraryObject = None,
    **kwargs: LibraryObject,
) -> tuple[Tensor, None]:
    """Stands in for ``Qwen4ExpTextAttention.forward``; angles are those of all tokens."""
    chosen = _chosen(self.indexer, hidden_states, position_embeddings, attention_mask, cache)
    mask = torch.where(chosen[:, None], attention_mask, torch.finfo(attention_mask.dtype).min)
    query, gate = self.q_proj(hidden_states).unflatten(2, (-1, 2 * self.head_dim)).chunk(2, -1)
    key, value = (
        p(hidden_states).unflatten(2, (-1, self.head_dim)) for p in (self.k_proj, self.v_proj)
    )
    query, key = (x.transpose(1, 2) for x in (self.q_norm(query), self.k_norm(key)))
    query, key = _turn(self)(query, key, *_last(position_embeddings, hidden_states.shape[1]))
    value = value.transpose(1, 2)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    output, _ = attend(query, key, value, mask, self.scaling)
    output = output.transpose(1, 2).flatten(2) * torch.sigmoid(gate.flatten(2))
    return self.o_proj(output), None


def _turn(part: object) -> TorchCallable:
    """Return the library's function for rotary positions, of the file that a module is from."""
    found: Callable[..., object] = of_file(part, "apply_rotary_pos_emb")
    return found


def _last(angles: tuple[Tensor, Tensor], length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the last tokens."""
    cos, sin = (x.narrow(1, x.shape[1] - length, length) for x in angles)
    return cos, sin


def _chosen(
    indexer: LibraryObject,
    x: Tensor,
    angles: tuple[Tensor, Tensor],
    mask: Tensor,
    cache: LibraryObject,
) -> Tensor:
    """Return which tokens are attended to, besides those that the mask excludes: (B, T, S)."""
    visible = (mask == 0)[:, 0]
    scores, place, complete = _scores(indexer, x, angles, visible, cache)
    taken = scores.topk(indexer.block_topk, dim=-1).indices
    return _tokens(scores, taken, place, complete)


def _tokens(scores: Tensor, taken: Tensor, place: Tensor, complete: Tensor) -> Tensor:
    """Return the tokens (B, T, S) of blocks that are taken, and those behind complete blocks."""
    blocks = torch.zeros_like(scores).scatter(-1, taken, 1.0)
    own = place[:, None].expand(-1, scores.shape[1], -1)
    inside = own < complete[..., None]
    return ((blocks.gather(-1, own) > 0) & inside) | (own == complete[..., None])


def _scores(
    indexer: LibraryObject,
    x: Tensor,
    angles: tuple[Tensor, Tensor],
    visible: Tensor,
    cache: LibraryObject,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores of blocks, the block of each token, and how many are complete.

    Args:
        indexer: of the library.
        x: what its layer is given, (B, T, D).
        angles: cosines and sines of all tokens, (B, S, d) each.
        visible: whether token s is seen from token t, (B, T, S).
        cache: of the library.

    Returns:
        (B, T, P + K), (B, S), and (B, T).
    """
    size, width, length = indexer.compress_ratio, indexer.index_head_dim, x.shape[1]
    projected = indexer.index_qk_proj(x)
    query, key = projected.split([indexer.index_n_heads * width, width], -1)
    query = indexer.q_layernorm(query.unflatten(2, (-1, width)))
    cos, sin = _last(angles, length)
    query = _turn(indexer)(query, cos=cos, sin=sin, unsqueeze_dim=2)
    if cache is not None:
        key = cache.update_indexer(key, indexer.layer_idx)
    # The last token sees all that are no padding.
    real = visible.narrow(1, length - 1, 1)[:, 0]
    rank = real.long().cumsum(-1) - 1
    place = (rank // size).clamp(min=0)
    count = key.shape[1] // size + 1

    def sums(x: Tensor, counted: Tensor) -> Tensor:
        whole = x.new_zeros(x.shape[0], count, x.shape[2])
        counted = counted[..., None].to(x.dtype)
        return whole.scatter_add(1, place[..., None].expand_as(x), x * counted)

    pooled = indexer.k_layernorm((sums(key.float(), real) / size).to(key.dtype))
    begins = real & (rank % size == 0)
    cos, sin = (sums(angle, begins) for angle in angles)
    keys = _turn(indexer)(pooled[:, :, None], cos=cos, sin=sin, unsqueeze_dim=2)[:, :, 0]
    by_head = query.flatten(1, 2).float() @ keys.float().transpose(1, 2)
    by_head = torch.relu(by_head.unflatten(1, (-1, indexer.index_n_heads)))
    scores = by_head.sum(2) / math.sqrt(width)
    complete = visible.sum(-1) // size
    scores = torch.where(torch.arange(count) < complete[..., None], scores, INCOMPLETE)
    return F.pad(scores, (0, indexer.block_topk), value=INCOMPLETE), place, complete


def choosing_of_all(
    library: Callable[..., Tensor],
    self: LibraryObject,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    cache: LibraryObject = None,
) -> Tensor:
    """Stands in for ``Qwen4ExpTextQSAIndexer.forward`` of an original whose choices are replaced.

    The library chooses token by token, so that a choice for all tokens cannot be put in its place.
    Its own are compared with the scores here: nothing but the choices is replaced.

    Raises:
        ParityError: the library chooses other blocks than those with the best scores.
    """
    with choosing_together(False):
        own = library(self, hidden_states, position_embeddings, attention_mask, cache)
    visible = (attention_mask == 0)[:, 0]
    scores, place, complete = _scores(self, hidden_states, position_embeddings, visible, cache=None)
    is_mask = own.dtype == torch.bool
    _check_choice((own if is_mask else own == 0)[:, 0], scores, place, complete, self)
    taken = scores.topk(self.block_topk, dim=-1).indices
    chosen = _tokens(scores, taken, place, complete)[:, None]
    return chosen if is_mask else torch.where(chosen, 0.0, torch.finfo(own.dtype).min)


def _check_choice(
    own: Tensor, scores: Tensor, place: Tensor, complete: Tensor, indexer: LibraryObject
) -> None:
    """Check that the tokens of a library's choice (B, T, S) are those of the best blocks."""
    blocks = torch.zeros_like(scores).scatter_add(
        -1, place[:, None].expand_as(own), own.to(scores.dtype)
    )
    inside = torch.arange(scores.shape[-1]) < complete[..., None]
    share = torch.where(inside, blocks / indexer.compress_ratio, 0.0)
    values, count = scores.clamp(min=0).numpy(), complete.clamp(max=indexer.block_topk)
    best = np.sort(values, -1)[..., -indexer.block_topk :].sum(-1)
    found = (share.numpy() * values).sum(-1)
    whole = bool(((share == 0) | (share == 1)).all()) and bool((share.sum(-1) == count).all())
    if not whole or (np.abs(best - found) > CLOSE * values.max()).any():
        raise ParityError("An indexer of the library chooses other blocks than the best ones.")


def glm_attention(
    self: LibraryObject,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    cache: LibraryObject = None,
    prev_topk_indices: Tensor | None = None,
    **kwargs: LibraryObject,
) -> tuple[Tensor, None, Tensor | None]:
    """Stands in for ``Glm5NextTextAttention.forward``, on latents as ``latent_attention``."""
    residual = self.q_a_layernorm(self.q_a_proj(hidden_states))
    keys = latents(self, hidden_states)
    if cache is not None:
        keys = cache.update(*keys, self.layer_idx)
    chosen = prev_topk_indices
    if self.indexer is not None:
        chosen = self.indexer(hidden_states, residual, attention_mask, cache)
    mask = self.build_attention_mask_from_topk(chosen, hidden_states, keys[0].shape[2])
    output = attended(self, queries(self, self.q_b_proj(residual)), keys, mask)
    return self.o_proj(output.flatten(2)), None, chosen if self.next_skip_topk else None


def glm_pools(self: LibraryObject, packed_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Stands in for ``Glm5NextTextIndexer.get_pooled_states``: all blocks, complete or not.

    Raises:
        UnsupportedModelError: tokens before the first complete block attend to none.
    """
    if not self.index_kpool_always_select_tail:
        raise UnsupportedModelError(
            "With index_kpool_always_select_tail = False the first tokens attend to no token, and "
            "transformers gives them the mean of all, later ones among them: expected True. Use "
            "the model in transformers."
        )
    width, size = self.head_dim, self.index_kpool
    keys, gates, real = packed_states.split([width, width, 1], -1)
    valid, total = real[..., 0] != 0, packed_states.shape[1]
    first = (valid.cumsum(-1) == 0).sum(-1)
    offsets = torch.arange((total + size - 1) // size * size)
    place = first[:, None] + offsets
    safe = place.clamp(0, total - 1)

    def blocks(x: Tensor) -> Tensor:
        return x.gather(1, safe[..., None].expand(-1, -1, x.shape[2])).unflatten(1, (-1, size))

    inside = (valid.gather(1, safe) & (place < total)).unflatten(1, (-1, size))
    place = torch.where(inside, place.unflatten(1, (-1, size)), -1)
    weights = blocks(gates).float() + self.index_kpool_compress_ape.float()
    weights = torch.where(inside[..., None], weights, -math.inf).softmax(2).nan_to_num()
    pooled = (weights.to(keys.dtype) * blocks(keys)).sum(2)
    more = self.index_topk // size
    return (
        F.pad(pooled, (0, 0, 0, more)),
        F.pad(place, (0, 0, 0, more), value=-1),
        F.pad(inside.all(-1), (0, more), value=False),
    )


PATCH = Patch(
    swaps=(
        Swap("Qwen4ExpTextAttention.forward", qwen_attention),
        Swap("Glm5NextTextAttention.forward", glm_attention),
        Swap("Glm5NextTextIndexer.get_pooled_states", glm_pools),
    ),
    families=("glm5_next", "qwen4_exp"),
    choosing=(Swap("Qwen4ExpTextQSAIndexer.forward", choosing_of_all),),
)
