"""Encoders that are made of a causal hybrid, as LFM2.5-Embedding and LFM2.5-ColBERT are.

    attention      softmax over all tokens of a row that are not padding
    convolution    y_t = b + sum_i w_i x_{t + i - (K - 1) / 2}, with x = 0 at padding, for odd K

Their checkpoints bring code that changes the library's layers so; none of it is run. Weights are
those of the causal class, which transformers builds. Source: the model cards of LiquidAI, and
``Lfm2Bidirectional`` of later releases of transformers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from linexport.manifest.records import POOLING_MASK
from linexport.sources.files import refuse
from linexport.sources.hugging_face.folder import CONFIG, ENCODERS, digest
from linexport.sources.hugging_face.heads import KEPT, Head
from linexport.sources.hugging_face.named_class import named_class
from linexport.sources.hugging_face.pretrained import build_causal
from linexport.sources.loaded_model import LanguageFacts, LoadedModel, Source
from linexport.sources.packed import StoredWeights
from linexport.sources.weights import check_finite, named_tensors, parameter_summary
from linexport.system.json_object import JsonObject
from linexport.system.untyped import LibraryObject

EXAMPLE = (2, 7)


def is_encoder(config: JsonObject) -> bool:
    """Return whether a configuration names one of these encoders."""
    return named_class(config) in ENCODERS


class Bidirectional(nn.Module):
    """An encoder of LFM2's layers.

    Args:
        model: the causal model of transformers.
        head: gives the output of its hidden states.
    """

    def __init__(self, model: LibraryObject, head: Head) -> None:
        super().__init__()
        self.model, self.head = model, head
        if isinstance(head.pool, nn.Module):
            self.modules_behind = head.pool

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, pooling_mask: Tensor | None = None
    ) -> Tensor:
        """Return the output of the head.

        Args:
            input_ids: (B, T), int64.
            attention_mask: (B, T), int64, 1 for tokens and 0 for padding.
            pooling_mask: (B, T), int64, see ``Head.result``.
        """
        hidden: Tensor = self.model.embed_tokens(input_ids)
        # Turning queries and keys by further places changes no score: padding may be on the left.
        places = torch.arange(input_ids.shape[1])[None]
        turned = self.model.rotary_emb(hidden, position_ids=places)
        kept = attention_mask.to(hidden.dtype)
        excluded = (1 - kept[:, None, None, :]) * torch.finfo(hidden.dtype).min
        for layer in self.model.layers:
            x = layer.operator_norm(hidden)
            if layer.is_attention_layer:
                x = layer.self_attn(x, position_embeddings=turned, attention_mask=excluded)[0]
            else:
                x = _convolved(layer.conv, x * kept[..., None])
            hidden = hidden + x
            hidden = hidden + layer.feed_forward(layer.ffn_norm(hidden))
        return self.head.result(
            {"last_hidden_state": self.model.embedding_norm(hidden)}, attention_mask, pooling_mask
        )


def _convolved(block: LibraryObject, x: Tensor) -> Tensor:
    """Return the gated convolution of a layer, centred."""
    before, after, inner = block.in_proj(x).transpose(-1, -2).chunk(3, dim=-2)
    weight = block.conv.weight
    mixed = F.conv1d(
        before * inner,
        weight,
        block.conv.bias,
        padding=weight.shape[-1] // 2,
        groups=weight.shape[0],
    )
    found: Tensor = block.out_proj((after * mixed).transpose(-1, -2))
    return found


def load(
    folder: Path, config: JsonObject, weights: StoredWeights, head: Head, location: str
) -> LoadedModel:
    """Return the encoder of a folder.

    Args:
        folder: with config.json and safetensors files; code in it is not run.
        config: its configuration.
        weights: of it.
        head: gives the output.
        location: what the user called the folder.

    Raises:
        EnvironmentProblemError: transformers is not installed.
        UnsupportedModelError: a convolution of even length, or as ``build_causal`` says.
    """
    kernel = config.get("conv_L_cache", 3)
    if not isinstance(kernel, int) or kernel % 2 == 0:
        raise refuse(
            folder / CONFIG,
            f"conv_L_cache {kernel!r}; a centred convolution is of odd length",
            "take the folder as its author published it",
        )
    named = str(named_class(config))
    causal = {**config, "architectures": [ENCODERS[named]]}
    causal.pop("auto_map", None)
    model = build_causal(folder, causal, weights, head.auto, False)
    check_finite(named_tensors(model), location)
    ids = torch.arange(EXAMPLE[0] * EXAMPLE[1]).reshape(EXAMPLE) % int(model.config.vocab_size)
    tokens, masks = {0: Dim("batch"), 1: Dim("seq")}, 1 if head.takes_prompt else 2
    return LoadedModel(
        module=Bidirectional(model.eval().float(), head).eval(),
        args=(ids, *[torch.ones_like(ids)] * masks),
        kwargs={},
        dynamic_shapes=(tokens,) * (1 + masks),
        source=Source(
            kind="hugging_face",
            location=location,
            sha256=digest([folder / CONFIG, *weights.files, *getattr(head.pool, "files", ())]),
            description=f"{config['model_type']}: {parameter_summary(named, model)}, bidirectional",
        ),
        integer_ranges={
            **{0: (0, int(model.config.vocab_size)), 1: (1, 2)},
            **({} if head.takes_prompt else KEPT),
        },
        language=LanguageFacts(
            vocabulary=int(model.config.vocab_size),
            context=model.config.max_position_embeddings,
            layers=tuple(f"model.layers.{i}" for i in range(len(model.layers))),
            head=head.name,
        ),
        outputs=(head.output,),
        defaults={"attention_mask": 1, POOLING_MASK: 1},
    )
