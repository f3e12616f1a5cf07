"""Multi-head linear attention as a layer.

    q = phi(W_q x)   k = phi(W_k x)   v = W_v x        x (B, T, dim), phi on every head
    gated rules:     decay = log sigmoid(W_g x + b)    per kv head, or per key channel
    delta rules:     beta = sigmoid(W_b x + c) per kv head, and k / |k|, so that a step with
                     beta = 1 replaces what is stored under k and never overshoots
    output           W_o linear_attention(q, k, v)     (B, T, dim)

Query heads may outnumber key/value heads (grouped, multi-query) or the reverse.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from linexport.errors import UsageError
from linexport.models import feature_maps
from linexport.models.mapped_attention import AttentionState as AttentionState
from linexport.models.mapped_attention import check_map, initial_state, mapped_attention
from linexport.plugins.ops.linear_attention.spec import LinearAttentionSpec

# exp(log sigmoid 4) = 0.98: a fresh layer forgets over some 50 tokens, not over 2.
_SLOW_DECAY = 4.0


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Sizes and choices of one layer.

    Attributes:
        dim: width of input and output.
        num_heads: of queries.
        kv_heads: of keys and values; None: num_heads.
        head_dim: of queries and keys, before the feature map; None: dim / num_heads.
        value_dim: of each value head; None: head_dim.
        feature_map: name of the map phi.
        feature_map_options: of the map, by name; None: all at their defaults.
        normalize: divide by phi(q) . z + eps.
        update_rule: linear, gated, delta or gated_delta.
        decay_per_channel: gated rules forget per key channel rather than per head.
        eps: added to the denominator.
        scale: factor of the queries.
    """

    dim: int
    num_heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    feature_map: str = "elu1"
    feature_map_options: dict[str, object] | None = None
    normalize: bool = True
    update_rule: str = "linear"
    decay_per_channel: bool = False
    eps: float = 1e-6
    scale: float = 1.0

    def width_per_head(self) -> int:
        """``head_dim``, or what ``dim`` leaves each head.

        Raises:
            UsageError: dim does not split into the heads.
        """
        if self.head_dim is None and self.dim % self.num_heads:
            raise UsageError(
                f"dim {self.dim} does not split into num_heads {self.num_heads}. "
                "Set head_dim, or choose a multiple."
            )
        return self.head_dim or self.dim // self.num_heads


class LinearAttention(nn.Module):
    """The layer above; ``causal=False`` lets every token see the whole sequence.

    Raises:
        UsageError: unknown feature map or option of it, or dim that head_dim=None cannot split.
        OpError: settings that contradict each other.
    """

    def __init__(self, config: AttentionConfig, causal: bool = True) -> None:
        super().__init__()
        head_dim = config.width_per_head()
        value_dim = config.value_dim or head_dim
        self.spec = LinearAttentionSpec(
            q_num_heads=config.num_heads,
            kv_num_heads=config.kv_heads or config.num_heads,
            update_rule=config.update_rule,
            causal=causal,
            normalize=config.normalize,
            scale=config.scale,
            eps=config.eps,
        )
        heads = self.spec.kv_num_heads
        # One map for both sides: phi(q) and phi(k) must share what a random map drew.
        self.feature_map = feature_maps.make(
            config.feature_map, head_dim, config.feature_map_options
        )
        check_map(self.feature_map, self.spec)
        self.value_dim = value_dim
        self.query = nn.Linear(config.dim, config.num_heads * head_dim, bias=False)
        self.key = nn.Linear(config.dim, heads * head_dim, bias=False)
        self.value = nn.Linear(config.dim, heads * value_dim, bias=False)
        self.output = nn.Linear(self.spec.output_heads * value_dim, config.dim, bias=False)
        if self.spec.has_decay:
            gates = heads * (self.feature_map.features if config.decay_per_channel else 1)
            self.decay = nn.Linear(config.dim, gates)
            nn.init.constant_(self.decay.bias, _SLOW_DECAY)
        if self.spec.has_beta:
            self.beta = nn.Linear(config.dim, heads)

    def initial_state(self, batch: int) -> AttentionState:
        """The state before the first token."""
        weight, value_dim = self.query.weight, self.value_dim
        return initial_state(self.feature_map, self.spec, weight, batch, value_dim)

    def forward(
        self, x: Tensor, key_mask: Tensor | None = None, state: AttentionState | None = None
    ) -> tuple[Tensor, AttentionState]:
        """Output (B, T, dim) and the state after the last token.

        Args:
            x: (B, T, dim).
            key_mask: (B, T) bool; False for a padded token, which no token attends to.
            state: of the tokens before x; None: there are none. Causal layers only.
        """
        output, state = mapped_attention(
            self.feature_map,
            self.spec,
            self.query(x),
            self.key(x),
            self.value(x),
            state,
            F.logsigmoid(self.decay(x)) if self.spec.has_decay else None,
            self.beta(x).sigmoid() if self.spec.has_beta else None,
            key_mask,
        )
        return self.output(output), state
