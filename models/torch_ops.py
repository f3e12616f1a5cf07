"""The linexport ops as PyTorch operators: what a traced graph records.

``torch.ops.linexport.linear_attention``, ``generalized_delta_rule``, ``stabilized_exp``,
``causal_conv``, ``mixture_of_experts`` and ``feature_map`` compute what the functions of
``linexport.models`` and the feature maps compute. They exist to be traced and exported; the
functions are what to call and to train with. Importing this module registers them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from linexport.models import experts, functional, generalized_delta_rule
from linexport.models.feature_maps import base
from linexport.models.stabilize import Stabilized, plain_stabilized_exp
from linexport.plugins.ops import causal_conv as conv_op
from linexport.plugins.ops import feature_map as feature_map_op
from linexport.plugins.ops import generalized_delta_rule as generalized_op
from linexport.plugins.ops import mixture_of_experts as experts_op
from linexport.plugins.ops import stabilized_exp as stabilize_op
from linexport.plugins.ops.linear_attention.spec import LinearAttentionSpec

SCHEMAS = {
    "linear_attention": """(
        Tensor query, Tensor key, Tensor value, Tensor? past_state, Tensor? past_normalizer,
        Tensor? decay, Tensor? beta, Tensor? key_mask, *, Tensor? decay_scale=None,
        int q_num_heads, int kv_num_heads, str update_rule, int causal, int normalize, float scale,
        float eps, int chunk_size
    ) -> (Tensor, Tensor, Tensor)""",
    "generalized_delta_rule": """(
        Tensor query, Tensor key, Tensor value, Tensor decay, Tensor a, Tensor b,
        Tensor? past_state, Tensor? key_mask, *, int num_heads, float scale
    ) -> (Tensor, Tensor)""",
    "stabilized_exp": """(
        Tensor query, Tensor key, Tensor? past_key_max, Tensor? key_mask, Tensor? decay,
        int q_num_heads, int k_num_heads, int causal
    ) -> (Tensor, Tensor, Tensor, Tensor)""",
    "causal_conv": """(
        Tensor input, Tensor weight, Tensor? bias, Tensor? past_state, str activation
    ) -> (Tensor, Tensor)""",
    "mixture_of_experts": """(
        Tensor x, Tensor index, Tensor weight, Tensor up, Tensor down, *, str activation, int gated
    ) -> Tensor""",
    "feature_map": """(
        Tensor x, Tensor[] parameters, str kind, int num_heads, str side="query", bool log=False
    ) -> Tensor""",
}

library = torch.library.Library("linexport", "DEF")
for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema)


def linear_attention(
    *inputs: Tensor | None, decay_scale: Tensor | None = None, **attributes: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``functional.linear_attention``."""
    spec = LinearAttentionSpec.from_attributes(attributes)
    outputs = functional.chunked_linear_attention(spec, *inputs, decay_scale)  # type: ignore[arg-type, call-arg]
    output, state, normalizer = (x.contiguous() for x in outputs)
    return output, state, normalizer


