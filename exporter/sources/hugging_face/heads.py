"""The part of a model that gives its outputs, chosen by the ``architectures`` of config.json.

...ForCausalLM                 logits (B, T, vocabulary)
...ForTokenClassification      logits (B, T, labels)
...ForSequenceClassification   logits (B, labels), of the last token that is not padding
...Model                       last_hidden_state (B, T, width), or pooled (B, width)
modules.json beside it         sentence_embedding (B, size), or token_embeddings (B, T, size)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from linexport.manifest.records import HeadName
from linexport.sources.files import refuse
from linexport.sources.hugging_face.named_class import named_class
from linexport.system.json_object import JsonObject
from linexport.system.untyped import LibraryObject

KEPT = {2: (0, 2)}
"""Integers to draw for ``POOLING_MASK`` in checks, by the place of the input."""

HIDDEN = "last_hidden_state"
"""Name of the output that a head for multi-token prediction reads."""


@dataclass(frozen=True)
class Head:
    """The part of a model that is converted.

    Attributes:
        name: in the manifest.
        auto: the class of transformers that builds such models.
        output: name of the output, also in what the library returns.
        pads: the class finds padding by the id of its token, not by the mask.
        pool: hidden states (B, T, width) and mask (B, T) to (B, width); None: one for each token.
        takes_prompt: all tokens are pooled; False: those that a mask of its own says, the third
            argument of ``pool``.
    """

    name: HeadName
    auto: str
    output: str = "logits"
    pads: bool = False
    pool: Callable[..., Tensor] | None = None
    takes_prompt: bool = True

    @property
    def by_token(self) -> bool:
        """True where each token has an output, so that sequences can be fed in pieces."""
        return self.pool is None and not self.pads

    def result(
        self, output: LibraryObject, mask: Tensor, pooling_mask: Tensor | None = None
    ) -> Tensor:
        """Return the output of the head.

        Args:
            output: what the library returns.
            mask: (B, T), 1 for tokens and 0 for padding.
            pooling_mask: (B, T), 0 for tokens that are not pooled; None for none.
        """
        values: Tensor = output["last_hidden_state" if self.pool else self.output]
        if self.pool is None:
            return values
        return self.pool(values, mask, *(() if pooling_mask is None else (pooling_mask,)))

    def padded(self, model: LibraryObject, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Return the token ids with the model's own id where the mask says padding."""
        if not self.pads:
            return input_ids
        return torch.where(mask.bool(), input_ids, model.config.get_text_config().pad_token_id)


CAUSAL = Head("causal_lm", "AutoModelForCausalLM")
BASE = Head("hidden_states", "AutoModel", "last_hidden_state")
HEADS = {
    "CausalLM": CAUSAL,
    "ConditionalGeneration": CAUSAL,
    "TokenClassification": Head("token_classification", "AutoModelForTokenClassification"),
    "SequenceClassification": Head(
        "sequence_classification", "AutoModelForSequenceClassification", pads=True
    ),
}
"""Heads by the end of a class name, after "For"."""

CONVERTED = "ForCausalLM, ForTokenClassification, ForSequenceClassification and base models"


def named_head(path: Path, config: JsonObject) -> Head:
    """Return the head of the class that a configuration names.

    Args:
        path: of the configuration, for errors.
        config: that configuration; without architectures it is a causal language model's.

    Raises:
        UnsupportedModelError: another head.
    """
    named = named_class(config) or ""
    task = re.search(r"For([A-Z]\w*)$", named)
    if task is not None:
        if task[1] not in HEADS:
            raise refuse(
                path,
                f"the architecture {named}; converted are those ending in {CONVERTED}",
                "save the base model alone with transformers' save_pretrained, and convert that",
            )
        return HEADS[task[1]]
    return BASE if named.endswith("Model") and not named.endswith("LMHeadModel") else CAUSAL


def check_padding(folder: Path, head: Head, model: LibraryObject) -> None:
    """Refuse a classifier of sequences that does not know the token of padding.

    Raises:
        UnsupportedModelError: it has no pad_token_id, so that transformers takes no batch.
    """
    if head.pads and model.config.get_text_config().pad_token_id is None:
        raise refuse(
            folder,
            f"{type(model).__name__} without a pad_token_id in its configuration; transformers "
            "finds the last token by it, and takes single sequences only without",
            "set pad_token_id in config.json to the id that sequences were padded with in training",
        )
