"""Base of models of several attention layers, and their settings layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, fields

from linexport.errors import UsageError
from linexport.models.attention import AttentionConfig, LinearAttention
from linexport.models.config import bounded, parse
from linexport.models.softmax_attention import SoftmaxAttention
from linexport.models.window_attention import WindowedAttention, WindowedConfig

Attention = LinearAttention | SoftmaxAttention

ATTENTION: dict[str, type[Attention]] = {
    "linear": LinearAttention,
    "softmax": SoftmaxAttention,
    "window": WindowedAttention,
}
"""The field ``attention`` of a config, and the layer it asks for."""


@dataclass(frozen=True, kw_only=True)
class StackConfig(AttentionConfig):
    """Configuration of a whole model; the attention fields apply to every layer.

    Attributes:
        layers: blocks.
        hidden_dim: inside the feed-forward layers; None: four times dim.
        attention: linear; softmax, which leaves the feature map and its options aside; or window,
            softmax over the last tokens and the feature map for older ones.
        window: tokens that layers of the last kind see exactly.
        sinks: first tokens that they see exactly, too.
        per_layer: what differs in each layer, as fields of ``AttentionConfig``, ``attention``,
            ``window`` or ``sinks``; None: nothing does in any.
        kernel_feed_forward: configs of the ``KernelFeedForward`` layers that take the place of a
            linear layer and its activation, by the path of the linear layer; None: there are none.
    """

    layers: int
    hidden_dim: int | None = None
    attention: str = "linear"
    window: int = 64
    sinks: int = bounded(0, at_least=0)
    per_layer: list[dict[str, object]] | None = None
    kernel_feed_forward: dict[str, dict[str, object]] | None = None


def attention_layer(config: StackConfig, at: int, causal: bool) -> Attention:
    """The attention of layer ``at``, freshly initialised.

    Raises:
        UsageError: an unknown kind of attention, an entry of ``per_layer`` too many or too few, or
            one that does not fit; and what the layers raise.
    """
    own = config.per_layer if config.per_layer is not None else [{}] * config.layers
    if len(own) != config.layers or not isinstance(own[at], dict):
        raise UsageError(
            f"per_layer is {own!r}; expected one object of fields for each of {config.layers} "
            "layers."
        )
    kind = own[at].get("attention", config.attention)
    if kind not in ATTENTION:
        raise UsageError(f"attention is {kind!r}; expected one of {', '.join(ATTENTION)}.")
    known = WindowedConfig if kind == "window" else AttentionConfig
    values = {f.name: getattr(config, f.name) for f in fields(known)}
    values |= {name: value for name, value in own[at].items() if name != "attention"}
    return ATTENTION[str(kind)](parse(known, values, f"layer {at}"), causal)