def linear_attention_shapes(
    *inputs: Tensor | None, decay_scale: Tensor | None = None, **attributes: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The same on tensors without values."""
    spec = LinearAttentionSpec.from_attributes(attributes)
    shapes = (None if x is None else tuple(x.shape) for x in (*inputs, decay_scale))
    sizes = spec.check(*shapes)  # type: ignore[arg-type]
    query, key, value, past_state, past_normalizer, decay, beta, key_mask = inputs
    assert query is not None and key is not None
    sequences = (value, decay, beta, key_mask)
    _tie(query if spec.causal else key, (key, *sequences), (query, past_state, past_normalizer))
    batch, length = query.shape[:2]
    heads, dtype = spec.kv_num_heads, torch.promote_types(query.dtype, torch.float32)
    return (
        query.new_empty(batch, length, spec.output_heads * sizes.d_v),
        query.new_empty(batch, heads, sizes.d_k, sizes.d_v, dtype=dtype),
        query.new_empty(batch, heads, sizes.d_k, dtype=dtype),
    )


def _tie(
    first: Tensor, sequences: Iterable[Tensor | None], others: Iterable[Tensor | None]
) -> None:
    """Make it known that sizes which are traced as separate symbols are equal.

    ``sequences`` have the batch and the length of the first, ``others`` its batch.
    """
    for sequence in sequences:
        if sequence is not None:
            torch._check(sequence.shape[0] == first.shape[0])
            torch._check(sequence.shape[1] == first.shape[1])
    for other in others:
        if other is not None:
            torch._check(other.shape[0] == first.shape[0])


def recurrent_generalized_delta_rule(
    *inputs: Tensor | None, num_heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    """See ``linexport.models.generalized_delta_rule``; a copy, as operators return no inputs."""
    output, state = generalized_delta_rule.recurrent(*inputs, num_heads=num_heads, scale=scale)  # type: ignore[arg-type]
    return output, state.clone()


def generalized_delta_rule_shapes(
    *inputs: Tensor | None, num_heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The same on tensors without values."""
    shapes = (None if x is None else tuple(x.shape) for x in inputs)
    sizes = generalized_op.check(num_heads, *shapes)  # type: ignore[arg-type]
    query, value = inputs[0], inputs[2]
    assert query is not None and value is not None
    _tie(query, (*inputs[1:6], inputs[7]), (inputs[6],))
    dtype = torch.promote_types(query.dtype, torch.float32)
    state = query.new_empty(query.shape[0], num_heads, sizes.d_k, sizes.d_v, dtype=dtype)
    return query.new_empty(*query.shape[:2], value.shape[2]), state


def stabilized_exp(*arguments: Any) -> Stabilized:
    """See ``stabilize.stabilized_exp``; contiguous, as no output may be a view of another."""
    q, k, decay, key_max = (x.contiguous() for x in plain_stabilized_exp(*arguments))
    return q, k, decay, key_max.clone()


def stabilized_exp_shapes(
    query: Tensor,
    key: Tensor,
    past_key_max: Tensor | None,
    key_mask: Tensor | None,
    decay: Tensor | None,
    q_num_heads: int,
    k_num_heads: int,
    causal: int,
) -> Stabilized:
    """The same on tensors without values."""
    inputs = (query, key, past_key_max, key_mask, decay)
    shapes = (None if x is None else tuple(x.shape) for x in inputs)
    features = stabilize_op.check(q_num_heads, k_num_heads, causal, *shapes)  # type: ignore[arg-type]
    _tie(query, (key, key_mask, decay), (past_key_max,))
    batch, length = query.shape[:2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    served = max(q_num_heads, k_num_heads)
    return (
        query.new_empty(batch, length, served * features, dtype=dtype),
        query.new_empty(batch, length, k_num_heads * features, dtype=dtype),
        query.new_empty(batch, length, k_num_heads * features, dtype=dtype),
        query.new_empty(batch, k_num_heads, features, dtype=dtype),
    )


def causal_conv_shapes(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    past_state: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """``functional.plain_causal_conv`` on tensors without values."""
    optional = (None if x is None else x.shape for x in (bias, past_state))
    size = conv_op.check(activation, input.shape, weight.shape, *optional)
    return torch.empty_like(input), input.new_empty(*input.shape[:2], size - 1)


def mixture_of_experts_shapes(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: str,
    gated: int,
) -> Tensor:
    """``experts.every_expert`` on tensors without values."""
    shapes = (tuple(t.shape) for t in (x, index, weight, up, down))
    sizes = experts_op.check(activation, bool(gated), *shapes)
    for chosen in (index, weight):
        torch._check(chosen.shape[0] == x.shape[0])
    return x.new_empty(x.shape[0], sizes.width_out)


def feature_map(
    x: Tensor,
    parameters: list[Tensor],
    kind: str,
    num_heads: int,
    side: str = "query",
    log: bool = False,
) -> Tensor:
    """One side of phi on every head of (B, T, num_heads * d), see ``base.apply_packed``.

    A copy, as operators may not return views.
    """
    return base.apply_packed(kind, x, parameters, num_heads, side, log).clone()


def feature_map_shapes(
    x: Tensor,
    parameters: list[Tensor],
    kind: str,
    num_heads: int,
    side: str = "query",
    log: bool = False,
) -> Tensor:
    """The same on tensors without values: a formula of many products takes seconds to trace."""
    found = feature_map_op.formulas(kind)
    found.side(side, log)
    features = found.features(x.shape[-1] // num_heads, *(tuple(p.shape) for p in parameters))
    dtype = torch.promote_types(x.dtype, torch.float32) if log else x.dtype
    return x.new_empty(*x.shape[:-1], num_heads * features, dtype=dtype)


_EVERYWHERE = "CompositeExplicitAutograd"
library.impl("linear_attention", linear_attention, _EVERYWHERE)
library.impl("generalized_delta_rule", recurrent_generalized_delta_rule, _EVERYWHERE)
library.impl("stabilized_exp", stabilized_exp, _EVERYWHERE)
library.impl("causal_conv", functional.plain_causal_conv, _EVERYWHERE)
library.impl("mixture_of_experts", experts.every_expert, _EVERYWHERE)
library.impl("feature_map", feature_map, _EVERYWHERE)
torch.library.register_fake("linexport::linear_attention", linear_attention_shapes, lib=library)
torch.library.register_fake(
    "linexport::generalized_delta_rule", generalized_delta_rule_shapes, lib=library
)
torch.library.register_fake("linexport::stabilized_exp", stabilized_exp_shapes, lib=library)
torch.library.register_fake("linexport::causal_conv", causal_conv_shapes, lib=library)
torch.library.register_fake("linexport::mixture_of_experts", mixture_of_experts_shapes, lib=library)
torch.library.register_fake("linexport::feature_map", feature_map_shapes, lib=library)
