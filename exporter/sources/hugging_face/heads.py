"""The part of a model that gives its outputs, chosen by the ``architectures`` of config.json.

    ...ForCausalLM                 logits (B, T, vocabulary)
    ...ForTokenClassification      logits (B, T, labels)
    ...ForSequenceClassification   logits (B, labels), of the last token that is not padding
    ...Model                       last_hidden_state (B, T, width), or pooled (B, width)

Pooling of the hidden states h_t of a row, m_t = 1 for tokens and 0 for padding:

    mean    sum_t m_t h_t / sum_t m_t
    last    h_t of the last t with m_t = 1
    cls     h_t of the first t with m_t = 1
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from linexport.errors import UsageError
from linexport.manifest.records import HeadName
from linexport.sources.files import refuse
from linexport.system.json_object import JsonObject
from linexport.system.untyped import LibraryObject

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
    """

    name: HeadName
    auto: str
    output: str = "logits"
    pads: bool = False
    pool: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def by_token(self) -> bool:
        """True where each token has an output, so that sequences can be fed in pieces."""
        return self.pool is None and not self.pads

    def result(self, output: LibraryObject, mask: Tensor) -> Tensor:
        """Return the output of the head.

        Args:
            output: what the library returns.
            mask: (B, T), 1 for tokens and 0 for padding.
        """
        values: Tensor = output["last_hidden_state" if self.pool else self.output]
        return values if self.pool is None else self.pool(values, mask)

    def padded(self, model: LibraryObject, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Return the token ids with the model's own id where the mask says padding."""
        if not self.pads:
            return input_ids
        return torch.where(mask.bool(), input_ids, model.config.get_text_config().pad_token_id)


def _mean(hidden: Tensor, mask: Tensor) -> Tensor:
    kept = torch.where(mask.bool()[..., None], hidden, 0.0)
    return kept.sum(1) / mask.sum(1, keepdim=True).clamp(min=1).to(hidden.dtype)


def _last(hidden: Tensor, mask: Tensor) -> Tensor:
    place = torch.arange(mask.shape[1])
    return _at(hidden, (place * mask).argmax(-1))


def _first(hidden: Tensor, mask: Tensor) -> Tensor:
    return _at(hidden, mask.argmax(-1))


def _at(hidden: Tensor, place: Tensor) -> Tensor:
    return hidden[torch.arange(hidden.shape[0]), place]


POOLINGS = {"mean": _mean, "last": _last, "cls": _first}
"""Poolings by name."""

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


def head_of(path: Path, config: JsonObject, pooling: str | None) -> Head:
    """Return the head of the model that a configuration names.

    Args:
        path: of the configuration, for errors.
        config: that configuration; without architectures it is a causal language model's.
        pooling: one of ``POOLINGS``, or None.

    Raises:
        UsageError: an unknown pooling, or one for a model with a head.
        UnsupportedModelError: another head.
    """
    check_pooling(pooling)
    named = (config.get("architectures") or [""])[0]
    task = re.search(r"For([A-Z]\w*)$", named)
    head = CAUSAL
    if task is not None:
        if task[1] not in HEADS:
            raise refuse(
                path,
                f"the architecture {named}; converted are those ending in {CONVERTED}",
                "save the base model alone with transformers' save_pretrained, and convert that",
            )
        head = HEADS[task[1]]
    elif named.endswith("Model") and not named.endswith("LMHeadModel"):
        head = BASE
    if pooling is None:
        return head
    if head is not BASE:
        raise UsageError(
            f"--pooling {pooling} is for a base model, whose output is hidden states; {path} names "
            f"{named or 'no architecture, so a causal language model'}. Save the base model alone: "
            "AutoModel.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)."
        )
    return replace(BASE, name="pooled", output="pooled", pool=POOLINGS[pooling])


def check_pooling(pooling: str | None) -> None:
    """Refuse a pooling that there is not.

    Raises:
        UsageError: it is not one of ``POOLINGS``.
    """
    if pooling is not None and pooling not in POOLINGS:
        known = ", ".join(POOLINGS)
        raise UsageError(f"--pooling is {pooling!r}; expected one of {known}.")


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


def modules_left_out(folder: Path, head: Head) -> tuple[str, ...]:
    """Warn of what sentence-transformers computes after a base model, which is not converted."""
    path = folder / "modules.json"
    if head.name not in ("hidden_states", "pooled") or not path.is_file():
        return ()
    types = re.findall(r'"type"\s*:\s*"[\w.]*?(\w+)"', path.read_text(encoding="utf-8"))
    left = [t for t in types if t != "Transformer" and not (t == "Pooling" and head.pool)]
    if not left:
        return ()
    pool = " Pool with --pooling." if "Pooling" in left else ""
    return (
        "modules.json names what sentence-transformers computes after the model: "
        f"{', '.join(left)}. That is not part of the artifact.{pool}",
    )
