"""A head for multi-token prediction, from the weights ``mtp.*`` that transformers leaves aside.

    x_t = fc [norm(embedding of token t+1), norm(h_t)]
    g_t = norm(decoder layer(x_1 ... x_t))              softmax attention, with keys and values kept
    logits of token t+2 = head(g_t)

h is what the model gives to its head, after its last norm. Embeddings and head are the model's own.
In the place of h_t+1, which is not known before token t+1 was fed to the model, g_t goes on to a
further token. Sources: F. Gloeckle et al., Better & Faster Large Language Models via Multi-token
Prediction, 2024; DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 2.2; the layout of the
weights is that of Qwen3-Next and Qwen3.5.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from linexport.errors import UnsupportedModelError
from linexport.sources.hugging_face.causal_model import OriginalCausalModel, last_hidden_states
from linexport.sources.hugging_face.folder import check_weights
from linexport.sources.hugging_face.heads import CAUSAL
from linexport.sources.hugging_face.streaming_model import (
    BEFORE,
    NOW,
    ROWS,
    Outputs,
    Streaming,
    example_past,
    stepwise,
)
from linexport.sources.loaded_model import LoadedModel, Source
from linexport.sources.packed import StoredWeights
from linexport.sources.weights import check_finite
from linexport.system.untyped import LibraryObject

PREFIX = "mtp."
"""Beginning of the weights' names."""

FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Types of language models whose heads have this layout."""

EXPERT = re.compile(r"(.*\.mlp\.experts)\.0\.gate_proj\.weight")
"""Name of a weight of a single expert; transformers has those of all experts together."""

PARTS = ("gate", "up", "down")


class Projection(nn.Module):
    """Tokens (B, T) and hidden states (B, T, width) -> x (B, T, width)."""

    def __init__(self, embeddings: nn.Module, norm: type[nn.Module], width: int, eps: float):
        super().__init__()
        self.embeddings = embeddings
        self.pre_fc_norm_embedding = norm(width, eps=eps)
        self.pre_fc_norm_hidden = norm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)

    def forward(self, input_ids: Tensor, hidden_states: Tensor) -> dict[str, Tensor]:
        """Return x by the name that the library has for it."""
        token = self.pre_fc_norm_embedding(self.embeddings(input_ids))
        joined = torch.cat([token, self.pre_fc_norm_hidden(hidden_states)], -1)
        return {"inputs_embeds": self.fc(joined)}


class OriginalPredictor(OriginalCausalModel):
    """The head by the library's own layers: the original."""

    def __init__(self, model: LibraryObject, projection: Projection) -> None:
        super().__init__(model)
        self.projection = projection

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits, and g."""
        given = self.projection(input_ids, hidden_states)
        with last_hidden_states(self.model) as found:
            logits = self.called(given, attention_mask)
        return logits, found[-1]


class StreamingPredictor(Streaming):
    """The head with its keys and values as inputs and outputs."""

    def __init__(self, model: LibraryObject, projection: Projection) -> None:
        super().__init__(model, CAUSAL, hidden=True)
        self.projection = projection

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        hidden_states: Tensor,
        past: Mapping[str, Tensor],
    ) -> tuple[Outputs, dict[str, Tensor]]:
        """Logits and g, and the present states."""
        return self.advance(self.projection(input_ids, hidden_states), attention_mask, past)


def load_predictor(
    folder: Path, weights: StoredWeights, model: LibraryObject, source: Source
) -> LoadedModel:
    """Return the head of a model, as a model of its own.

    Args:
        folder: of the model, for errors.
        weights: of the folder.
        model: of transformers, whose embeddings and head it shares.
        source: of that.

    Raises:
        UnsupportedModelError: another family, or weights of another layout.
    """
    text = model.config.get_text_config(decoder=True)
    if text.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"its layout is known of {', '.join(FAMILIES)}, and this is {text.model_type}"
        )
    own = _stacked(_own(weights), getattr(text, "num_experts", 0))
    check_finite(
        ((f"{PREFIX}{name}", nn.Parameter(weight)) for name, weight in own.items()), str(folder)
    )
    layer, projection = _built(folder, own, model, text)

    def draw(length: int) -> tuple[Tensor, ...]:
        ids = torch.zeros(ROWS, length, dtype=torch.int64)
        generator = torch.Generator().manual_seed(length)
        hidden = torch.randn(ROWS, length, text.hidden_size, generator=generator)
        return ids, torch.ones_like(ids), hidden

    streaming = StreamingPredictor(layer, projection).eval()
    step = stepwise(streaming, example_past(streaming, draw(BEFORE)), draw(NOW))
    return LoadedModel(
        module=OriginalPredictor(layer, projection).eval(),
        args=step.args[:3],
        kwargs={},
        dynamic_shapes=step.dynamic_shapes[:3],
        source=source,
        integer_ranges={0: (0, int(text.vocab_size)), 1: (1, 2)},
        decode_module=step,
        defaults={"attention_mask": 1},
    )


def _own(weights: StoredWeights) -> dict[str, Tensor]:
    """Read the weights of the head, without their prefix."""
    return {t.name.removeprefix(PREFIX): t.read().float() for t in weights.under(PREFIX)}


def _stacked(weights: Mapping[str, Tensor], experts: int) -> dict[str, Tensor]:
    """Return weights with those of all experts as one, where all are there and alike."""
    found = dict(weights)
    for place in {match[1] for match in map(EXPERT.fullmatch, weights) if match}:
        names = [[f"{place}.{i}.{part}_proj.weight" for i in range(experts)] for part in PARTS]
        shapes = [{weights[n].shape if n in weights else None for n in row} for row in names]
        if any(len(shape) > 1 for shape in shapes) or shapes[0] != shapes[1]:
            continue  # they are named as not in the model
        gate, up, down = (torch.stack([found.pop(n) for n in row]) for row in names)
        found |= {f"{place}.gate_up_proj": torch.cat([gate, up], 1), f"{place}.down_proj": down}
    return found


def _built(
    folder: Path, weights: Mapping[str, Tensor], model: LibraryObject, text: LibraryObject
) -> tuple[object, Projection]:
    """Return a causal model of one layer of attention, with the head's weights, and what is before.

    Raises:
        UnsupportedModelError: weights of another layout.
    """
    config = copy.deepcopy(text)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    decoder, embeddings = model.get_decoder(), model.get_input_embeddings()
    classes: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    with torch.device("meta"):
        layer = classes[type(text)](config)
        projection = Projection(embeddings, type(decoder.norm), text.hidden_size, text.rms_norm_eps)
    layer.set_input_embeddings(embeddings)
    layer.set_output_embeddings(model.get_output_embeddings())
    layer.get_decoder().rotary_emb = type(decoder.rotary_emb)(config)  # buffers, and no weights
    layer.set_attn_implementation("eager")
    inside = {
        **{n: p for n, p in layer.model.named_parameters() if not n.startswith("embed_tokens.")},
        **{n: p for n, p in projection.named_parameters() if not n.startswith("embeddings.")},
    }
    check_weights(
        folder,
        (f"{PREFIX}{n}" for n in inside.keys() - weights.keys()),
        (
            (f"{PREFIX}{n}", weights[n].shape, inside[n].shape)
            for n in inside.keys() & weights.keys()
            if weights[n].shape != inside[n].shape
        ),
        (f"{PREFIX}{n}" for n in weights.keys() - inside.keys()),
    )
    for part in (layer.model, projection):
        part.load_state_dict(dict(weights), strict=False, assign=True)
    return layer.eval(), projection.eval()
