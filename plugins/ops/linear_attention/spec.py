"""Attributes of ``linexport.LinearAttention`` and the shapes its inputs must have.

    query           (B, T, H_q * d_k)
    key             (B, T, H_k * d_k)      H_k divides H_kv, or equals it
    value           (B, T, H_kv * d_v)
    past_state      (B, H_kv, d_k, d_v)    float32
    past_normalizer (B, H_kv, d_k)         float32
    decay           (B, T, H_kv) or (B, T, H_kv * d_k)     in log space, <= 0
    decay_scale     (H_kv, d_k)            times the first of these: a decay in two factors
    beta            (B, T, H_kv) or (B, T, 1)
    key_mask        (B, T)                 bool, False for a padded token
    output          (B, T, max(H_q, H_kv) * d_v)

With causal = 0, key, value and key_mask may have another length than query: cross attention.

Heads are shared in consecutive groups: of ``n`` heads serving ``m >= n``, head ``i`` serves
``i * m/n ... (i + 1) * m/n - 1``. The widths of query,
key, value, decay and beta must be known; batch and length need not be.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from linexport.errors import OpError
from linexport.plugins.ops.shapes import (
    PartialShape,
    one_of,
    rank,
    same_dim,
    same_sequence,
    static_width,
    width_per_head,
)

UPDATE_RULES = ("linear", "gated", "delta", "gated_delta")


@dataclass(frozen=True)
class AttentionSizes:
    """Head counts and widths that the packed inputs imply."""

    key_heads: int
    d_k: int
    d_v: int
    decay_per_channel: bool = False
    beta_per_head: bool = True


@dataclass(frozen=True)
class LinearAttentionSpec:
    """Attributes of one node; the formulas are in ``oracle``.

    Raises:
        OpError: an attribute, or a combination of them, has no meaning.
    """

    q_num_heads: int
    kv_num_heads: int
    update_rule: str = "linear"
    causal: bool = True
    normalize: bool = False
    scale: float = 1.0
    eps: float = 0.0
    chunk_size: int = 64

    def __post_init__(self) -> None:
        if self.update_rule not in UPDATE_RULES:
            raise OpError(
                f"update_rule is {self.update_rule!r}; expected one of {', '.join(UPDATE_RULES)}."
            )
        for name in ("q_num_heads", "kv_num_heads", "chunk_size"):
            if getattr(self, name) < 1:
                raise OpError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        larger, smaller = sorted((self.q_num_heads, self.kv_num_heads), reverse=True)
        if larger % smaller:
            raise OpError(
                f"{self.q_num_heads} query heads and {self.kv_num_heads} key/value heads: "
                "one count must be a multiple of the other."
            )
        if self.has_beta and self.normalize:
            raise OpError(
                f"normalize=1 with update_rule {self.update_rule!r}: the delta rule rewrites what "
                "it stored, so a running sum of keys normalises nothing. Use normalize=0."
            )
        if not self.causal and self.update_rule != "linear":
            raise OpError(
                f"causal=0 with update_rule {self.update_rule!r}: decay and delta updates order "
                "the tokens. Use update_rule 'linear', or causal=1."
            )

    @property
    def has_decay(self) -> bool:
        """The rule reads ``decay``."""
        return self.update_rule in ("gated", "gated_delta")

    @property
    def has_beta(self) -> bool:
        """The rule reads ``beta``."""
        return self.update_rule in ("delta", "gated_delta")

    @property
    def output_heads(self) -> int:
        """Heads of the output: the larger of the query and the key/value heads."""
        return max(self.q_num_heads, self.kv_num_heads)

    def attributes(self) -> dict[str, Any]:
        """Return the spec as ONNX attributes: ints for the flags."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: int(v) if isinstance(v, bool) else v for k, v in values.items()}

    @classmethod
    def from_attributes(cls, attributes: dict[str, Any]) -> LinearAttentionSpec:
        """The inverse of ``attributes``; names it does not know are left aside."""
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in attributes.items() if k in known}
        for flag in ("causal", "normalize"):
            if flag in values:
                values[flag] = bool(values[flag])
        for required in ("q_num_heads", "kv_num_heads"):
            if required not in values:
                raise OpError(f"LinearAttention lacks the attribute {required}.")
        return cls(**values)

    def check(
        self,
        query: PartialShape,
        key: PartialShape,
        value: PartialShape,
        past_state: PartialShape | None = None,
        past_normalizer: PartialShape | None = None,
        decay: PartialShape | None = None,
        beta: PartialShape | None = None,
        key_mask: PartialShape | None = None,
        decay_scale: PartialShape | None = None,
    ) -> AttentionSizes:
        """AttentionSizes implied by the shapes of the inputs.

        Raises:
            OpError: a shape contradicts another one or the attributes, an input the rule needs is
                missing, or one it does not read is given.
        """
        d_k = width_per_head("query", query, self.q_num_heads)
        key_heads = self._key_heads(query, key, d_k)
        d_v = width_per_head("value", value, self.kv_num_heads)
        batch, length = query[0], query[1] if self.causal else key[1]
        for name, shape in (("key", key), ("value", value)):
            same_sequence(name, shape, batch, length)
        _check_presence("decay", decay, self.has_decay, self.update_rule)
        _check_presence("beta", beta, self.has_beta, self.update_rule)
        if not self.causal and (past_state is not None or past_normalizer is not None):
            raise OpError("causal=0 reads the whole sequence at once; it takes no past state.")
        if past_normalizer is not None and not self.normalize:
            raise OpError("past_normalizer is given, but normalize=0 keeps no normalizer.")
        self._check_decay(decay, decay_scale, d_k)
        if beta is not None:
            rank("beta", beta, 3)
            one_of("beta", static_width("beta", beta), (self.kv_num_heads, 1))
        for name, other in (("decay", decay), ("beta", beta), ("key_mask", key_mask)):
            if other is not None:
                same_sequence(name, other, batch, length, 2 if name == "key_mask" else 3)
        for name, past, tail in (
            ("past_state", past_state, (self.kv_num_heads, d_k, d_v)),
            ("past_normalizer", past_normalizer, (self.kv_num_heads, d_k)),
        ):
            if past is not None:
                _check_past(name, past, batch, tail)
        return AttentionSizes(
            key_heads,
            d_k,
            d_v,
            decay is not None and (decay[-1] != self.kv_num_heads or decay_scale is not None),
            beta is None or beta[-1] == self.kv_num_heads,
        )

    def _key_heads(self, query: PartialShape, key: PartialShape, d_k: int) -> int:
        """Return the number of key heads.

        Raises:
            OpError: it is not whole, or does not divide that of the values.
        """
        if static_width("key", key) % d_k:
            raise OpError(
                f"key has width {key[-1]}, which is not a multiple of d_k = {d_k} "
                f"(query width {query[-1]} over {self.q_num_heads} heads)."
            )
        heads = static_width("key", key) // d_k
        if heads < 1 or self.kv_num_heads % heads:
            raise OpError(
                f"key has {heads} heads of {d_k}; expected kv_num_heads = "
                f"{self.kv_num_heads} or a divisor of it."
            )
        return heads

    def _check_decay(
        self, decay: PartialShape | None, scale: PartialShape | None, d_k: int
    ) -> None:
        """Check a decay, and the scale that it has where it is in two factors.

        Raises:
            OpError: a shape is not that of these heads.
        """
        if decay is not None:
            rank("decay", decay, 3)
            widths = (self.kv_num_heads, self.kv_num_heads * d_k)
            one_of("decay", static_width("decay", decay), widths)
        if scale is None:
            return
        if decay is None or decay[-1] != self.kv_num_heads:
            raise OpError("decay_scale is given; expected a decay (B, T, H_kv) with it.")
        if tuple(scale) != (self.kv_num_heads, d_k):
            raise OpError(
                f"decay_scale has shape {tuple(scale)}; expected ({self.kv_num_heads}, {d_k})."
            )


def _check_past(
    name: str, past: PartialShape, batch: int | str | None, tail: tuple[int, ...]
) -> None:
    """Check that a state is of the batch, and of the sizes behind it.

    Raises:
        OpError: it is not.
    """
    rank(name, past, 1 + len(tail))
    same_dim(name, "batch", past[0], batch)
    if any(isinstance(d, int) and d != e for d, e in zip(past[1:], tail, strict=True)):
        fits = ", ".join(map(str, ("B", *tail)))
        raise OpError(f"{name} has shape {tuple(past)}; expected ({fits}).")


def _check_presence(name: str, shape: PartialShape | None, expected: bool, rule: str) -> None:
    if (shape is not None) != expected:
        verb = "needs" if expected else "does not read"
        raise OpError(f"update_rule {rule!r} {verb} the input {name}.")
